"""Output to a terminal that may close during the run.

Examples are a pipe whose reader ends (``| head``), a window that closes, and streams that never existed (``>&-``).
Later output is dropped. It ends neither the run nor the save that a closing window has requested.
"""

import contextlib
import os
import sys
from typing import IO, Any, TextIO, cast

from rich.console import Console


class PipeSafeStream:
    """A text stream that is written as long as its reader exists, and ignored after that."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, or drop it if the reader is gone, and return its length."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if its reader exists."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        """Stop writing and redirect the descriptor to the null device.

        Python flushes the stream once more at its end, which must not fail.
        """
        stream, self._stream = self._stream, None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
            os.close(nowhere)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal; False once the reader is gone."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on the current standard output or standard error that survives the loss of its reader."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=cast(IO[str], PipeSafeStream(stream)), stderr=stderr, quiet=quiet)


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 on the null device if they are closed.

    Otherwise the first files of the run would get these numbers, and output of a library would be written into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != number:
                continue
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
