"""Optimizers on flat shards, clipping, schedules."""
