"""``shardwise.launch(function, ranks=2)``: a function on several ranks of this host, from a script or a notebook cell.

    parent ── fork ──► rank 0 ── function(*arguments) ──► result ──┐
           ── fork ──► rank 1 ── function(*arguments) ──► result ──┴──► rank 0's (or all of them)

The ranks are forks of this process, so the function may be defined in a cell, a closure or ``__main__``, and its
arguments need no copy. The ranks connect through a store as those of ``shardwise launch`` do, with one thread each,
because thread pools do not survive a fork. Results come back through a pipe of this process tree. The first failure
ends all ranks and is raised in this process with its rank's traceback. However this call ends, it ends the ranks and
the processes that they started.
"""

import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import shardwise.launch.failure as failures
from shardwise.base.errors import RankError, UsageError
from shardwise.launch.child import die_with
from shardwise.launch.environment import LaunchJob, of_rank
from shardwise.launch.failure import RankFailure
from shardwise.launch.hosts import LOOPBACK, HostRanks
from shardwise.launch.local import GRACE_S, check_ranks

Result = TypeVar("Result")
"""Type of the function's result."""
_SETTLE_S = 0.5
"""Seconds after the first failure in which other ranks may report theirs, to find the cause and not its effects."""


class _FunctionCall(NamedTuple):
    function: Callable[..., Any]
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    wants: bool
    """True if the result of this rank is returned."""


@overload
def launch(
    function: Callable[..., Result],
    *arguments: Any,
    ranks: int = 2,
    every: Literal[False] = False,
    **named: Any,
) -> Result: ...


@overload
def launch(
    function: Callable[..., Result], *arguments: Any, ranks: int = 2, every: Literal[True], **named: Any
) -> list[Result]: ...


def launch(
    function: Callable[..., Any], *arguments: Any, ranks: int = 2, every: bool = False, **named: Any
) -> Any:
    """Call ``function(*arguments, **named)`` on ``ranks`` ranks of this host.

    Args:
        function: Function that every rank calls.
        *arguments: Positional arguments.
        ranks: Number of ranks.
        every: Return the results of all ranks.
        **named: Keyword arguments.

    Returns:
        Rank 0's result, or a list of all ranks' results if ``every`` is set. ``multiprocessing`` must be able to
        transfer results.

    Raises:
        UsageError: if ranks cannot be forked because this process uses an engine or an accelerator.
        RankError: if a rank fails; contains the traceback of the rank that failed first.
    """
    check_ranks(ranks)
    _check_forkable()
    context = multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp(prefix="shardwise_")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind((LOOPBACK, 0))
        here = HostRanks(ranks, ranks, port=store.getsockname()[1])
        job = LaunchJob(secrets.token_hex(16), here, Path(folder), secrets.token_hex(32))
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                call = _FunctionCall(function, arguments, named, every or rank == 0)
                process = context.Process(
                    target=_be_rank, args=(call, job, rank, store, theirs), daemon=False
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            store.close()
            results = _collect(processes, pipes)
        finally:
            _end(processes)
    return results if every else results[0]


def _check_forkable() -> None:
    if not hasattr(os, "fork"):
        raise UsageError(
            "launch: this system cannot fork; run the script with `shardwise launch --ranks N script.py`"
        )
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise UsageError(
            "launch: this process uses a GPU already, which does not survive a fork; restart it and touch the GPU "
            "inside the function alone"
        )
    # Imported here: torch takes a second, and `shardwise launch` does not need it.
    from shardwise.comm.world import is_joined

    if is_joined():
        raise UsageError(
            "launch: this process belongs to a process group already; call launch before torch's init_process_group, "
            "or use the ranks that are already there"
        )


# In the ranks ------------------------------------------------------------------------------------------------------


def _be_rank(call: _FunctionCall, job: LaunchJob, rank: int, store: socket.socket, pipe: Connection) -> None:
    """Run the function as rank ``rank`` in this process, from its start to its end."""
    os.setsid()  # a process group of its own, so that the processes it starts end with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    environment = of_rank(job, rank, store.fileno() if rank == 0 else None)
    os.environ.clear()
    os.environ.update(environment)
    die_with(parent)
    if rank:
        store.close()
    else:
        store.detach()
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        value = call.function(*call.arguments, **call.named)
        _send(pipe, rank, value if call.wants else None)
    except BaseException as error:
        pipe.send((False, failures.of_exception(rank, error)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _send(pipe: Connection, rank: int, value: Any) -> None:
    try:
        pipe.send((True, value))
    except Exception as error:
        raise UsageError(
            f"launch: the result of rank {rank}, a {type(value).__name__}, cannot be returned ({error}); return "
            "numbers, tensors and plain containers of them"
        ) from None


# Here --------------------------------------------------------------------------------------------------------------


def _collect(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> list[Any]:
    """Return the results by rank, or raise RankError with the first failure."""
    results: dict[int, Any] = {}
    failed: list[RankFailure] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    until_s: float | None = None
    while waiting and (until_s is None or time.monotonic() < until_s):
        patience_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
        for ready in wait(list(waiting), patience_s):
            pipe: Any = ready
            rank = waiting.pop(pipe)
            try:
                is_good, value = pipe.recv()
            except EOFError:
                processes[rank].join(GRACE_S)
                status = processes[rank].exitcode
                is_good, value = (
                    False,
                    failures.of_exit(rank, time.monotonic(), 0 if status is None else status),
                )
            if is_good:
                results[rank] = value
            else:
                failed.append(value)
        if failed and until_s is None:
            until_s = time.monotonic() + _SETTLE_S
    if failed:
        cause = failures.first(failed)
        said = (
            cause.headline
            if cause.is_answer or not cause.traceback
            else f"{cause.headline}\n{cause.traceback}"
        )
        raise RankError(f"rank {cause.rank} failed: {said.rstrip()}")
    return [results[rank] for rank in range(len(pipes))]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End every rank and every process of its group."""
    until_s = time.monotonic() + GRACE_S
    for process in processes:
        if process.is_alive() and sys.exc_info()[0] is not None:
            process.terminate()
    for process in processes:
        process.join(max(until_s - time.monotonic(), 0.0))
    for process in processes:
        if process.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
