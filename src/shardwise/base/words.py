"""Format messages: reasons of system errors, text that comes from files, counted things, sizes."""

import os
from collections.abc import Sequence


def in_words(error: OSError) -> str:
    """Return the system's reason for ``error`` and its file, without error numbers, for the middle of a sentence."""
    what = error.strerror or (os.strerror(error.errno) if error.errno is not None else str(error))
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def printable(text: str) -> str:
    """Return ``text`` with every unprintable character replaced, so that it cannot send commands to a terminal.

    Names in files and the output of byte-level models may contain any character.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bytes_text(value: float) -> str:
    """Return bytes as text: ``1.5 GiB``."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}" if value < 100 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} B"


def grouped(notes: Sequence[str]) -> list[str]:
    """Return ``notes`` with neighbours merged that differ only in their first word: ``C1 to C26 (...): ...``."""
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
    """Return rank numbers as text: ``rank 3``, ``ranks 3, 5``."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in a model that ``torch.compile`` did not wrap."""
    return name.replace("_orig_mod.", "")
