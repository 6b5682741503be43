"""A terminal that may go away while the run goes on: a pipe whose reader has enough (``| head``), a window that closes,
streams that were never there (``>&-``).

What is said after that is said to nobody; it does not end the run, nor the save that a closing window has asked for.
"""

import contextlib
import os
import sys
from typing import IO, Any, TextIO, cast

from rich.console import Console


class Lasting:
    """A text stream that is written to as long as somebody is there, and then is silent."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """All of ``text``, or nothing to nobody."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        """Python flushes the stream once more as it ends: what is left in it goes where nobody minds."""
        stream, self._stream = self._stream, None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
            os.close(nowhere)

    def isatty(self) -> bool:
        """False once nobody is there."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console on the standard output, or the standard error, of this moment."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=cast(IO[str], Lasting(stream)), stderr=stderr, quiet=quiet)


def open_standard_streams() -> None:
    """Have descriptors 0, 1 and 2 open: else the first files of the run would get these numbers, and what a library
    prints would go into them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != number:
                continue
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
