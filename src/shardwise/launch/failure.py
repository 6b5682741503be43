"""Failures of ranks: reported by the rank itself as JSON, or derived from the end of its process.

When one rank fails, its peers soon fail too, because they wait for it: a broken connection on three ranks and the
one real error. The failure to show is the first in time; among failures that are close together, a failure of
communication yields to any other.

Times are of the monotonic clock, which all processes of one host share. The launcher of several hosts converts the
times of each host to its own clock before it compares them (``link.py``).
"""

import json
import math
import os
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.base.errors import CommError, ConfigError, MeshError, PlanError, ShardwiseError, UsageError
from shardwise.base.regular_files import read_small_file

CLOSE_S = 1.0
"""Seconds between failures of which one may be the cause of the other, in either order of arrival."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_OUR_FRAMES = (
    os.path.join("shardwise", "launch", "child.py"),
    os.path.join("shardwise", "launch", "function.py"),
    "<frozen runpy>",
)
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: ", as the kernel does when memory runs out (see dmesg)",
    signal.SIGSEGV: ": a native library read memory that is not its own",
    signal.SIGBUS: ", often because /dev/shm or the disk of a memory-mapped file is full",
}
_RECORD_BYTES = 64 << 20
_KINDS: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,), bool: (bool,)}
"""JSON types that a field of a record may have, by the field's type."""
_PEER_LOST = ("DistBackendError", "DistNetworkError", "DistStoreError", CommError.__name__)


EXIT_CODES: dict[str, str] = {
    "0": "It went through; also: Ctrl-C between two steps of ``shardwise train``, after which the step is saved.",
    "1": "The run failed: data, a checkpoint, a rank, a number that is not finite; or a defect, which keeps its "
    "traceback. ``inspect``: a step is damaged; ``doctor``: a rank hangs, is slow, or ended with an error.",
    "2": "The configuration or the call is at fault, and nothing was started or written; also: "
    "``train --check --memory`` finds that a step does not fit.",
    "143": "SIGTERM: the running step was finished and saved. A scheduler takes the run for an interrupted one.",
    "138": "SIGUSR1, Slurm's warning before the time limit: the running step was finished and saved.",
    "129": "SIGHUP, as when a terminal closes: the running step was finished and saved.",
    "128 + n": "Killed by signal n; 137 is SIGKILL, as the kernel does when memory runs out. A second Ctrl-C or "
    "SIGTERM ends at once, unsaved.",
    "other": "``launch``: the code of the first rank that failed.",
}
"""Exit codes of the programs and what each means."""


def exit_code(error: BaseException) -> int:
    """Return 2 for errors that the user can repair in the configuration or the call, 1 for any other error."""
    return 2 if isinstance(error, (ConfigError, MeshError, PlanError, UsageError)) else 1


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    time_s: float
    """Time of the failure by the monotonic clock, as near as is known."""
    code: int
    """Exit code of the rank's process; 128 + number for a signal, as in shells."""
    headline: str
    """:func:`headline` of the exception, or how the process ended."""
    traceback: str = ""
    """Traceback without the launcher's own frames; empty for an error that needs none, and for a signal."""
    is_of_peers: bool = False
    """True if the rank failed in communication, so that another rank's failure may be the cause."""
    is_answer: bool = False
    """True for a :class:`ShardwiseError`, whose message is complete without a traceback."""
    host: str = ""
    """Name of the rank's host; "" if the job is on one host."""

    @property
    def place(self) -> str:
        """The rank, and its host if the job is on several hosts."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


def headline(error: BaseException) -> str:
    """Return the first line for an error: ``ValueError: bad value``; for a ShardwiseError only its message."""
    kind = type(error)
    if isinstance(error, ShardwiseError):
        return str(error) or kind.__name__
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {error}" if str(error) else name


def of_exception(rank: int, error: BaseException) -> RankFailure:
    """Build the failure of this rank from the exception that left its program.

    Args:
        rank: This rank.
        error: The exception.
    """
    lineage = {kind.__name__ for kind in type(error).__mro__}
    # gloo raises a plain RuntimeError that carries the path of its source file.
    is_of_peers = bool(lineage.intersection(_PEER_LOST)) or "/gloo/" in str(error)
    text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
    return RankFailure(
        rank=rank,
        time_s=time.monotonic(),
        code=exit_code(error),
        headline=headline(error),
        traceback=text,
        is_of_peers=is_of_peers,
        is_answer=isinstance(error, ShardwiseError),
    )


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's own code; None if there is no such frame.

    Frames of this package, of installed packages and of Python's start are left out.
    """
    while trace is not None and _is_installed(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_installed(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen", *_INSTALLED)) or f"{os.sep}site-packages{os.sep}" in file


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first frame; if there is none, all frames but the launcher's own."""
    if (found := users_part(trace)) is not None:
        return found
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(_OUR_FRAMES):
        trace = trace.tb_next
    return trace


def of_own_exit(rank: int, code: int, said: str) -> RankFailure:
    """Build the failure of a program that ended itself by ``sys.exit``.

    Args:
        rank: The rank.
        code: Exit code.
        said: Message.
    """
    return RankFailure(rank, time.monotonic(), code, said)


def of_exit(rank: int, time_s: float, status: int) -> RankFailure:
    """Build the failure of a process that left no record.

    Args:
        rank: The rank.
        time_s: Time of the failure by the monotonic clock.
        status: Exit status as in :mod:`subprocess`, negative for a signal.
    """
    if status >= 0:
        return RankFailure(rank, time_s, status, f"exited with code {status} and left no traceback")
    number = -status
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return RankFailure(rank, time_s, 128 + number, f"killed by {name}{_SIGNAL_HINTS.get(number, '')}")


def write(failure: RankFailure, path: str | os.PathLike[str]) -> None:
    """Write the record of a failure for the launcher, whole or not at all.

    Args:
        failure: The failure.
        path: File of the record.
    """
    path = Path(path)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    fresh.replace(path)


def kept_path(log: Path) -> Path:
    """Return the file that keeps the failure of the rank with the log file ``log``."""
    return log.with_suffix(".failure.json")


def kept_in(logs: Path) -> list[Path]:
    """Return the files of a folder of logs that keep failures."""
    return sorted(logs.glob("rank_*.failure.json"))


def read(path: str | os.PathLike[str], rank: int, time_s: float) -> RankFailure:
    """Read the record that :func:`write` left.

    Args:
        path: The file; a program of the rank may have written anything into it.
        rank: The rank whose record it is.
        time_s: Time of the failure by the monotonic clock, if the record cannot be read.

    Returns:
        The failure. If the record cannot be read, the failure says so.
    """
    try:
        return replace(
            of_plain(json.loads(read_small_file(path, _RECORD_BYTES, follows_links=False))), rank=rank
        )
    except OSError as error:
        said = error.strerror or str(error)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        said = str(error)[:200]
    return RankFailure(rank, time_s, 1, f"failed, and its record of the failure cannot be read ({said})")


def of_plain(found: dict[str, Any]) -> RankFailure:
    """Return the failure whose fields are in an object of JSON.

    Raises:
        ValueError: if a field has another type, or a number is out of range.
        TypeError: if a field is unknown or missing, or ``found`` is no object.
    """
    kinds = {each.name: _KINDS[each.type] for each in fields(RankFailure)}
    wrong = [name for name, kind in kinds.items() if name in found and type(found[name]) not in kind]
    if wrong:
        raise ValueError(f"{wrong[0]} is a {type(found[wrong[0]]).__name__}")
    failure = RankFailure(**found)
    if abs(failure.code) >= 1 << 31 or not math.isfinite(failure.time_s):
        raise ValueError("code or time_s is out of range")
    return failure


def first(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure to show: the earliest, unless it is of communication and another kind came close after it."""
    in_time = sorted(failures, key=lambda failure: failure.time_s)
    close = (f for f in in_time if f.time_s - in_time[0].time_s <= CLOSE_S)
    return next((f for f in close if not f.is_of_peers), in_time[0])
