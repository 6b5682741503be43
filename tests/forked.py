"""The launcher without its cost: ranks that are forks of this process, which has torch and its compiler already.

A rank that starts as a process of its own takes five seconds of a core for imports before its first line. Tests of
what a command does put ``run`` in the place of ``shardwise.launch.starting.run``; how ranks start, are watched and end
is shown by tests/launch, and by the runs of tests/cli and of tests/test_examples.py that start them for good.
"""

import atexit
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
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


def ranks(who: str, module: str, arguments: Sequence[str], count: int, *_: Any) -> None:
    """As ``shardwise.simulate.calibration.run_ranks``; a failure of a rank is raised with its traceback."""
    assert run(RankProgram("module", module, tuple(arguments)), count) == 0, who


def script(text: str, said: Path) -> int:
    """Run a program with its exit functions, as ``python -c TEXT`` does, and return its code.

    What it prints goes to the file ``said``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        _write_to(said)
        atexit._clear()
        logging.root.handlers.clear()  # pytest's: without one, torch and this package write to the stream of errors
        exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(file: Path) -> None:
    """Send what this process prints to ``file``, and begin with the warnings of a new process."""
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _new_streams()


def _new_streams() -> None:
    """Forget the streams and the filters of pytest, which a new process has not."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")


def _be_rank(program: RankProgram, logs: Path | None) -> int:
    rank = int(os.environ["RANK"])
    if logs is not None and rank:
        logs.mkdir(parents=True, exist_ok=True)
        _write_to(logs / f"rank_{rank:05d}.log")
    else:
        _new_streams()
    try:
        child._run(program.kind, program.name, list(program.arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0
