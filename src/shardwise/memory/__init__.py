"""Row 2: memory of the device, the host and the disk, and the moves of state between them."""
