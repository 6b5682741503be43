"""Products in pieces: the numbers of the product in one piece, the same bytes, and each exchange beside a product."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.base.errors import CommError
from shardwise.comm import duals
from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic, TrafficCount
from shardwise.comm.transports import NoTransport
from shardwise.comm.world import World
from shardwise.parallel.tensor.overlap import (
    ForwardOverlap,
    ProductSite,
    gathered_product,
    product_over_ranks,
)
from shardwise.plan.mesh import Mesh
from tests.comm import late

D, F = 10, 6
KINDS = ("column", "row", "sum")


class Case(NamedTuple):
    """One product; ``tokens`` of a rank."""

    kind: str
    samples: int
    tokens: int
    pieces: int
    has_bias: bool = False
    is_transposed: bool = False
    inner: tuple[int, ...] = ()
    """Dims between tokens and features."""

    @property
    def calls(self) -> int:
        """Collectives that the product needs."""
        if self.kind == "sum":
            return min(self.pieces, self.samples * self.tokens * 2 * math.prod(self.inner))
        return self.pieces if self.samples >= self.pieces else min(self.pieces, self.tokens)


CASES = [
    Case(kind, samples, tokens, pieces, is_transposed=pieces == 3)
    for kind in KINDS
    for samples, tokens, pieces in (
        (1, 4, 2),  # pieces of tokens
        (1, 5, 3),  # which they do not divide
        (2, 5, 3),
        (3, 2, 3),  # one sample each
        (5, 2, 3),  # samples which they do not divide
        (1, 2, 9),  # more pieces than tokens
        (1, 1, 2),
    )
]
CASES += [Case(kind, samples, 3, 2, inner=(4,)) for kind in KINDS for samples in (1, 2)]
CASES += [Case("column", 1, 5, 3, has_bias=True), Case("column", 3, 2, 2, has_bias=True)]


def group_of(world: World, transport: str = "auto") -> Group:
    clock = StepClock(20.0)
    clock.steps_done = 1
    return world.group(Mesh(tp=world.size), "tp", CommPolicy(transport=transport), clock, Traffic())


def product(group: Group, case: Case, pieces: int) -> Tensor:
    generator = torch.Generator().manual_seed(3 + group.index)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weight = drawn(D, F).mT if case.is_transposed else drawn(F, D)
    site = ProductSite(group, "a product", ForwardOverlap(pieces))
    if case.kind == "column":
        x = drawn(case.samples, case.tokens, *case.inner, D)
        return gathered_product(site, x, weight, drawn(F) if case.has_bias else None)
    x = drawn(case.samples, case.tokens * group.size, *case.inner, D)
    return product_over_ranks(site, x, weight, case.kind == "row")


def compared(world: World, transport: str) -> list[tuple[float, list[TrafficCount]]]:
    """Of each case the distance from the product in one piece, and the traffic of both."""
    found = []
    for case in CASES:
        results, sent = [], []
        for pieces in (1, case.pieces):
            group = group_of(world, transport)
            results.append(product(group, case, pieces))
            sent.append(group.traffic.total())
        one, several = results
        assert one.shape == several.shape and several.is_contiguous()
        found.append((float((several - one).norm() / one.norm()), sent))
    return found


@pytest.mark.parametrize("transport", ["shared_memory", "torch"])
def test_pieces_change_neither_numbers_nor_bytes(ranks: Any, transport: str) -> None:
    for rank in ranks(2).run(compared, transport):
        for case, (distance, (one, several)) in zip(CASES, rank, strict=True):
            assert distance <= 1e-14, case
            assert one.calls == 1 and several.calls == case.calls, case
            assert one.elements == several.elements and one.bytes == several.bytes, case


# The order ---------------------------------------------------------------------------------------------------------


class Recording(NoTransport):
    """Writes down what begins and what is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._number = 0

    def _begin(self, *args: Any) -> PendingCollective:
        number, self._number = self._number, self._number + 1
        self.events.append(f"start {number}")
        return PendingCollective(lambda: self.events.append(f"wait {number}"))

    all_gather = reduce_scatter = all_reduce = _begin  # type: ignore[assignment]


class Meter:
    """Counts the waits of the computation (comm/wait_meter.py)."""

    def __init__(self) -> None:
        self.axes: list[str] = []

    def begin(self) -> float:
        return 0.0

    def end(self, axis: str, mark: float) -> None:
        self.axes.append(axis)


class Products(TorchDispatchMode):
    """Writes down products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_is_under_way_during_every_product_but_one(kind: str, samples: int) -> None:
    transport = Recording()
    clock, meter = StepClock(20.0), Meter()
    clock.meter = meter  # type: ignore[assignment]
    group = Group("tp", (0, 1), 0, transport, clock, Traffic())
    with torch.no_grad(), Products(transport.events):
        product(group, Case(kind, samples, 6, 3), 3)
    assert meter.axes == ["tp"] * 6, "the host's part of each start, and each wait"
    starts, waits = ([f"{word} {i}" for i in range(3)] for word in ("start", "wait"))
    if kind == "column":
        assert transport.events == [*starts, *(each for wait in waits for each in (wait, "product"))]
    else:
        assert transport.events == [*(each for start in starts for each in ("product", start)), *waits]


# The rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "features", "pieces"),
    [
        (8192, 4096, 4),
        (4096, 2048, 2),  # of 8 MiB each
        (1024, 8192, 1),  # rows enough for one
        (1, 4096, 1),
        (0, 4096, 1),
    ],
)
def test_auto_cuts_what_is_large(rows: int, features: int, pieces: int) -> None:
    assert ForwardOverlap("auto").pieces(rows, features, 2, True) == pieces
    assert ForwardOverlap("off").pieces(rows, features, 2, True) == 1


def test_symmetric_memory_leaves_sums_to_pieces() -> None:
    assert [ForwardOverlap("symmetric_memory").pieces(8192, 4096, 2, cut) for cut in (True, False)] == [1, 4]


# Bugs --------------------------------------------------------------------------------------------------------------


def not_waited_for() -> AbstractContextManager[Any]:
    """Pieces are multiplied before they are there."""
    right, kept = Group.all_gather, []

    def wrong(self: Group, *args: Any) -> PendingCollective:
        kept.append(right(self, *args))
        return DONE

    return patch.object(Group, "all_gather", wrong)


def to_another_place() -> AbstractContextManager[Any]:
    """Ranks' tokens are joined as those of one sample after another."""
    right = duals.start_gather

    def wrong(x: Tensor, group: Group, what: str, dim: int = 1) -> Callable[[], Tensor]:
        return right(x, group, what, 1)

    return patch.object(duals, "start_gather", wrong)


def started_before_its_product() -> AbstractContextManager[Any]:
    """A sum begins while its addend is still written."""
    right = duals.start_sum

    def wrong(x: Tensor, group: Group, what: str) -> Callable[[], Tensor]:
        addend = x.clone()
        x.zero_()
        finish = right(x, group, what)
        x.copy_(addend)
        return finish

    return patch.object(duals, "start_sum", wrong)


PLANTED = [
    (Case("column", 1, 5, 3), not_waited_for),
    (Case("column", 2, 5, 3), to_another_place),
    (Case("sum", 1, 5, 3), started_before_its_product),
]


def planted(world: World, number: int, is_planted: bool) -> float | str:
    """The distance from one piece, with collectives at their latest, or the error of an exchange."""
    case, plant = PLANTED[number]
    expected = product(group_of(world), case, 1)
    part = world.among(range(world.size))  # with transports of its own
    try:
        with late.installed(), plant() if is_planted else nullcontext():
            found = product(group_of(part), case, case.pieces)
        return float((found - expected).norm() / expected.norm())
    except CommError as error:
        return str(error)
    finally:
        part.release()


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[plant.__name__ for _, plant in PLANTED])
def test_bugs_are_seen(ranks: Any, number: int) -> None:
    assert all(distance <= 1e-14 for distance in ranks(2).run(planted, number, False))
    for found in ranks(2).run(planted, number, True):
        if isinstance(found, str):
            assert "changed between start and wait" in found
        else:
            assert not found <= 1e-3, "NaN, or far away"
