"""Row 2: file formats of others, by their bytes. Who reads and writes such files is above."""
