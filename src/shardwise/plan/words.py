"""Words in sentences of ours: what the system said of a failure, text that files brought along, counted things."""

import os
from collections.abc import Sequence


def in_words(error: OSError) -> str:
    """What the system said, and about which file, without its numbers: for the middle of a sentence of ours."""
    what = error.strerror or (os.strerror(error.errno) if error.errno is not None else str(error))
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def printable(text: str) -> str:
    """``text`` without what would command a terminal: names in files, and models of bytes, may hold any of it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def grouped(notes: Sequence[str]) -> list[str]:
    """Return ``notes`` with neighbours that differ in their first word alone as one: ``C1 to C26 (...): ...``."""
    found: list[tuple[list[str], str]] = []
    for note in notes:
        name, _, rest = note.partition(" ")
        if found and rest.startswith("(") and found[-1][1] == rest:
            found[-1][0].append(name)
        else:
            found.append(([name], rest))
    said = []
    for names, rest in found:
        who = f"{names[0]} to {names[-1]}, {len(names)} tables," if len(names) > 3 else ", ".join(names)
        said.append(f"{who} {rest}".rstrip())
    return said


def named_ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3, 5``."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer as in a model that ``torch.compile`` did not wrap."""
    return name.replace("_orig_mod.", "")
