"""What each loop of shardwise.kernels.tables costs on one thread, beside its plain-torch reference.

One batch is 26 features of 4,096 samples, one id each, from a Zipf law with exponent 1.05 over 10 M rows; the table
that is pooled and updated has as many rows as fit (``--rows``), its ids folded into them. The index is asked for keys
that it has, in random order.

    python kernels.py                       # about two minutes with references; --loops-only: about one
    python kernels.py --keys 1000000        # a smaller index

Times are medians (and best) of ``--rounds`` calls after two to warm up; loops and references take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import beside  # noqa: F401
import torch
from measure import keep_freed_memory
from torch import Tensor
from zipf import zipf

from shardwise.kernels import philox
from shardwise.kernels.initializers import Normal, Uniform
from shardwise.kernels.tables import pooling, row_optimizers, unique
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.row_rules import (
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
)
from shardwise.kernels.tables.slab import reserve
from shardwise.kernels.tables.start_rows import start_rows

FEATURES, SAMPLES = 26, 4096
VOCABULARY = 10_000_000
WARM_UP = 2

Work = Callable[[], object]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    items: int
    loop: Work
    reference: Work | None = None


def slab_of(optimizer: RowOptimizer, rows: int, width: int) -> Tensor:
    slab = reserve(rows, width + optimizer.columns(width))
    slab.fill_(0.1)
    return slab


def batch_rows() -> Iterator[Row]:
    ids = zipf(FEATURES * SAMPLES, VOCABULARY, 0)
    scratch = unique.UniqueScratch()
    yield Row(
        "unique + inverse", len(ids), lambda: unique.unique(ids, scratch), lambda: unique.plain_unique(ids)
    )
    owners = torch.randint(0, 8, (len(ids),))
    yield Row(
        "group by 8 owners",
        len(ids),
        lambda: unique.grouped(owners, 8),
        lambda: unique.plain_grouped(owners, 8),
    )


def table_rows(width: int, rows: int) -> Iterator[Row]:
    ids = zipf(FEATURES * SAMPLES, VOCABULARY, 0) % rows
    keys, inverse = unique.unique(ids)
    count, bags = len(keys), len(ids)
    offsets = torch.arange(bags + 1)
    source = torch.randn(count, width)
    grad = torch.randn(bags, width)
    out = torch.empty(count, width)
    name = f"width {width}, {count} of {bags} ids: "
    yield Row(
        name + "pool",
        bags,
        lambda: pooling.pool(source, inverse, offsets),
        lambda: pooling.plain_pool(source, inverse, offsets),
    )
    yield Row(
        name + "merge",
        bags,
        lambda: pooling.merge(grad, inverse, offsets, count, out=out),
        lambda: pooling.plain_merge(grad, inverse, offsets, count),
    )
    optimizers: list[RowOptimizer] = [RowwiseAdagrad(), Sgd(), Momentum(), Adagrad(), Adam(), Ftrl()]
    for optimizer in optimizers:
        slab = slab_of(optimizer, rows, width)
        if isinstance(optimizer, RowwiseAdagrad):
            yield Row(
                name + "gather",
                count,
                lambda slab=slab: pooling.gather(slab, keys, width),  # type: ignore[misc]
                lambda slab=slab: slab[:, :width].index_select(0, keys),  # type: ignore[misc]
            )

            def merge_and_update(slab: Tensor = slab, optimizer: RowOptimizer = optimizer) -> None:
                merged = pooling.merge(grad, inverse, offsets, count, out=out)
                row_optimizers.update(optimizer, slab, keys, merged, lr=0.01, step=1)

            yield Row(name + "merge + RowwiseAdagrad", bags, merge_and_update)
        yield Row(
            name + f"update, {type(optimizer).__name__}",
            count,
            lambda slab=slab, optimizer=optimizer: row_optimizers.update(  # type: ignore[misc]
                optimizer, slab, keys, source, lr=0.01, step=1
            ),
            lambda slab=slab, optimizer=optimizer: row_optimizers.plain_update(  # type: ignore[misc]
                optimizer, slab, keys, source, lr=0.01, step=1
            ),
        )


def index_rows(size: int) -> Iterator[Row]:
    keys = torch.randint(-(2**62), 2**62, (size,))
    index = HashIndex()
    began = time.perf_counter()
    for part in keys.split(1 << 20):
        index.find_or_insert(part)
    seconds = time.perf_counter() - began
    print(
        f"{size} keys inserted with growth: {size / seconds / 1e6:.1f} M/s, {index.nbytes / size:.0f} bytes a key"
    )
    asked = keys[torch.randperm(size)[: min(size, 1 << 20)]]
    yield Row(f"find, {size} keys in the index", len(asked), lambda: index.find(asked))
    fresh = torch.randint(-(2**62), 2**62, (50 * len(asked),)).split(len(asked))
    turn = iter(fresh)

    def insert_and_remove() -> None:
        new = next(turn)
        index.find_or_insert(new)
        index.remove(new)

    yield Row("insert, then remove", 2 * len(asked), insert_and_remove)
    rows = index.find(asked)
    yield Row("add to scores", len(asked), lambda: index.add_scores(rows))
    index.set_scores(index.items()[1], torch.randint(0, 1 << 20, (len(index),)))
    yield Row("lowest 1 %, for eviction", len(index), lambda: index.lowest(len(index) // 100))


def start_row_rows() -> Iterator[Row]:
    keys, key = torch.arange(1 << 16), philox.key_of(0, "table")
    few = keys[:512]
    for initializer in (Uniform(-0.1, 0.1), Normal(0.1)):
        yield Row(
            f"first rows of width 16, {type(initializer).__name__}",
            len(keys),
            lambda initializer=initializer: start_rows(key, keys, 16, initializer),  # type: ignore[misc]
            None,
        )
    yield Row(
        "words of 512 rows by numpy's generator",
        512,
        lambda: philox.words_of(key, 0, 16, [(int(k), 0, 0) for k in few]),
    )


def measure(row: Row, rounds: int, references: bool) -> dict[str, Any]:
    """What one line of the table says."""
    works = [row.loop] + ([row.reference] if references and row.reference is not None else [])
    times: list[list[float]] = [[] for _ in works]
    for turn in range(WARM_UP + rounds):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if turn >= WARM_UP:
                taken.append(1e3 * (time.perf_counter() - began))
    ours = statistics.median(times[0])
    return {
        "part": "kernels",
        "case": "",
        "name": row.name,
        "median_ms": ours,
        "best_ms": min(times[0]),
        "rate": row.items / ours / 1e3,
        "reference_ms": statistics.median(times[1]) if len(works) > 1 else None,
    }


def rows_of(tiny: bool) -> list[dict[str, Any]]:
    """All lines, for run.py."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    rows, keys, rounds = (5000, 5000, 3) if tiny else (2_000_000, 10_000_000, 15)
    found = []
    for group in (
        batch_rows(),
        table_rows(16, rows),
        table_rows(64, rows),
        index_rows(keys),
        start_row_rows(),
    ):
        found += [measure(row, rounds, row.items < 500_000) for row in group]
    return found


def line(found: dict[str, Any]) -> str:
    """The same as text."""
    reference = found["reference_ms"]
    text = f"{found['name']:<58} {found['median_ms']:9.3f} {found['best_ms']:9.3f} {found['rate']:9.1f}"
    return text + ("" if reference is None else f" {reference:11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="rows of the table that is pooled and updated"
    )
    parser.add_argument("--keys", type=int, default=10_000_000, help="keys in the index")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--loops-only", action="store_true", help="leave the references out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"{'':<58} {'ms':>9} {'best':>9} {'M/s':>9} {'reference ms':>12}")
    for rows in (
        batch_rows(),
        *(table_rows(width, arguments.rows) for width in arguments.widths),
        index_rows(arguments.keys),
        start_row_rows(),
    ):
        for row in rows:
            print(line(measure(row, arguments.rounds, not arguments.loops_only)), flush=True)


if __name__ == "__main__":
    main()
