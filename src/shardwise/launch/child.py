"""The launcher's part in each rank: runs the script or module and reports how it failed.

    python -m shardwise.launch.child (script|module|program) NAME [ARGUMENT ...]

This module must stay light: every rank imports it before any of the user's modules.
"""

import ctypes
import faulthandler
import mmap
import os
import runpy
import signal
import sys
import traceback

import shardwise.launch.failure as failures
from shardwise.launch.environment import RankEnvironment, seat

_PR_SET_PDEATHSIG = 1
_ROOM_BYTES = 8 << 20
"""Addresses that are kept free for the report of a failure, for a rank that has run out of memory; no page is taken."""


def die_with(launcher_pid: int | None) -> None:
    """Have the kernel kill this process when the launcher's process ends, however that happens."""
    if launcher_pid is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher_pid:  # the launcher ended before the line above took effect
        os._exit(128 + signal.SIGKILL)


def _prepare(here: RankEnvironment) -> None:
    """Set up signals, streams and descriptors as a program expects to find them."""
    die_with(here.launcher_pid)
    # A launcher in the background of a shell has SIGINT ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    if here.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, here.cores)
    if here.store_fd is not None:
        os.set_inheritable(here.store_fd, False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Line buffering, because logs are read while the run continues; backslashes, because a name with odd bytes
            # must not end a run.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _run(kind: str, name: str, arguments: list[str]) -> None:
    """Run the program as ``python NAME`` or ``python -m NAME`` would."""
    sys.argv = [name, *arguments]
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        runpy.run_path(name, run_name="__main__")


def _leave(here: RankEnvironment, failure: failures.RankFailure) -> int:
    """Report the failure to the launcher, or to the terminal if there is no launcher, and return its exit code."""
    if here.failure_path is not None:
        failures.write(failure, here.failure_path)
    else:
        print(failure.traceback or failure.headline, file=sys.stderr)
    return failure.code


def main(arguments: list[str]) -> int:
    """Run the program of this rank and return the exit code."""
    here = seat()
    _prepare(here)
    kind, name, *rest = arguments
    if kind == "program":
        if here.store_fd is not None:
            os.set_inheritable(here.store_fd, True)
        try:
            # The program replaces this process, and still dies with the launcher.
            os.execvp(name, [name, *rest])
        except OSError as error:
            return _leave(
                here, failures.of_own_exit(here.rank, 127, f"cannot start {name!r}: {error.strerror}")
            )
    room = mmap.mmap(-1, _ROOM_BYTES)
    try:
        _run(kind, name, rest)
    except SystemExit as end:
        if end.code is None or end.code == 0:
            return 0
        code = end.code if isinstance(end.code, int) else 1
        said = f"exited with code {code}" if isinstance(end.code, int) else str(end.code)
        if code > 128:  # a stop by a signal that the program handled
            return code
        return _leave(here, failures.of_own_exit(here.rank, code, said))
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException as error:
        room.close()
        return _leave(here, failures.of_exception(here.rank, error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
