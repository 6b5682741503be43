"""Row 3: optimizers on flat shards, clipping, schedules."""
