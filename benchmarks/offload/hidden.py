"""How much of what travels between ranks, and from and to a disk, the computation hides on links that delay every byte.

    PYTHONPATH=. python benchmarks/offload/hidden.py [--share 0.25] [--layers 16] [--rounds 5]

One process acts as rank 0 of eight at stage 3 whose tensors are all alike; it computes in earnest on one core. The
network is a clock (``benchmarks/overlap/links.py``), and so is the disk: it serves one request after another, each as
long as its bytes take. ``--share`` is the time of either link over that of the computation, which could hide all of it.

    exposed    the time that the computing thread waited for a link, over what both links took
    STEP       the time that it waited in the forward pass for updates and what they leave on the disk, over that from
               the norm to when the first block's new weights are where it computes, with nothing else under way
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.overlap.links import Link, blocks, world_on
from torch import Tensor, nn

import shardwise

OFFLOAD: dict[str, dict[str, Any]] = {
    "masters and moments": {},
    "masters and moments, delayed": {"step": "delayed"},
    "weights too": {"parameters": "disk"},
    "weights too, the root and two blocks stay": {"parameters": "disk", "stay": 3},
}


class Travels(Future[None]):
    """A request to the disk."""


class ClockedDisk:
    """State in memory, behind a serial link. What ``DiskScratch`` is to the tiers."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held: dict[tuple[str, str], Tensor] = {}
        self._numbers = count()
        self._jobs: PriorityQueue[Any] = PriorityQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            done, begun, target, source = job
            arrives = self._link.take(target.nbytes, begun)
            time.sleep(max(arrives - time.perf_counter(), 0.0))
            target.copy_(source)
            done.set_result(None)

    def _ask(self, kind: str, target: Tensor, source: Tensor) -> Future[None]:
        done = Travels()
        # In the order of ``DiskScratch``: weights' first.
        self._jobs.put((kind != "weight", next(self._numbers), (done, time.perf_counter(), target, source)))
        return done

    def reserve(self, wanted: Mapping[str, Mapping[str, int]], shares: object = None) -> None:
        """Room for all."""
        for kind, owners in wanted.items():
            for owner, size in owners.items():
                self._held[kind, owner] = torch.zeros(size, dtype=torch.uint8)

    def read(self, kind: str, owner: str, into: Tensor, first: int = 0) -> Future[None]:
        """As ``DiskScratch.read``."""
        return self._ask(kind, into.detach().view(torch.uint8), self._held[kind, owner])

    def write(self, kind: str, owner: str, source: Tensor, first: int = 0) -> Future[None]:
        """As ``DiskScratch.write``."""
        return self._ask(kind, self._held[kind, owner], source.detach().view(torch.uint8))

    def close(self) -> None:
        """No request comes any more."""
        self._jobs.put((True, next(self._numbers), None))


class Waits:
    """How long the computing thread waited for what."""

    def __init__(self) -> None:
        self.disk_s = self.update_s = self.forward_s = self._before_s = 0.0

    def begin(self) -> None:
        """A forward pass begins."""
        self._before_s = self.disk_s + self.update_s

    def end(self) -> None:
        """It is over."""
        self.forward_s += self.disk_s + self.update_s - self._before_s

    def result_of(self, future: Future[Any], timeout: float | None = None) -> Any:
        """In the place of ``Future.result``."""
        if threading.current_thread() is not threading.main_thread():
            return _result(future, timeout)
        began = time.perf_counter()
        try:
            return _result(future, timeout)
        finally:
            waited_s = time.perf_counter() - began
            if isinstance(future, Travels):
                self.disk_s += waited_s
            else:
                self.update_s += waited_s


_result = Future.result


class Bench:
    """One engine on its two links."""

    def __init__(self, offload: Mapping[str, Any], folder: str, options: argparse.Namespace) -> None:
        self.network, self.disk, self.waits = Link(), Link(), Waits()
        model, units = blocks(options.layers, options.width)
        stay = offload.get("stay", 0)
        config = {
            "zero": {"stage": 3, "units": units, "prefetch_bytes": 1, "reductions_under_way": 1},
            "check_first_step": "off",
            "batch": {"duplicates": "allow"},
            "optimizer": {"type": "adamw", "lr": 1e-9},
            "offload": {
                "optimizer": "disk", "disk_path": folder, "fraction": 1 - stay / (options.layers + 1),
                **{key: value for key, value in offload.items() if key != "stay"},
            },
        }  # fmt: skip
        self._held = ClockedDisk(self.disk)
        with patch("shardwise.engine.construction.site.DiskScratch", lambda *given: self._held):
            self.engine = shardwise.initialize(
                model,
                config,
                loss=lambda model, batch: self._loss(model, batch),
                world=world_on(self.network),
            )
        self.batch = torch.randn(options.rows, 32)
        away = [bucket for bucket, _ in self.engine._parts.trained if bucket.state is not None]
        self._first = max(away[:2], key=lambda bucket: bucket.owned_elements)

    def _loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.waits.begin()
        loss: Tensor = model(batch).square().mean()
        self.waits.end()
        return loss

    def step(self) -> float:
        """One, and what it leaves under way."""
        began = time.perf_counter()
        self.engine.train_step([self.batch])
        return time.perf_counter() - began

    def first_update_s(self) -> float:
        """From the norm to when the first block's new weights are where it computes, nothing else under way."""
        times: list[float] = []
        weight = self._first.weight
        begin = weight.begin_update

        def come(update: Future[None]) -> None:
            if "weight" in self._first.state.kinds:
                brought = torch.empty(weight.layout.shard_elements, dtype=weight.dtypes.compute)
                update = self._held.read("weight", self._first.state.what, brought)
            update.add_done_callback(lambda _: times.append(time.perf_counter()))

        def begin_update(begin_in_thread: Any) -> None:
            times.append(time.perf_counter())
            begin(begin_in_thread)
            late = self._first.state.next
            under_way = weight._updating if late is None else late.update
            under_way.add_done_callback(come)

        with patch.object(weight, "begin_update", begin_update):
            self.step()
        self.engine._parts.site.tiers.settle()
        while len(times) < 2:
            time.sleep(1e-3)
        began, ended = times
        return ended - began

    def measure(self, share: float, steps: int = 2) -> tuple[float, float, float, float]:
        """(seconds of a step on links that take no time, exposed, STEP, step over the first)."""
        network, disk = self.network, self.disk
        network.bytes_per_s = disk.bytes_per_s = float("inf")
        self.step()
        network.bytes = disk.bytes = 0
        self.engine._parts.site.tiers.settle()
        compute_s = self.step()
        self.engine._parts.site.tiers.settle()
        network.bytes_per_s = network.bytes / (share * compute_s)
        disk.bytes_per_s = disk.bytes / (share * compute_s)
        self.step()  # what it leaves under way, the first of those that count waits for
        first_s = self.first_update_s()
        self.step()
        network.busy_s = network.waited_s = disk.busy_s = 0.0
        waits = self.waits = Waits()
        with patch.object(Future, "result", lambda future, timeout=None: waits.result_of(future, timeout)):
            took_s = sum(self.step() for _ in range(steps)) / steps
        exposed = (network.waited_s + waits.disk_s) / (network.busy_s + disk.busy_s)
        return compute_s, exposed, waits.forward_s / steps / first_s, took_s / compute_s


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        benches = {name: Bench(offload, folder, options) for name, offload in OFFLOAD.items()}
        found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in benches}
        for _ in range(options.rounds):
            for name, bench in benches.items():
                found[name].append(bench.measure(options.share))
        print("| on the disk | compute, s | exposed | STEP exposed, of the first block's | a step |")
        print("|---|---|---|---|---|")
        for name, rounds in found.items():
            compute_s, exposed, step, took = (statistics.median(each) for each in zip(*rounds, strict=True))
            print(f"| {name} | {compute_s:.3f} | {exposed:.1%} | {step:.2f} | {took:.2f} |")
        for bench in benches.values():
            bench.engine.close()


if __name__ == "__main__":
    main()
