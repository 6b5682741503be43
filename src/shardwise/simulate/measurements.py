"""Measurements of one rank beside its neighbours: products, attention, memory, rows, operations and exchanges.

Each is the best of several rounds, because other work on the machine only adds to a time. All ranks of a host measure
the same at the same time, so the rates include the load of the neighbours on memory and caches.

    product, attention, convolution    FLOP/s by dtype and by the FLOPs of one operation, less the fixed cost of a call
    memory                             bytes read and written by a copy of tensors larger than a core's cache
    rows                               bytes read and written by lookups and additions of rows at random places
    operation                          an operation on a few elements, forward and backward
    exchange                           each collective of a group, by the bytes that a rank copies

Cost: some ten seconds of all ranks.
"""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.base.hardware import ProductKind
from shardwise.comm.collectives import Group
from shardwise.simulate.exchange_price import copied_bytes

Points = tuple[tuple[float, float], ...]
"""Measured points: (FLOPs or bytes, FLOP/s or seconds), ascending."""

_ROUNDS = 5
_LONG_S = 0.25
"""Operations that take longer end a measurement: larger ones are not tried."""
_ROUND_S = 0.01
"""Seconds of one round, which repeats short calls."""
_ROWS_OF_MEMORY = 2048
_ROW_ELEMENTS, _TABLE_ROWS, _ROWS = 64, 1 << 18, 1 << 14
_FULL_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of full tensors in exchanges."""


def best_s(run: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Return the seconds of one call in the best of several rounds."""
    run()
    begin = time.perf_counter()
    run()
    once = max(time.perf_counter() - begin, 1e-7)
    times = max(int(_ROUND_S / once), 1)
    best = once
    for _ in range(rounds if once < _LONG_S else 2):
        begin = time.perf_counter()
        for _ in range(times):
            run()
        best = min(best, (time.perf_counter() - begin) / times)
    return best


def product_rates(kind: ProductKind, dtype: torch.dtype) -> Points:
    """Return FLOP/s by the FLOPs of one operation.

    Args:
        kind: Kind of the operation.
        dtype: Dtype of its inputs.
    """
    make = {"product": _product, "attention": _attention, "convolution": _convolution}[kind]
    found: list[tuple[float, float]] = []
    fixed_s = 0.0
    for step in range(8):
        run, flops = make(step, dtype)
        seconds = best_s(run)
        # The first size is so small that its time is the fixed cost of a call, which has a figure of its own.
        fixed_s = fixed_s or seconds
        if step:
            found.append((float(flops), flops / max(seconds - fixed_s, seconds / 4)))
        if seconds > _LONG_S:
            break
    return tuple(found)


def _product(step: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    side = 8 << step if step else 2
    a, b = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(a, b), 2 * side**3


def _attention(step: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    tokens, heads, size = (8 << step if step else 2), 4, 64
    query, key, value = (torch.ones(1, heads, tokens, size, dtype=dtype) for _ in range(3))
    flops = 4 * heads * tokens * tokens * size
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), flops


def _convolution(step: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    side, channels = 8, (4 << step if step else 1)
    image = torch.ones(4, channels, side, side, dtype=dtype)
    kernel = torch.ones(channels, channels, 3, 3, dtype=dtype)
    return lambda: F.conv2d(image, kernel, padding=1), 2 * 4 * side * side * channels * channels * 9


def memory_rate() -> float:
    """Return the bytes read and written per second by operations of which models are made.

    Each operation allocates its result. A copy in place is two to four times as fast, because it touches no new memory
    and computes nothing, and steps priced by its rate would be too short.
    """
    x, y, weight = torch.ones(_ROWS_OF_MEMORY, 1024), torch.ones(_ROWS_OF_MEMORY, 1024), torch.ones(1024)

    def run() -> None:
        torch.mul(x, 1.5)
        torch.add(x, y)
        F.silu(x)
        F.softmax(x, -1)
        F.rms_norm(x, (1024,), weight)

    return 11 * x.nbytes / best_s(run)


def row_rate() -> float:
    """Return the bytes of scattered rows that are read and written per second."""
    table = torch.ones(_TABLE_ROWS, _ROW_ELEMENTS)
    rows = torch.randint(_TABLE_ROWS, (_ROWS,), generator=torch.Generator().manual_seed(0))
    found = torch.empty(_ROWS, _ROW_ELEMENTS)

    def run() -> None:
        torch.index_select(table, 0, rows, out=found)
        table.index_add_(0, rows, found)

    # The lookup reads and writes each row; the addition reads two rows and writes one.
    return 5 * found.nbytes / best_s(run)


def operation_s() -> float:
    """Return the seconds of an operation on a few elements, in a forward and backward pass."""
    chain = 64
    start = torch.ones(8, requires_grad=True)

    def run() -> None:
        x: Tensor = start
        for _ in range(chain):
            x = x * 1.5
        x.sum().backward()

    return best_s(run) / (3 * chain)


def exchange_times(group: Group) -> Mapping[str, Points]:
    """Return the seconds of each collective of a group, by the bytes that a rank copies.

    Every rank of the group makes this call; the seconds are those of the rank that takes longest.
    """
    size = group.size
    found: dict[str, Points] = {}
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        points = []
        for full_bytes in _FULL_BYTES:
            run = _exchange(group, operation, full_bytes // 4 // size * size)
            seconds = torch.tensor([_together_s(group, run, full_bytes)], dtype=torch.float64)
            slowest = seconds.new_empty(size)
            group.all_gather(slowest, seconds, "seconds", "control").wait()
            points.append((copied_bytes(operation, full_bytes, size), float(slowest.max())))
        found[operation] = _ascending(points)
    return found


def _exchange(group: Group, operation: str, elements: int) -> Callable[[], object]:
    size, own = group.size, elements // group.size
    full, received = torch.ones(elements), torch.ones(elements)
    part = full[group.index * own : (group.index + 1) * own]
    shard = torch.ones(own)
    counts = [[own] * size] * size
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: group.all_gather(full, part, "x").wait(),
        "reduce_scatter": lambda: group.reduce_scatter(shard, full, "x").wait(),
        "all_reduce": lambda: group.all_reduce(received.zero_(), "x").wait(),
        "broadcast": lambda: group.broadcast(full, 0, "x").wait(),
        "all_to_all": lambda: group.all_to_all(received, full, counts, "x").wait(),
    }
    return calls[operation]


def _together_s(group: Group, run: Callable[[], object], full_bytes: int) -> float:
    """Return the seconds of one call, in the best of rounds that all ranks make with as many calls."""
    times = 20 if full_bytes < 1 << 18 else 3
    run()
    best = math.inf
    for _ in range(_ROUNDS):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        best = min(best, (time.perf_counter() - begin) / times)
    return best


def _ascending(points: list[tuple[float, float]]) -> Points:
    """Return points whose second numbers do not fall: a larger exchange takes no less."""
    found: list[tuple[float, float]] = []
    for size, seconds in points:
        found.append((size, max(seconds, found[-1][1]) if found else seconds))
    return tuple(found)
