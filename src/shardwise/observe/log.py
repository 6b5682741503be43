"""Rank-tagged logs: ``logs/rank_00003.log`` holds what rank 3 had to say.

Every module of Shardwise logs under the name ``shardwise``. Each rank's lines from INFO up go to its own file; the
terminal shows those of rank 0, through a handler that knows how to print above a progress bar.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.plan.words import printable

ROOT = "shardwise"


def log_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """File of one rank."""
    return Path(folder) / f"rank_{rank:05d}.log"


class PrintableFormatter(logging.Formatter):
    """The text alone. Names out of files and words of users may hold what would command a terminal: it is taken out of
    every line here, and so nowhere else."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, its traceback included."""
        return printable(super().format(record))


class RankFormatter(PrintableFormatter):
    """``2026-01-31 12:00:00.123 rank 3 WARNING text``, the time in UTC."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self, rank: int) -> None:
        super().__init__(f"%(asctime)s rank {rank} %(levelname)s %(message)s")


@contextlib.contextmanager
def rank_log(
    rank: int, folder: str | os.PathLike[str] | None, terminal: logging.Handler | None = None
) -> Iterator[logging.Logger]:
    """The ``shardwise`` logger, sending to this rank's file in ``folder`` and to ``terminal`` while it is open."""
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
