"""Collectives on one host: shared memory beside gloo and what can be composed from gloo's calls.

All ways of one collective run in turns of some calls, so that a busy machine is busy for each of them alike. A call's
time is that of its slowest rank; all ranks begin together.

    python benchmarks/collectives/run.py --json benchmarks/collectives/results.json
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.shared_memory import SharedMemoryTransport

Ways = dict[str, dict[str, Callable[[], Any]]]
TIMEOUT_S = 120.0
BURST_S = 0.04


def gloo_ways(rank: int, size: int, full: Tensor, shard: Tensor) -> Ways:
    """Every collective as gloo has it, and composed."""
    parts = full.view(size, -1)
    received = torch.empty_like(parts)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def exchange_and_add() -> None:
        dist.all_to_all_single(received.view(-1), full)
        torch.add(received[0], received[1], out=shard)
        for row in received[2:]:
            shard.add_(row)

    def broadcasts_together() -> None:
        parts[rank].copy_(shard)
        for work in [dist.broadcast(part, root, async_op=True) for root, part in enumerate(parts)]:
            work.wait()

    def broadcasts_in_turn() -> None:
        parts[rank].copy_(shard)
        for root, part in enumerate(parts):
            dist.broadcast(part, root)

    def slice_of_all_reduce() -> None:
        dist.all_reduce(full)
        shard.copy_(parts[rank])

    def all_reduce_of_zeros() -> None:
        full.zero_()
        parts[rank].copy_(shard)
        dist.all_reduce(full)

    def exchange_add_broadcast() -> None:
        exchange_and_add()
        broadcasts_together()

    return {
        "all_reduce": {
            "gloo": lambda: dist.all_reduce(full),
            "gloo: all-to-all, adds, N broadcasts": exchange_add_broadcast,
        },
        "reduce_scatter": {
            "gloo": lambda: scatter(shard, full),
            "gloo: all_reduce and slice": slice_of_all_reduce,
            "gloo: all-to-all and adds": exchange_and_add,
        },
        "all_gather": {
            "gloo": lambda: gather(full, shard),
            "gloo: all_reduce of zeros": all_reduce_of_zeros,
            "gloo: N broadcasts in turn": broadcasts_in_turn,
            "gloo: N broadcasts together": broadcasts_together,
        },
        "broadcast": {"gloo": lambda: dist.broadcast(full, 0)},
    }


def shared_ways(transport: SharedMemoryTransport, full: Tensor, shard: Tensor) -> Ways:
    """The same collectives through shared memory."""
    way = "shared memory"
    return {
        "all_reduce": {way: lambda: transport.all_reduce(full, TIMEOUT_S, way).wait()},
        "reduce_scatter": {way: lambda: transport.reduce_scatter(shard, full, TIMEOUT_S, way).wait()},
        "all_gather": {way: lambda: transport.all_gather(full, shard, TIMEOUT_S, way).wait()},
        "broadcast": {way: lambda: transport.broadcast(full, 0, TIMEOUT_S, way).wait()},
    }


def open_transport(rank: int, size: int, folder: str) -> SharedMemoryTransport:
    """A shared-memory group whose ranks meet through a file."""
    store = dist.FileStore(f"{folder}/shared", size)
    return SharedMemoryTransport(
        rank,
        size,
        lambda key, text: store.set(f"{key}/{rank}", text),
        lambda key, timeout_s: [store.get(f"{key}/{peer}").decode() for peer in range(size)],
        TIMEOUT_S,
    )


def measure(
    rank: int, size: int, folder: str, kib: list[float], seconds: float, pin: bool
) -> list[dict[str, Any]]:
    """One row for each collective, dtype, size and way."""
    torch.set_num_threads(1)
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/gloo", size), rank=rank, world_size=size)
    transport = open_transport(rank, size, folder)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for size_kib in kib:
            full = torch.zeros(int(size_kib * 1024) // dtype.itemsize // size * size, dtype=dtype)
            shard = torch.zeros(full.numel() // size, dtype=dtype)
            gloo, shared = gloo_ways(rank, size, full, shard), shared_ways(transport, full, shard)
            for operation in gloo:
                ways = gloo[operation] | shared[operation]
                times = take_turns(transport, ways, seconds)
                for way, taken in times.items():
                    low, middle, high = statistics.quantiles(taken, n=4)
                    rows.append(
                        {
                            "ranks": size,
                            "dtype": str(dtype).removeprefix("torch."),
                            "kib": size_kib,
                            "operation": operation,
                            "way": way,
                            "calls": len(taken),
                            "median_ms": round(middle * 1e3, 5),
                            "quartiles_ms": [round(low * 1e3, 5), round(high * 1e3, 5)],
                        }
                    )
    transport.close()
    dist.destroy_process_group()
    return rows


def take_turns(
    transport: SharedMemoryTransport, ways: dict[str, Callable[[], Any]], seconds: float
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, call by call.

    Each way has a burst of calls in each turn. Only the second half of a burst counts: until then caches hold the other
    way's code, and the scheduler still has the ranks where the other way's threads left them.
    """
    bursts = {way: _burst(transport, run) for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(max(round(seconds / BURST_S), 4)):
        for way, run in ways.items():
            for call in range(2 * bursts[way]):
                transport.barrier(TIMEOUT_S, "start").wait()
                start = time.perf_counter()
                run()
                if call >= bursts[way]:
                    times[way].append(time.perf_counter() - start)
    slowest = {}
    for way, taken in times.items():
        mine = torch.tensor(taken, dtype=torch.float64)
        every = torch.empty(transport.size * len(taken), dtype=torch.float64)
        transport.all_gather(every, mine, TIMEOUT_S, "times").wait()
        slowest[way] = every.view(-1, len(taken)).amax(0).tolist()
    return slowest


def _burst(transport: SharedMemoryTransport, run: Callable[[], Any]) -> int:
    """Calls that fill half a burst, as rank 0 finds."""
    run()
    start = time.perf_counter()
    run()
    calls = torch.tensor([int(BURST_S / 2 / (time.perf_counter() - start))]).clamp_(1, 500)
    transport.broadcast(calls, 0, TIMEOUT_S, "calls").wait()
    return int(calls.item())


def rank_main(rank: int, size: int, folder: str, kib: list[float], seconds: float, pin: bool) -> None:
    """One rank's process; rank 0 leaves the rows in a file."""
    rows = measure(rank, size, folder, kib, seconds, pin)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))


def run_ranks(size: int, kib: list[float], seconds: float, pin: bool) -> list[dict[str, Any]]:
    """Rows measured by ``size`` processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, size, folder, kib, seconds, pin))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, "rows.json").read_text())  # type: ignore[no-any-return]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each way, one column for each size and dtype."""
    lines = []
    for ranks in sorted({row["ranks"] for row in rows}):
        mine = [row for row in rows if row["ranks"] == ranks]
        columns = sorted(
            {(row["dtype"], row["kib"]) for row in mine}, key=lambda c: (c[0] != "float32", c[1])
        )
        titles = [
            f"{dtype} {kib / 1024:g} MiB" if kib >= 1024 else f"{dtype} {kib:g} KiB" for dtype, kib in columns
        ]
        lines += [f"{ranks} ranks, ms", "", f"| collective | way | {' | '.join(titles)} |"]
        lines += ["|---|---|" + "---:|" * len(columns)]
        for operation, way in dict.fromkeys((row["operation"], row["way"]) for row in mine):
            cells = {
                (row["dtype"], row["kib"]): f"{row['median_ms']:.3g}"
                for row in mine
                if (row["operation"], row["way"]) == (operation, way)
            }
            lines.append(f"| {operation} | {way} | {' | '.join(cells[column] for column in columns)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables, keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=float, nargs="+", default=[1, 1024, 12 * 1024, 128 * 1024])
    parser.add_argument("--seconds", type=float, default=0.2, help="for each way of a collective")
    parser.add_argument(
        "--pin", action="store_true", help="give each rank, with gloo's threads, a core of its own"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [
        row
        for size in arguments.ranks
        for row in run_ranks(size, arguments.kib, arguments.seconds, arguments.pin)
    ]
    print(table(rows))
    if arguments.json:
        placed = "one core for each rank" if arguments.pin else "ranks not pinned"
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {placed}, load {load:.1f} at the start"
        found = {"torch": torch.__version__, "machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
