"""The launcher without its cost: ranks that are forks of this process, which has torch and its compiler already.

A rank that starts as a process of its own takes five seconds of a core for imports before its first line. Tests of
what a command does put ``run`` in the place of ``shardwise.launch.starting.run``; how ranks start, are watched and end
is shown by tests/launch, and by the runs of tests/cli and of tests/test_examples.py that start them for good.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import shardwise
from shardwise.launch import child
from shardwise.launch.hosts import HostRanks
from shardwise.launch.local import RankProgram


def run(
    program: RankProgram, ranks: int | HostRanks, logs: str | os.PathLike[str] | None = None, **_: Any
) -> int:
    """As ``shardwise.launch.local.run``; a failure of a rank is raised with its traceback.

    ``logs``: the other ranks' lines go there, rank 0's to the terminal alone.
    """
    count = ranks if isinstance(ranks, int) else ranks.local
    import torch._dynamo  # noqa: F401  what torch's optimizers import; once here, and not in every rank

    shardwise.initialize  # noqa: B018  the engine too
    folder = None if logs is None else Path(logs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread
        return max(shardwise.launch(_be_rank, program, folder, ranks=count, every=True))


def python(words: list[str]) -> None:
    """``python SCRIPT ARGUMENT ...`` or ``python -m MODULE ARGUMENT ...``."""
    if words[0] == "-m":
        program = RankProgram("module", words[1], tuple(words[2:]))
    else:
        program = RankProgram("script", words[0], tuple(words[1:]))
    assert run(program, 1) == 0, words


def _be_rank(program: RankProgram, logs: Path | None) -> int:
    rank = int(os.environ["RANK"])
    if logs is not None and rank:
        logs.mkdir(parents=True, exist_ok=True)
        log = os.open(logs / f"rank_{rank:05d}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    # As in a new process, where pytest's streams and filters are not.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    try:
        child._run(program.kind, program.name, list(program.arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0
