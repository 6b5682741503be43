"""Models that depart from a plain row of blocks give the numbers of a plain loop all the same."""

import traceback
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.nets import seeded
from tests.engine.plain import against_plain
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


CASES = [Case(net, stage) for net in NETS for stage in range(4)]
CASES += [Case(net, 3, "torch", True, 1) for net in NETS]


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    """The first step's flags differ between ranks, the second's are all down, the third's all up."""
    generator = torch.Generator().manual_seed(100 * step + i)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.tensor([i % 2 == 1, False, True, i % 2 == 0][step % 4])


def measure(world: Any, case: Case) -> float | str:
    cls = NETS[case.net]
    config = {
        "zero": {
            "stage": case.stage,
            "units": cls.units,
            "debug": case.debug,
            "prefetch_units": case.prefetch,
        },
        "batch": {"accumulation": 2},
        "comm": {"transport": case.transport, "timeout_s": 10.0, "debug_delay_s": 0.0005 * case.debug},
    }
    try:
        return against_plain(world, lambda: seeded(cls), piece, config, steps=4)
    except Exception:
        return traceback.format_exc()


def measure_all(world: Any, cases: list[Case]) -> list[float | str]:
    return [measure(world, case) for case in cases]


@pytest.fixture(scope="module")
def measured(ranks: Any) -> dict[Case, list[float | str]]:
    by_rank = ranks(2).run(measure_all, CASES)
    return {case: list(row) for case, *row in zip(CASES, *by_rank, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_plain_loop(measured: dict[Case, list[float | str]], case: Case) -> None:
    for result in measured[case]:
        assert isinstance(result, float), result
        assert result <= 1e-10
