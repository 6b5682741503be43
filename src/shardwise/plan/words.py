"""Words of others in sentences of ours: what the system said of a failure, and text that files brought along."""

import os


def in_words(error: OSError) -> str:
    """What the system said, and about which file, without its numbers: for the middle of a sentence of ours."""
    what = error.strerror or (os.strerror(error.errno) if error.errno is not None else str(error))
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def printable(text: str) -> str:
    """``text`` without what would command a terminal: names in files, and models of bytes, may hold any of it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
