"""Logs per rank: ``logs/rank_00003.log`` contains the lines of rank 3.

Every module of Shardwise logs under the name ``shardwise``. Each rank's lines from INFO up go to its own file. The
terminal shows the lines of rank 0, through a handler that can print above a progress bar.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.base.words import printable

ROOT = "shardwise"


def log_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the log file of one rank."""
    return Path(folder) / f"rank_{rank:05d}.log"


class PrintableFormatter(logging.Formatter):
    """Formatter of plain text without unprintable characters.

    Names from files and words of users may contain characters that command a terminal. They are removed from every line
    by this formatter and by no other code.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as text, its traceback included."""
        return printable(super().format(record))


class RankFormatter(PrintableFormatter):
    """Formatter of lines such as ``2026-01-31 12:00:00.123 rank 3 WARNING text``, with the time in UTC."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self, rank: int) -> None:
        super().__init__(f"%(asctime)s rank {rank} %(levelname)s %(message)s")


@contextlib.contextmanager
def rank_log(
    rank: int, folder: str | os.PathLike[str] | None, terminal: logging.Handler | None = None
) -> Iterator[logging.Logger]:
    """Send the ``shardwise`` logger to this rank's file in ``folder`` and to ``terminal`` inside the ``with`` block.

    Args:
        rank: This rank.
        folder: Folder of the logs; None: no file.
        terminal: Handler for the terminal; None: no terminal.
    """
    logger = logging.getLogger(ROOT)
    level = logger.level
    logger.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [terminal] if terminal is not None else []
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Appending: a resumed run continues the file, and the launcher may write to it too.
        in_file = logging.FileHandler(log_path(folder, rank), mode="a", encoding="utf-8")
        in_file.setFormatter(RankFormatter(rank))
        handlers.append(in_file)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
