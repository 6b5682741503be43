"""The rank processes of one contender, seen from the parent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import own_bytes, peak_bytes, reset_peak
from workload import Workload

HERE = Path(__file__).resolve().parent
DEADLINE_S = 600.0


class ContenderFailed(Exception):
    """A rank died or did not answer; says which and shows the end of what it printed."""


class Group:
    """``ranks`` processes, each running the file ``worker``, that obey the same commands."""

    def __init__(
        self,
        contender: str,
        dtype: str,
        ranks: int,
        workload: Workload,
        folder: Path,
        worker: Path = HERE / "worker.py",
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.worker = worker
        self.processes = [self._start(contender, dtype, r, ranks, workload) for r in range(ranks)]

    def _start(
        self, contender: str, dtype: str, rank: int, ranks: int, workload: Workload
    ) -> subprocess.Popen[str]:
        setting = {
            "contender": contender,
            "dtype": dtype,
            "rank": rank,
            "world_size": ranks,
            "workload": dataclasses.asdict(workload),
            "folder": str(self.folder),
        }
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
        }
        with (self.folder / f"rank{rank}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, str(self.worker), json.dumps(setting)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send one command to all ranks and wait for all answers."""
        self._send(command)
        return self._collect()

    def own_bytes(self) -> list[int]:
        """Memory of each rank now."""
        return self._read(own_bytes)

    def reset_peaks(self) -> None:
        """From here on ``peak_bytes`` counts."""
        self._read(reset_peak)

    def peak_bytes(self) -> list[int]:
        """Largest memory of each rank since ``reset_peaks``."""
        return self._read(peak_bytes)

    def _read(self, what: Callable[[int], Any]) -> list[Any]:
        read = []
        for rank, process in enumerate(self.processes):
            try:
                read.append(what(process.pid))
            except (OSError, KeyError) as error:
                raise self._failure(rank, "ended") from error
        return read

    def stop(self) -> None:
        """End the ranks: first by closing their input, then by force."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, command: dict[str, Any]) -> None:
        for rank, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, "is gone") from None

    def _collect(self) -> list[dict[str, Any]]:
        """Answers in rank order."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(self.processes):
            waiting = {p.stdout: r for r, p in enumerate(self.processes) if r not in answers and p.stdout}
            readable, _, _ = select.select(list(waiting), [], [], 1.0)
            for stream in readable:
                rank = waiting[stream]
                line = stream.readline()
                if not line:
                    raise self._failure(rank, "ended")
                answers[rank] = json.loads(line)
            if time.monotonic() > deadline:
                silent = min(set(range(len(self.processes))) - set(answers))
                raise self._failure(silent, f"did not answer within {DEADLINE_S:.0f} s")
        return [answers[rank] for rank in range(len(self.processes))]

    def _failure(self, rank: int, what: str) -> ContenderFailed:
        tail = (self.folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()[-12:]
        return ContenderFailed(f"rank {rank} {what}; the end of its log:\n" + "\n".join(tail))
