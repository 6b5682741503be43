"""Parameters in pieces are read and written as if they were whole, and what is written stays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.deepspeed.files import fragments
from tests.deepspeed.files.whole import engine_of, net
from tests.ranks import RankPool


def inputs(rank: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank)


def edits(world: World, stage: int) -> list[Tensor]:
    """A weight is set by rank 1 alone, a gradient doubled, a moment zeroed; then a step."""
    model = net()
    engine = engine_of(model, stage, bf16={"enabled": True})
    weight, bias = model[0].weight, model[2].bias
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        assert weight.shape == (5, 3)
        if world.rank == 1:
            weight.fill_(0.25)
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert master is not None and master.dtype is torch.float32 and (master == 0.25).all()
    fragments.safe_set_full_fp32_param(bias, torch.tensor([0.1, 0.2]))
    engine.backward(engine(inputs(world.rank)).square().sum())
    gradient = fragments.safe_get_full_grad(bias)
    assert gradient is not None and gradient.shape == (2,)
    fragments.safe_set_full_grad(bias, 2 * gradient)
    engine.step()
    after = fragments.safe_get_full_fp32_param(bias)
    moment = fragments.safe_get_full_optimizer_state(bias, "momentum_buffer")
    pieces = fragments.safe_get_local_fp32_param(bias)
    fragments.safe_set_full_optimizer_state(bias, torch.zeros(2), "momentum_buffer")
    cleared = fragments.safe_get_full_optimizer_state(bias, "momentum_buffer")
    engine.destroy()
    found = [gradient, after, moment, pieces, cleared]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("stage", [0, 3])
def test_edits_reach_the_next_step(ranks: Callable[[int], RankPool], stage: int) -> None:
    first, second = ranks(2).run(edits, stage)
    for found, other in zip((first, second), (second, first), strict=True):
        gradient, after, moment, pieces, cleared = found
        torch.testing.assert_close(after, torch.tensor([0.1, 0.2]) - 0.5 * 2 * gradient)
        torch.testing.assert_close(moment, 2 * gradient)
        assert not cleared.any() and torch.equal(gradient, other[0])
        assert pieces.numel() == (2 if stage == 0 else len(pieces)) and len(pieces) + len(other[3]) == (
            4 if stage == 0 else 2
        )


def free(world: World) -> float:
    """Parameters that no engine has are the script's; a write reaches all ranks."""
    model = net()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        model[0].weight.fill_(1.0 + world.rank)
    assert fragments.safe_get_full_fp32_param(model[0].weight) is None
    assert not fragments.is_zero_param(model[0].weight)
    return model[0].weight.mean().item()


def test_parameters_that_no_engine_has(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(free) == [1.0, 1.0]
    with pytest.raises(UsageError, match="no engine has"):
        fragments.safe_set_full_fp32_param(nn.Parameter(torch.zeros(1)), torch.zeros(1))
