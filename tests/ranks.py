"""Rank processes for tests: started once, as forks of a server that has torch already, then fed calls over pipes."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

_PATIENCE_S, _LATE_PATIENCE_S = 120.0, 1200.0
"""For one call; late collectives are for whole files at once, on machines that do other things."""
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "shardwise.engine.construction.build",
    "shardwise.kernels.tables",
    "numba",
    "transformers.models.llama.modeling_llama",
]
"""What the server of forks imports once, if it is installed: six seconds of a core, which every rank would take. It
starts no thread."""


class RankPool:
    """n processes that have joined one World, on gloo or on ``backend``, on the CPU or on ``device``; ``late``: as
    tests/comm/late.py has it.

    A failed call closes the pool: its ranks may be out of step.
    """

    def __init__(self, size: int, backend: str | None = None, late: bool = False, device: str = "cpu"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.size = size
        self._patience_s = _LATE_PATIENCE_S if late else _PATIENCE_S
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, str(store), backend, late, device, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        """True while calls can be made."""
        return bool(self._pipes)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Results by rank. The first exception in time is raised, all tracebacks in its text."""
        name = (function.__module__, function.__qualname__)
        for pipe in self._pipes:
            pipe.send((name, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), timeout_s or self._patience_s)
            if not ready:
                stacks = self._stacks()
                failures |= {rank: f"did not answer in time\n{stacks[rank]}" for rank in waiting.values()}
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, "the process ended"
                (results if good else failures)[rank] = value
        if failures:
            self.close()
            raise RanksError("\n".join(f"--- rank {rank}: {text}" for rank, text in failures.items()))
        return [results[rank] for rank in range(self.size)]

    def _stacks(self) -> list[str]:
        """By rank, where its threads are."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid or os.getpid(), signal.SIGUSR1)
        time.sleep(1)
        return [_stacks_of(self._folder.name, rank).read_text() for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes = []
        self._folder.cleanup()


def _stacks_of(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}.txt"


class RanksError(AssertionError):
    """A call failed on at least one rank."""


def _serve(
    rank: int, size: int, store: str, backend: str | None, is_late: bool, device: str, pipe: Connection
) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.comm.policy import CommPolicy
    from shardwise.comm.rendezvous import handshake
    from shardwise.comm.world import join
    from tests.accelerator import pretend
    from tests.comm import late, strict

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    stack = ExitStack()
    faulthandler.register(
        signal.SIGUSR1, stack.enter_context(_stacks_of(Path(store).parent, rank).open("w")), all_threads=True
    )
    if is_late:
        stack.enter_context(late.installed())
    if device != "cpu":
        pretend.register()
        stack.enter_context(pretend.Bench())
        # Every process has a device of its own, and all of them are called 0.
        who = partial(handshake.identity, f"{device} of rank {rank}")
        stack.enter_context(patch.object(handshake, "identity", lambda _: who()))
        stack.enter_context(patch.object(torch.accelerator, "device_count", lambda: size))
    if backend == "strict":
        strict.register(dist.FileStore(f"{store}.strict", size), torch.device(device).type)
    files = dist.FileStore(store, size)
    gc.freeze()  # what the server of forks has imported: see below
    policy = CommPolicy(join_timeout_s=60, device=device)
    world = join(rank, size, store=files, backend=backend, quiet=True, policy=policy)
    while True:
        try:
            (module, name), args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if module not in sys.modules:
                importlib.import_module(module)
                gc.collect()
                gc.freeze()  # tests and engines collect often, and would walk all modules each time
            function: Any = sys.modules[module]
            for part in name.split("."):
                function = getattr(function, part)
            torch.manual_seed(0)  # whatever ran before: alone and among many, a test draws the same
            answer = (True, function(world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
