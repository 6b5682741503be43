"""bf16 and fp16 across slices, stages and ZeRO: losses near one rank's, and all ranks skip the same steps."""

import itertools
import math
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import PlanError
from shardwise.comm.world import join
from shardwise.engine.engine import Engine
from shardwise.models import Gpt
from tests.engine.nets import seeded
from tests.engine.test_dropout_layouts import batch_of
from tests.engine.test_model_parallel import Layout, config_of, policy_of
from tests.everyday import chosen

STEPS = 6
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2, microbatches=4),
    Layout(pp=2, dp=2, stage=3, microbatches=2),
    Layout(pp=2, tp=2, microbatches=2, family="gpt2", schedule="interleaved_1f1b", virtual_stages=2),
]
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3}


def precision_of(compute: str) -> dict[str, Any]:
    """``overflow``: fp16 with a loss scale of 2^24, under which the first steps overflow until it has halved enough."""
    if compute == "bf16":
        return {"compute": "bf16"}
    start = 2.0**24 if compute == "overflow" else 2.0**12
    return {"compute": "fp16", "loss_scale": {"init_scale": start, "hysteresis": 1}}


def curve(world: Any, layout: Layout, compute: str) -> list[tuple[bool, float, float]]:
    """(skipped, loss, scale) by step."""
    with torch.device("meta"):
        model = Gpt(policy_of(layout))
    config = config_of(layout) | {"precision": precision_of(compute), "train": {"seed": 3}}
    engine = shardwise.initialize(model, config, world=world)
    index, found = engine.dp_index, []
    for step in range(STEPS + 12 if compute == "overflow" else STEPS):
        parts = [each.chunk(layout.dp * layout.microbatches) for each in batch_of(step % 3)]
        result = engine.train_step(list(zip(*(each[index :: layout.dp] for each in parts), strict=True)))
        found.append((result.skipped, result.loss, engine.loss_scale or 0.0))
    engine.close()
    return found


def curves(world: Any, layouts: list[Layout], compute: str) -> list[Any]:
    return [curve(world, layout, compute) for layout in layouts]


@pytest.fixture(scope="module")
def found(ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Curves by rank of a layout; one call per number of ranks and dtype."""
    rows = chosen(request, "test_losses_are_near_those_of_one_rank", "layout", "compute")
    rows += [(layout, "overflow") for (layout,) in chosen(request, "test_all_ranks_skip_together", "layout")]

    @cache
    def get(size: int, compute: str) -> dict[Layout, list[Any]]:
        table = [layout for layout, given in rows if layout.size == size and given == compute]
        by_rank = ranks(size).run(curves, table, compute)
        return dict(zip(table, zip(*by_rank, strict=True), strict=True))

    return get


@cache
def alone(family: str, compute: str) -> Any:
    return curve(join(quiet=True), Layout(family=family), compute)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_are_near_those_of_one_rank(found: Any, layout: Layout, compute: str) -> None:
    truth = alone(layout.family, compute)
    losses = [loss for _, loss, _ in truth]
    assert min(losses) < max(losses) - 0.05, "a curve that does not move shows nothing"
    for own in found(layout.size, compute)[layout]:
        assert not any(skipped for skipped, *_ in own)
        assert [loss for _, loss, _ in own] == pytest.approx(losses, rel=TOLERANCE[compute])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_skip_together(found: Any, layout: Layout) -> None:
    """Which step is the last to overflow depends on how sums are rounded; not on the rank."""
    first, *others = found(layout.size, "overflow")[layout]
    assert all(other == first for other in others), "ranks differ in loss, scale or what they skip"
    skipped = [was_skipped for was_skipped, *_ in first]
    assert skipped[0]
    assert not all(skipped[STEPS:])
    scales = [2.0**24, *(scale for *_, scale in first)]
    assert [after == before / 2 for before, after in itertools.pairwise(scales)] == skipped
    assert first[-1][1] < first[0][1] - 0.05


def overflow_on_one_rank(world: Any, layout: Layout, where: int) -> tuple[bool, bool, float]:
    """Whether a step is skipped, and the weights stay, when one element on one rank is infinite."""
    with torch.device("meta"):
        model = Gpt(policy_of(layout))
    config = config_of(layout) | {"precision": {"compute": "fp16", "loss_scale": {"hysteresis": 1}}}
    engine = shardwise.initialize(model, config, world=world)
    engine_step = engine._training.step

    def with_overflow() -> Any:
        if world.rank == where:
            engine._parts.trained[-1].bucket.gradient.owned[0] = math.inf
        return engine_step()

    parts = [each.chunk(layout.dp * layout.microbatches) for each in batch_of(0)]
    index = engine.dp_index
    batches = list(zip(*(each[index :: layout.dp] for each in parts), strict=True))
    before = engine.state_dict()
    with patch.object(engine._training, "step", with_overflow):
        result = engine.train_step(batches)
    after = engine.state_dict()
    same = all(torch.equal(before[name], after[name]) for name in before)
    scale = engine.loss_scale
    assert scale is not None
    assert isinstance(engine, Engine)
    engine.close()
    return result.skipped, same, scale


@pytest.mark.parametrize("where", range(4))
def test_an_overflow_on_one_rank_is_an_overflow_on_all(ranks: Any, where: int) -> None:
    layout = Layout(pp=2, tp=2, microbatches=2)
    assert ranks(4).run(overflow_on_one_rank, layout, where) == [(True, True, 2.0**15)] * 4


class Normed(nn.Module):
    """A batch norm behind a pair of cut layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.norm(x + self.down(self.up(x).tanh()))).square().mean()
        return loss


def normed(world: Any, tp: int, precision: str, style: str) -> list[float]:
    """Losses, a norm of gradients and the running statistics."""
    up = "column enter" if style == "sequence" else "column"
    rows = {"": "replicate", "up": up, "down": "row", "norm": style}
    config: dict[str, Any] = {
        "mesh": {"tp": tp},
        "precision": precision,
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    tensor = {"table": rows, "sequence_parallel": style == "sequence"}
    model = seeded(Normed, dtype=torch.float64 if precision == "fp64" else torch.float32)
    engine = shardwise.initialize(model, config | {"tensor": tensor}, world=world)
    given = torch.linspace(-2, 3, 64, dtype=torch.float64).view(16, 4).sin() * torch.arange(1, 5)
    steps = [engine.train_step([given * (1 + step)]) for step in range(3)]
    statistics = [*model.norm.running_mean.tolist(), *model.norm.running_var.tolist()]
    engine.close()
    return [steps[-1].loss, steps[0].grad_norm, *statistics]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("bf16", 2e-2)])
def test_batch_norm_behind_slices(ranks: Any, precision: str, tolerance: float) -> None:
    truth = normed(join(quiet=True), 1, precision, "replicate")
    for found in ranks(2).run(normed, 2, precision, "replicate"):
        assert found == pytest.approx(truth, rel=tolerance, abs=tolerance)


def refused_norm(world: Any, style: str) -> str:
    with pytest.raises(PlanError) as caught:
        normed(world, 2, "bf16", style)
    return str(caught.value)


@pytest.mark.parametrize("style", ["sequence", "channels"])
def test_statistics_of_a_part_are_refused(ranks: Any, style: str) -> None:
    for text in ranks(2).run(refused_norm, style):
        assert f"norm: style {style} gives a BatchNorm1d a part" in text
