"""Sums of gradients on numbered elements, on pretended ranks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise.comm.flights import DONE
from shardwise.compose.plan import make_plan
from shardwise.engine.fit.foresee import read
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.zero.gradient import Gradient
from shardwise.plan.plan import Plan
from shardwise.verify import reductions
from shardwise.verify.reductions import reduction_problems


def plan_of(ranks: int, tied: bool = False, **settings: Any) -> Plan:
    def make() -> nn.Module:
        with torch.device("meta"):
            sizes: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocab": 19}
            return Gpt(GptPolicy(family="gpt2", tied_head=tied, **sizes))

    known = read(make, settings, ranks, torch.device("cpu"))
    return make_plan(known.spec, known.mesh, known.policies)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (4, {"zero": {"stage": 3}}),
        (4, {"mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": 2}}),
        (4, {"mesh": {"tp": 2}, "zero": {"stage": 1}}),
        (8, {"mesh": {"tp": 2, "pp": 2}, "batch": {"accumulation": 2}}),
    ],
    ids=str,
)
def test_right_layouts_have_no_problem(ranks: int, settings: dict[str, Any]) -> None:
    for tied in (False, True):
        plan = plan_of(ranks, tied, **settings)
        reduced, problems, left_out = reduction_problems(plan)
        assert not problems, [*map(str, problems)]
        assert not left_out
        assert reduced == len(plan.registry.of_kind("gradient"))


def _sums_nothing(self: Gradient, into: Any, full: Any, accumulate: bool = False) -> Any:
    """Zeros, because the memory may hold the right sums of an earlier test."""
    into.zero_()
    return DONE


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_missing_sum_is_found_in_every_stage(stage: int) -> None:
    plan = plan_of(2, zero={"stage": stage})
    with (
        patch.object(Gradient, "_sum_over", lambda *args: DONE),
        patch.object(Gradient, "_reduce_scatter", _sums_nothing),
    ):
        _, problems, _ = reduction_problems(plan)
    assert "blocks.0.mlp_norm.weight" in {each.name for each in problems}


def test_large_buckets_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "MOST_ELEMENTS", 1)
    reduced, problems, left_out = reduction_problems(plan_of(2))
    assert (reduced, problems) == (0, [])
    assert left_out
