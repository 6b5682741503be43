"""Dropout and start weights do not depend on the mesh: the same losses on every layout, from the same bits."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.comm.world import join
from shardwise.models import Gpt
from tests.engine.test_model_parallel import Layout, config_of, policy_of
from tests.everyday import chosen

SEQUENCES, CONTEXT, STEPS = 8, 12, 5
AXES: list[dict[str, Any]] = [
    {"dp": 2, "microbatches": 2, "stage": 3},
    {"tp": 2},
    {"tp": 2, "sequence": False},
    {"pp": 2, "microbatches": 2},
    {"pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "microbatches": 2},
    {"pp": 2, "tp": 2, "microbatches": 4, "recompute": "full"},
]
ALTERNATING = "gpt2", "llama", "gpt2", "llama", "gpt2", "llama", "gpt2"
LAYOUTS = [
    *(Layout(family=family, dropout=0.1, **axes) for family, axes in zip(ALTERNATING, AXES, strict=True)),
    Layout(tp=2, dropout=0.1, family="gpt2"),
]
EVERY = [Layout(family=family, dropout=0.1, **axes) for family in ("llama", "gpt2") for axes in AXES]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 19, (SEQUENCES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def curve(world: Any, layout: Layout) -> tuple[dict[str, list[float]], list[float]]:
    """Start weights and losses of a model that was built on meta."""
    with torch.device("meta"):
        model = Gpt(policy_of(layout))
    engine = shardwise.initialize(model, config_of(layout) | {"train": {"seed": 3}}, world=world)
    start = {name: tensor.flatten().tolist() for name, tensor in engine.state_dict().items()}
    index, losses = engine.dp_index, []
    for step in range(STEPS):
        parts = [each.chunk(layout.dp * layout.microbatches) for each in batch_of(step)]
        mine = list(zip(*(each[index :: layout.dp] for each in parts), strict=True))
        losses.append(engine.train_step(mine).loss)
    engine.close()
    return start, losses


def curves(world: Any, layouts: list[Layout]) -> list[Any]:
    return [curve(world, layout) for layout in layouts]


@pytest.fixture(scope="module")
def found(ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Curves by rank of a layout; one call per number of ranks."""
    layouts = [layout for (layout,) in chosen(request, "test_losses_are_those_of_one_rank", "layout")]

    @cache
    def get(size: int) -> dict[Layout, list[Any]]:
        table = [layout for layout in layouts if layout.size == size]
        by_rank = ranks(size).run(curves, table)
        return dict(zip(table, zip(*by_rank, strict=True), strict=True))

    return get


@cache
def alone(family: str, dropout: float) -> Any:
    return curve(join(quiet=True), Layout(family=family, dropout=dropout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_are_those_of_one_rank(found: Any, layout: Layout) -> None:
    start, losses = alone(layout.family, layout.dropout)
    for own_start, own_losses in found(layout.size)[layout]:
        assert own_start == start, "start weights differ"
        assert own_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("layout", [layout for layout in EVERY if layout not in LAYOUTS], ids=str)
def test_losses_on_every_layout(ranks: Any, layout: Layout) -> None:
    start, losses = alone(layout.family, layout.dropout)
    for own_start, own_losses in ranks(layout.size).run(curve, layout):
        assert own_start == start, "start weights differ"
        assert own_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_is_seen_in_the_losses(family: str) -> None:
    with_dropout, without = alone(family, 0.1)[1], alone(family, 0.0)[1]
    assert min(abs(a / b - 1) for a, b in zip(with_dropout, without, strict=True)) > 1e-4
