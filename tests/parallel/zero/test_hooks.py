"""Models that depart from a plain row of blocks give the numbers of a plain loop all the same."""

import traceback
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.parallel.zero.hooks import _OwnAttributes
from tests.engine.nets import PREFETCH_BYTES, seeded
from tests.engine.plain import Truth, against_plain, plainly
from tests.everyday import chosen
from tests.parallel.zero.nets import NETS, WIDTH


class Case(NamedTuple):
    net: str
    stage: int
    transport: str = "auto"
    debug: bool = False
    prefetch: int = 0

    def __str__(self) -> str:
        more = (self.transport, f"ahead{self.prefetch}", "debug")
        kept = (self.transport != "auto", self.prefetch > 0, self.debug)
        return "-".join([self.net, f"zero{self.stage}", *(m for m, k in zip(more, kept, strict=True) if k)])


EVERY = [Case(net, stage) for net in NETS for stage in range(4)]
EVERY += [Case(net, 3, "torch", True, 1) for net in NETS]
CASES = [Case(net, (place // 3 % 2, 2, 3)[place % 3]) for place, net in enumerate(NETS)]
CASES += [Case(net, 3, "torch", True, 1) for net in list(NETS)[::18]]
"""Each net at one stage. Where a weight stays whole, a gradient is summed late at stage 0 as at stage 1. The soak has
the others."""


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    """The first step's flags differ between ranks, the second's are all down, the third's all up."""
    generator = torch.Generator().manual_seed(100 * step + i)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.tensor([i % 2 == 1, False, True, i % 2 == 0][step % 4])


@cache
def truth(net: str, pieces: int) -> list[Truth]:
    return plainly(lambda: seeded(NETS[net]), piece, pieces, steps=4)


def measure(world: Any, case: Case) -> float | str:
    cls = NETS[case.net]
    config = {
        "zero": {
            "stage": case.stage,
            "units": cls.units,
            "debug": case.debug,
            "prefetch_bytes": PREFETCH_BYTES[case.prefetch],
            "reductions_under_way": case.prefetch,
        },
        "batch": {"accumulation": 2},
        "comm": {"transport": case.transport, "timeout_s": 10.0, "debug_delay_s": 0.0005 * case.debug},
    }
    try:
        wanted = truth(case.net, 2 * world.size)
        return against_plain(world, lambda: seeded(cls), piece, config, truth=wanted)
    except Exception:
        return traceback.format_exc()


def measure_all(world: Any, cases: list[Case]) -> list[float | str]:
    return [measure(world, case) for case in cases]


@pytest.fixture(scope="module")
def measured(ranks: Any, request: pytest.FixtureRequest) -> dict[Case, list[float | str]]:
    cases = [case for (case,) in chosen(request, "test_equals_a_plain_loop", "case")]
    by_rank = ranks(2).run(measure_all, cases)
    return {case: list(row) for case, *row in zip(cases, *by_rank, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_plain_loop(measured: dict[Case, list[float | str]], case: Case) -> None:
    for result in measured[case]:
        assert isinstance(result, float), result
        assert result <= 1e-10


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case in EVERY if case not in CASES], ids=str)
def test_every_case_equals_a_plain_loop(ranks: Any, case: Case) -> None:
    for result in ranks(2).run(measure, case):
        assert isinstance(result, float), result
        assert result <= 1e-10


def test_own_attributes_are_those_that_a_module_has_now() -> None:
    """A module may set, replace and delete attributes in each forward pass, as one for a side loss does."""
    module = torch.nn.Linear(2, 2)
    own = _OwnAttributes([module, torch.nn.ModuleList()])
    found, holders = [], {"first": torch.ones(1), "second": [torch.ones(2)], "third": {"a": torch.ones(3)}}
    found.append(list(own.holders()))
    module.side = holders["first"]
    found.append(list(own.holders()))
    module.side = holders["second"]  # type: ignore[assignment]
    found.append(list(own.holders()))
    del module.side
    module.other = holders["third"]  # type: ignore[assignment]
    found.append(list(own.holders()))
    assert [[id(each) for each in row] for row in found] == [[], *([id(each)] for each in holders.values())]
