"""Row 2: file formats of other projects at the level of bytes; higher rows read and write such files."""
