"""Requests per second of ``shardwise.Scorer``: several processes over one folder, keys by Zipf's law.

    python serving.py                            # 8 processes, 26 features, 26 tables of 200,000 rows, DLRM of width 16
    python serving.py --processes 2 --seconds 2 --rows 2000

Two runs, one after the other, each in the same processes after requests that are not counted:

    closed   every process sends its next request when the last one is done: lookups per second and core
    open     requests come at random times (Poisson) at ``--rate`` lookups per second and core over all processes; the
             time of a request counts from the moment at which it came, so a process that is late pays for all that wait

A lookup is one key of one feature of one sample; a request has ``--samples`` samples, as a server that ranks candidates
gets them, and returns their logits. The model's dense part is computed in every request. No two requests have the same
keys. The first run says how much a core does; with more processes than cores its times are those of the scheduler, so
the 99th percentile is that of the second run.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from zipf import EXPONENT, zipf

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.build import build_ctr, described
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.dense_part import DensePart
from shardwise.models.vectors import StoredTable, write_vectors
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablesPolicy

DENSE, WIDTH = 13, 16
_KEPT = 64
"""Requests that are made before the clock starts, for each process and run; longer runs use the dense numbers again."""
_SPREAD = 7_919_000_000_007


def write_model(folder: Path, features: int, rows: int, vectors: str) -> None:
    """Write a DLRM with one dynamic table for each feature, of random numbers."""
    schema = ClickSchema(
        tuple(f"n{i}" for i in range(DENSE)), tuple(SparseFeature(f"C{i}") for i in range(features))
    )
    tables = TablesPolicy(defaults=TableOptions(dynamic=DynamicPolicy()))
    model = build_ctr(DlrmPolicy(width=WIDTH, bottom=(64,), top=(128, 64)), schema, tables)
    draws = torch.Generator().manual_seed(1)

    def stored(name: str) -> StoredTable:
        def parts() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
            yield (
                0,
                torch.randperm(rows, generator=draws) * _SPREAD,
                torch.randn(rows, WIDTH, generator=draws),
            )

        return StoredTable(f"tables.{name}", rows, WIDTH, True, parts)

    dense = DensePart(dict(model.named_parameters()), {"click_model": described(model), "target": None})
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[vectors]
    write_vectors(folder, [stored(f"C{i}") for i in range(features)], 1, dtype, dense=dense.to_write())


def requests(options: argparse.Namespace, seed: int, count: int) -> list[dict[str, Any]]:
    """Return requests whose keys follow Zipf's law in every feature."""
    size = options.samples * options.features
    keys = zipf(count * size, options.rows, seed, EXPONENT) * _SPREAD
    dense = torch.randn(options.samples, DENSE)
    offsets = torch.arange(options.samples + 1)
    found = []
    for part in keys.view(count, options.features, options.samples):
        sparse = {f"C{i}": Ragged(part[i], offsets) for i in range(options.features)}
        found.append({"dense": dense, "sparse": sparse})
    return found


def closed_run(scorer: Any, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Send requests one after another for ``--seconds``, and return the lookups per second of this process."""
    done, spent, times = 0, 0.0, []
    while spent < options.seconds:
        batch = requests(options, seed + done, _KEPT)
        for each in batch:
            start = time.perf_counter()
            scorer.score(each)
            times.append(time.perf_counter() - start)
        spent += sum(times[-len(batch) :])
        done += len(batch)
    return {"lookups_per_s": done * options.samples * options.features / spent, "times": times}


def open_run(scorer: Any, options: argparse.Namespace, seed: int, rate: float) -> list[float]:
    """Serve requests that come at random times, ``rate`` a second, and return the seconds of each from its coming."""
    count = max(int(rate * options.seconds), 1)
    given = requests(options, seed, count)
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)) + time.perf_counter()
    times = []
    for each, at in zip(given, due, strict=True):
        left = at - time.perf_counter()
        if left > 0:
            time.sleep(left)
        scorer.score(each)
        times.append(time.perf_counter() - at)
    return times


def serve(options: argparse.Namespace, number: int, folder: str, barrier: Barrier, results: Any) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    opened = time.perf_counter()
    scorer = shardwise.Scorer(folder, cache_bytes=options.cache_mib << 20)
    opened = time.perf_counter() - opened
    for warm in range(options.warm_up):
        for each in requests(options, 10**6 + 1000 * number + warm, 32):
            scorer.score(each)
    barrier.wait()
    closed = closed_run(scorer, options, 10**4 * (number + 1))
    barrier.wait()
    cores = len(os.sched_getaffinity(0))
    rate = options.rate * cores / options.processes / (options.samples * options.features)
    times = open_run(scorer, options, 10**5 * (number + 1), rate)
    barrier.wait()
    results.put(
        {
            "closed": closed["lookups_per_s"],
            "open_s": times,
            "hit_rate": scorer.hit_rate,
            "cached_bytes": scorer.cached_bytes,
            "open_folder_s": opened,
        }
    )


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all processes and return the figures."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(options.processes), context.SimpleQueue()
    processes = [
        context.Process(target=serve, args=(options, number, folder, barrier, results))
        for number in range(options.processes)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    cores = len(os.sched_getaffinity(0))
    times = np.sort(np.concatenate([each["open_s"] for each in found])) * 1e3
    return {
        "processes": options.processes,
        "cores": cores,
        "samples": options.samples,
        "features": options.features,
        "rows_of_a_table": options.rows,
        "lookups_per_s_and_core": sum(each["closed"] for each in found) / cores,
        "hit_rate": float(np.mean([each["hit_rate"] for each in found])),
        "cached_bytes": found[0]["cached_bytes"],
        "open_folder_s": float(np.median([each["open_folder_s"] for each in found])),
        "open_rate_lookups_per_s_and_core": options.rate,
        "open_requests": times.size,
        **{f"open_p{p}_ms": float(np.percentile(times, p)) for p in (50, 95, 99)},
    }


def main() -> None:
    """Parse the command line, measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--samples", type=int, default=64, help="samples of a request")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of each table")
    parser.add_argument(
        "--rate", type=float, default=200_000, help="lookups per second and core of the open run"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each run")
    parser.add_argument("--cache-mib", type=int, default=64, help="hot rows of a process")
    parser.add_argument("--warm-up", type=int, default=20, help="times 32 requests before the clock starts")
    parser.add_argument("--vectors", choices=["fp32", "fp16"], default="fp32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.features, options.rows, options.vectors)
        print(json.dumps(measure(options, folder), indent=2))


if __name__ == "__main__":
    main()
