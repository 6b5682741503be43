"""Batch norm: per rank by default, or of the joint batch, exactly as one process has it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from tests.engine.nets import seeded
from tests.engine.plain import train, worst

LIMIT = 1e-10
SIZES = (5, 2)
"""Samples of rank 0 and 1: uneven."""


class Images(nn.Module):
    """Two and one dimensions, with and without weights, running averages by factor and by count, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(3),
                nn.BatchNorm2d(3, affine=False),
                nn.BatchNorm2d(3, momentum=None),
                nn.BatchNorm2d(3, track_running_stats=False),
            ]
        )
        self.last = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = torch.tanh(norm(x)) + x
        result: Tensor = (self.last(x.flatten(1)).squeeze(1) - target).square().mean()
        return result


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SIZES), 2, 4, 4, generator=generator, dtype=torch.float64)
    return x * 3 + 1, torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)


def mine(step: int, rank: int) -> tuple[Tensor, Tensor]:
    start = sum(SIZES[:rank])
    x, target = batch(step)
    return x[start : start + SIZES[rank]], target[start : start + SIZES[rank]]


def synchronized(world: Any, stage: int, compile: str = "none") -> None:
    plain = seeded(Images)
    truth = train(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.05),
        [[(batch(step), 1.0)] for step in range(3)],
        lambda model, given: model(*given),
    )
    config = {
        "zero": {"stage": stage} | ({} if compile == "none" else {"units": ["last"]}),
        "batch_norm": "synchronized",
        "compile": {"scope": compile, "backend": "aot_eager"} if compile != "none" else {},
        "optimizer": {"type": "sgd", "lr": 0.05},
    }
    engine = shardwise.initialize(seeded(Images), config, world=world)
    for step, wanted in enumerate(truth):
        x, target = mine(step, world.rank)
        engine.backward(engine((x, target)), weight=len(x))
        # A bias before a batch norm has the gradient 0, up to rounding: errors are measured against 1 there.
        ones = {name: torch.ones_like(gradient) for name, gradient in wanted.gradients.items()}
        assert worst(engine.gradients(), wanted.gradients, ones) <= LIMIT
        result = engine.step()
        assert abs(result.loss - wanted.loss) <= LIMIT * wanted.loss
    state = engine.state_dict()
    assert worst(state, plain.state_dict()) <= LIMIT
    assert state["norms.0.num_batches_tracked"] == 3
    # In evaluation the running averages are used, and nobody waits for anybody.
    plain.eval()
    engine.eval()
    x, target = mine(9, world.rank)
    with torch.no_grad():
        assert abs(float(engine((x, target)) - plain(x, target))) <= LIMIT
        if world.rank == 0 and stage < 3:
            engine((x, target))
    engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_synchronized_equals_one_process(ranks: Any, stage: int) -> None:
    ranks(2).run(synchronized, stage)


def compiled(world: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # dynamo's own
        synchronized(world, 0, "blocks")


def test_synchronized_in_compiled_blocks(ranks: Any) -> None:
    """The compiler traced into the collective and ended in "all_reduce of batch statistics failed"."""
    ranks(2).run(compiled)


def test_per_rank_is_the_mean_of_the_ranks(ranks: Any) -> None:
    for errors in ranks(2).run(per_rank_gradients):
        assert max(errors) <= LIMIT


def per_rank_gradients(world: Any) -> list[float]:
    errors = []
    for stage in range(4):
        plain = seeded(Images)
        truth = train(
            plain,
            torch.optim.SGD(plain.parameters()),
            [[(mine(0, rank), 1.0) for rank in range(2)]],
            lambda model, given: model(*given),
        )[0]
        engine = shardwise.initialize(seeded(Images), {"zero": {"stage": stage}}, world=world)
        engine.backward(engine(mine(0, world.rank)))
        errors.append(worst(engine.gradients(), truth.gradients, truth.addends))
        engine.step()
        # Running averages are those of this rank's own batches.
        alone = seeded(Images)
        alone(*mine(0, world.rank))
        state = engine.state_dict()
        errors.append(worst({n: state[n] for n, _ in alone.named_buffers()}, dict(alone.named_buffers())))
        engine.close()
    return errors


def test_there_must_be_a_batch_norm() -> None:
    with pytest.raises(UsageError, match="no batch norm"):
        shardwise.initialize(nn.Linear(2, 1), {"batch_norm": "synchronized"})
