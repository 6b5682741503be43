"""Measurements of one rank beside its neighbours: products, operations, rows, exchanges, and how late ranks are.

All ranks of a host measure the same at the same time, so the rates include the load of the neighbours on memory and
caches. Each measurement is repeated in several sweeps over all of them, seconds apart, and its figure is the median of
all repeats: what a step finds on average, not the best case.

A rank of one thread counts the CPU time of its thread instead of the time of the clock, so that repeats in which
another process has the core cost no more than others. A rank of several threads counts the time of the clock. Of what
ranks do together, repeats in which a rank lost its core to another process do not count, unless they are more than
half.

    product, batched, attention,       FLOP/s by dtype and by the FLOPs of one operation, less the fixed cost of a call,
    convolution                        with operands that come from memory, as those of a layer do
    arithmetic, function, copy         bytes read and written per second by operations of a class, by size
    update                             the same of AdamW, by the bytes of one tensor's state
    rows                               bytes read and written by lookups and additions of rows at random places
    exchange                           each collective of a group and a message, by the bytes that a rank copies
    unevenness                         share of equal work for which a rank waits for the others at its end

Cost: some ten seconds of all ranks.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.base.hardware import OperationClass, ProductKind
from shardwise.comm.collectives import Group
from shardwise.comm.peers import PointToPoint
from shardwise.simulate.exchange_price import copied_bytes

Points = tuple[tuple[float, float], ...]
"""Measured points: (FLOPs or bytes, FLOP/s, bytes per second or seconds), ascending."""
Repeats = dict[float, list[float]]
"""Seconds of each repeat, by FLOPs or bytes of one operation."""

_ROUNDS = 4
"""Repeats of one measurement in one sweep."""
_LONG_S = 0.25
"""Operations that take longer end a measurement: larger ones are not tried."""
_ROUND_S = 0.005
"""Seconds of one repeat, which makes several calls if they are short."""
_SETS_BYTES = 24 << 20
"""Bytes of the operands between which calls alternate, so that they do not find them in a core's own cache."""
_MOST_SETS = 64
_OPERATION_BYTES = (1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Bytes that one measured operation touches, about."""
_ROW_ELEMENTS, _TABLE_ROWS, _ROWS = 64, 1 << 18, 1 << 14
_FULL_BYTES = (1 << 10, 1 << 14, 1 << 17, 3 << 17, 1 << 20, 3 << 20, 1 << 22, 3 << 22, 1 << 24)
"""Sizes of full tensors in exchanges."""
_WORK_S = (2e-3, 8e-3, 32e-3, 128e-3)
"""Seconds of equal work between two meetings of ranks."""


def repeats(run: Callable[[], object], rounds: int | None = None) -> list[float]:
    """Return the seconds of one call in each of several rounds, which repeat short calls.

    Args:
        run: The call.
        rounds: Number of rounds; None: as many as a sweep makes.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    begin = clock()
    run()
    once = max(clock() - begin, 1e-7)
    times = max(int(_ROUND_S / once), 1)
    found = []
    for _ in range((rounds or _ROUNDS) if once < _LONG_S else 1):
        begin = clock()
        for _ in range(times):
            run()
        found.append((clock() - begin) / times)
    return found


def typical_s(run: Callable[[], object]) -> float:
    """Return the median of the seconds of one call."""
    return statistics.median(repeats(run))


def in_turn(sets: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that makes the next of several calls each time, and begins again after the last."""
    place = 0

    def run() -> None:
        nonlocal place
        sets[place]()
        place = (place + 1) % len(sets)

    return run


def _sets(nbytes: int) -> int:
    return min(max(_SETS_BYTES // max(nbytes, 1), 2), _MOST_SETS)


# Products ----------------------------------------------------------------------------------------------------------


def product_repeats(kind: ProductKind, dtype: torch.dtype) -> Repeats:
    """Return the seconds of operations by the FLOPs of one.

    Args:
        kind: Kind of the operation.
        dtype: Dtype of its inputs.
    """
    make = {
        "product": _products,
        "batched": _batched,
        "attention": _attention,
        "convolution": _convolution,
    }[kind]
    found: Repeats = {}
    fixed_s = 0.0
    for step in range(8):
        runs, flops = make(step, dtype)
        seconds = repeats(in_turn(runs))
        # The first size is so small that its time is the fixed cost of a call, which has a figure of its own.
        fixed_s = fixed_s or statistics.median(seconds)
        if step:
            found[float(flops)] = [max(each - fixed_s, each / 4) for each in seconds]
        if max(seconds) > _LONG_S:
            break
    return found


def _products(step: int, dtype: torch.dtype) -> tuple[list[Callable[[], object]], int]:
    """Return products of a layer: of its input and weight, and those of the gradients of the weight and the input."""
    inner = 4 << step if step else 1
    tokens, outer = 2 * inner, 3 * inner
    sets: list[Callable[[], object]] = []
    for _ in range(_sets((tokens * inner + inner * outer + tokens * outer) * dtype.itemsize)):
        x, weight = torch.ones(tokens, inner, dtype=dtype), torch.ones(outer, inner, dtype=dtype)
        given = torch.ones(tokens, outer, dtype=dtype)
        sets += [
            lambda x=x, weight=weight: torch.mm(x, weight.t()),  # type: ignore[misc]
            lambda given=given, x=x: torch.mm(given.t(), x),  # type: ignore[misc]
            lambda given=given, weight=weight: torch.mm(given, weight),  # type: ignore[misc]
        ]
    return sets, 2 * tokens * inner * outer


def _batched(step: int, dtype: torch.dtype) -> tuple[list[Callable[[], object]], int]:
    """Return products of attention without a kernel of its own: scores of queries and keys, and sums of values."""
    tokens, heads, size = (8 << step, 16, 64) if step else (1, 1, 1)
    sets: list[Callable[[], object]] = []
    for _ in range(_sets(2 * heads * tokens * (size + tokens) * dtype.itemsize)):
        query, key = (torch.ones(heads, tokens, size, dtype=dtype) for _ in range(2))
        weights = torch.ones(heads, tokens, tokens, dtype=dtype)
        sets += [
            lambda query=query, key=key: torch.bmm(query, key.transpose(1, 2)),  # type: ignore[misc]
            lambda weights=weights, key=key: torch.bmm(weights, key),  # type: ignore[misc]
        ]
    return sets, 2 * heads * tokens * tokens * size


def _attention(step: int, dtype: torch.dtype) -> tuple[list[Callable[[], object]], int]:
    tokens, heads, size = (8 << step if step else 2), 4, 64
    query, key, value = (torch.ones(1, heads, tokens, size, dtype=dtype) for _ in range(3))
    flops = 4 * heads * tokens * tokens * size
    return [lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)], flops


def _convolution(step: int, dtype: torch.dtype) -> tuple[list[Callable[[], object]], int]:
    side, channels = 8, (4 << step if step else 1)
    image = torch.ones(4, channels, side, side, dtype=dtype)
    kernel = torch.ones(channels, channels, 3, 3, dtype=dtype)
    return [lambda: F.conv2d(image, kernel, padding=1)], 2 * 4 * side * side * channels * channels * 9


# Other operations --------------------------------------------------------------------------------------------------


def operation_repeats(of_class: OperationClass) -> Repeats:
    """Return the seconds of operations of a class by the bytes that one touches.

    Operations allocate their results, as those of models do: a write to new memory costs more than a write in place.
    """
    make = {"arithmetic": _arithmetic, "function": _function, "copy": _copy, "update": _update}[of_class]
    found: Repeats = {}
    for nbytes in _OPERATION_BYTES:
        runs, touched, operations = [], 0, 0
        for _ in range(_sets(nbytes)):
            made, touched, operations = make(nbytes)
            runs.append(made)
        seconds = repeats(in_turn(runs))
        found[touched / operations] = [each / operations for each in seconds]
        if max(seconds) > _LONG_S:
            break
    return found


_Made = tuple[Callable[[], object], int, int]
"""A call, the bytes that it touches, and the operations that it makes."""


def _arithmetic(nbytes: int) -> _Made:
    x, y = torch.ones(nbytes // 1024, 96), torch.ones(nbytes // 1024, 96)

    def run() -> None:
        torch.mul(x, 1.5)
        torch.add(x, y)
        x.mul_(y)
        torch.sum(x, -1)

    return run, 9 * x.nbytes, 4


def _function(nbytes: int) -> _Made:
    x = torch.ones(nbytes // 1024, 128)

    def run() -> None:
        F.silu(x)
        F.softmax(x, -1)
        torch.exp(x)

    return run, 6 * x.nbytes, 3


def _copy(nbytes: int) -> _Made:
    """Return what attention copies: heads in front of tokens, and rotated halves of heads beside one another."""
    x = torch.ones(nbytes // 2048, 4, 64)

    def run() -> None:
        x.transpose(0, 1).contiguous()
        torch.cat([x[..., 32:], x[..., :32]], -1)

    return run, 4 * x.nbytes, 2


def _update(nbytes: int) -> _Made:
    weight, gradient, first, second = (torch.ones(nbytes // 28) for _ in range(4))
    step = torch.ones(())

    def run() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    # Four tensors are read, and three are written.
    return run, 7 * weight.nbytes, 1


def row_repeats() -> Repeats:
    """Return the seconds of scattered reads and writes of rows, by the bytes of the rows."""
    table = torch.ones(_TABLE_ROWS, _ROW_ELEMENTS)
    rows = torch.randint(_TABLE_ROWS, (_ROWS,), generator=torch.Generator().manual_seed(0))
    found = torch.empty(_ROWS, _ROW_ELEMENTS)

    def run() -> None:
        torch.index_select(table, 0, rows, out=found)
        table.index_add_(0, rows, found)

    # The lookup reads and writes each row; the addition reads two rows and writes one.
    return {5.0 * found.nbytes: repeats(run)}


# Between ranks -----------------------------------------------------------------------------------------------------


def exchange_repeats(group: Group, sizes: Sequence[int] | None = None) -> dict[str, Repeats]:
    """Return the seconds of each collective of a group, by the bytes that a rank copies.

    Every rank of the group makes this call; the seconds of a repeat are those of the rank that takes longest.

    Args:
        group: The group.
        sizes: Bytes of the full tensors; None: from 1 KiB to 16 MiB.
    """
    return {
        operation: {
            copied_bytes(operation, full_bytes, group.size): _together(
                group, _exchanges(group, operation, full_bytes // 4 // group.size * group.size), full_bytes
            )
            for full_bytes in sizes or _FULL_BYTES
        }
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
    }


def message_repeats(group: Group, peers: PointToPoint, sizes: Sequence[int] | None = None) -> Repeats:
    """Return the seconds of a message between two ranks of a group, by the bytes that both of them copy.

    Args:
        group: Group of two ranks or more; those after the second wait.
        peers: Channel of the group.
        sizes: Bytes of the messages; None: from 1 KiB to 16 MiB.
    """
    found: Repeats = {}
    for full_bytes in sizes or _FULL_BYTES:
        tensor = torch.ones(full_bytes // 4)

        def run(tensor: Tensor = tensor) -> None:
            if group.index == 0:
                peers.send("", [tensor], 1, "x", "control", like=0)
                peers.receive(1, "x", like=0)
            elif group.index == 1:
                peers.receive(0, "x", like=0)
                peers.send("", [tensor], 0, "x", "control", like=0)
            peers.flush()

        # A message there and a message back.
        there_and_back = _together(group, [run], full_bytes)
        found[copied_bytes("send", full_bytes, 2)] = [each / 2 for each in there_and_back]
    return found


def _exchanges(group: Group, operation: str, elements: int) -> list[Callable[[], object]]:
    """Return calls of a collective on several sets of tensors; a gather allocates its result, as a Unit's does."""
    size, own = group.size, elements // group.size
    counts = [[own] * size] * size
    found: list[Callable[[], object]] = []
    for _ in range(_sets(8 * elements) if elements > 1 << 14 else 1):
        full, received, shard = torch.ones(elements), torch.zeros(elements), torch.ones(own)
        calls: dict[str, Callable[..., object]] = {
            "all_gather": lambda full, received, shard: group.all_gather(
                torch.empty(elements), shard, "x"
            ).wait(),
            "reduce_scatter": lambda full, received, shard: group.reduce_scatter(shard, full, "x").wait(),
            "all_reduce": lambda full, received, shard: group.all_reduce(received, "x").wait(),
            "broadcast": lambda full, received, shard: group.broadcast(full, 0, "x").wait(),
            "all_to_all": lambda full, received, shard: group.all_to_all(received, full, counts, "x").wait(),
        }
        call = calls[operation]
        found.append(
            lambda call=call, full=full, received=received, shard=shard: call(full, received, shard)  # type: ignore[misc]
        )
    return found


def _together(group: Group, runs: Sequence[Callable[[], object]], full_bytes: int) -> list[float]:
    """Return the seconds of one call in rounds that all ranks make with as many calls, of the slowest rank."""
    times = 10 if full_bytes < 1 << 18 else 4
    run = in_turn(runs)
    run()

    def several() -> None:
        for _ in range(times):
            run()

    everyones = _everyones_s(group, several, 2 * _ROUNDS)
    return [max(row) / times for row in everyones]


def _everyones_s(group: Group, run: Callable[[], None], rounds: int) -> list[list[float]]:
    """Return the seconds of each rank in each round of a call that all ranks begin together.

    Rounds in which a rank lost its core to another process are left out. If these are more than half, as they are if
    the threads of gloo need more cores than there are, the faster half of all rounds stays.
    """
    found = []
    for _ in range(rounds):
        group.barrier()
        lost, begin = _switches(), time.perf_counter()
        run()
        found.append([time.perf_counter() - begin, float(_switches() - lost)])
    mine = torch.tensor(found, dtype=torch.float64).flatten()
    everyones = mine.new_empty(group.size * len(mine))
    group.all_gather(everyones, mine, "seconds", "control").wait()
    by_round = everyones.view(group.size, rounds, 2).transpose(0, 1)
    seconds, lost_by_round = by_round[..., 0], by_round[..., 1].sum(-1)
    kept = lost_by_round == 0
    if 2 * int(kept.sum()) < rounds:
        kept[:] = False
        kept[seconds.amax(-1).argsort()[: max(rounds // 2, 1)]] = True
    return seconds[kept].tolist()  # type: ignore[no-any-return]


def _switches() -> int:
    """Return how often this thread has lost its core to another."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


def late_shares(group: Group) -> dict[float, list[float]]:
    """Return the shares of equal work for which ranks wait for the last of them, by seconds of the work.

    A share is the mean over many meetings of (the longest - the mean) / the mean of the ranks' seconds.
    """
    step = torch.ones(128, 128)
    x = torch.ones(1 << 18)

    def work() -> None:
        torch.mm(step, step)
        torch.mul(x, 1.5)

    once = typical_s(work)
    found: dict[float, list[float]] = {}
    for seconds in _WORK_S:
        # All ranks make the same number of calls.
        agreed = torch.tensor([seconds / once], dtype=torch.float64)
        group.all_reduce(agreed, "calls", "control").wait()
        times, meetings = max(int(agreed.item() / group.size), 1), max(round(0.25 / seconds), 3)

        def several(times: int = times) -> None:
            for _ in range(times):
                work()

        everyones = _everyones_s(group, several, meetings)
        found[seconds] = [max(row) / statistics.mean(row) - 1 for row in everyones]
    return found


# Figures -----------------------------------------------------------------------------------------------------------


def united(sweeps: Sequence[Mapping[Any, list[float]]]) -> dict[Any, list[float]]:
    """Return the repeats of several sweeps together; a size that one sweep left out is left out."""
    return {
        key: [each for sweep in sweeps for each in sweep[key]]
        for key in sweeps[0]
        if all(key in sweep for sweep in sweeps)
    }


def rates(found: Mapping[float, list[float]]) -> Points:
    """Return FLOPs or bytes per second, from the medians of repeats."""
    return tuple((size, size / statistics.median(found[size])) for size in sorted(found))


def times(found: Mapping[float, list[float]]) -> Points:
    """Return seconds from the medians of repeats, which do not fall: a larger exchange takes no less.

    Neighbouring medians that fall have their geometric mean (isotonic regression), so that one slow median does not
    lift all larger sizes.
    """
    blocks: list[list[float]] = []
    for size in sorted(found):
        blocks.append([math.log(statistics.median(found[size]))])
        while len(blocks) > 1 and statistics.mean(blocks[-2]) > statistics.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    seconds = [math.exp(statistics.mean(block)) for block in blocks for _ in block]
    return tuple(zip(sorted(found), seconds, strict=True))


def differences(found: Mapping[float, list[float]]) -> list[float]:
    """Return each repeat over the median of its size."""
    return [each / statistics.median(row) for row in found.values() for each in row if math.isfinite(each)]
