"""A NaN on one rank: all ranks name that rank and the module that made it, before they stop.

Each rank once looked for itself, and the first to speak was shown: the rank that had got the NaN from another, with
"all outputs are finite on this rank".
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import NonFiniteError
from shardwise.comm.world import World
from tests.ranks import RankPool


class Root(nn.Module):
    """Makes NaN of negative sums, which only some batches have."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sum(1, keepdim=True).sqrt()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 4), nn.Softplus(), Root()),
        nn.Linear(4, 1),
    ).double()


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def told(world: World, config: dict[str, Any], culprit: int, where: str) -> str:
    """What a rank says where the batch of one data-parallel place is bad."""
    net = model()
    engine = shardwise.initialize(net, {"precision": "fp64", **config}, loss=squared, world=world)
    accumulation = engine.config.batch.accumulation or 1
    for step in range(2):
        dp = engine.dp_index
        batches = [torch.full((2, 4), 0.1 * i + dp, dtype=torch.float64) for i in range(accumulation)]
        if step == 1 and dp == culprit and where == "batch":
            batches[0][1, 2] = torch.nan
        if step == 1 and where == "weight":
            with engine.full_parameters(write=True) as parameters:
                parameters["2.weight"].data[0, 1] = torch.inf
        if step == 1 and dp == culprit and where == "module":
            for stage in engine._parts.stages:
                for module in stage.module.modules():
                    if isinstance(module, nn.Softplus):
                        module.register_forward_hook(lambda module, args, output: -output)
        try:
            engine.train_step(batches)
        except NonFiniteError as error:
            return str(error)
    raise AssertionError("a NaN went through")


CASES = {
    "plain": {},
    "stage 2": {"zero": {"stage": 2}},
    "stage 3": {"zero": {"stage": 3}},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "two microbatches": {"batch": {"accumulation": 2}, "zero": {"stage": 3}},
}


@pytest.mark.parametrize("where", ["batch", "module"])
@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_made_it_is_named_by_all(
    ranks: Callable[[int], RankPool], name: str, where: str
) -> None:
    texts = ranks(2).run(told, CASES[name], 1, where)
    assert len(set(texts)) == 1
    assert texts[0].startswith("step 2: gradients are not finite; on rank 1, in microbatch 0, ")
    expected = (
        "its batch holds NaN" if where == "batch" else "the first module with a non-finite output is '1.2'."
    )
    assert expected in texts[0]


@pytest.mark.parametrize("where", ["batch", "module", "weight"])
def test_in_a_pipeline(ranks: Callable[[int], RankPool], where: str) -> None:
    """Two stages of two data-parallel ranks; what a stage is handed is not what it made."""
    texts = ranks(4).run(told, {"mesh": {"pp": 2, "dp": 2}, "batch": {"accumulation": 2}}, 1, where)
    assert len(set(texts)) == 1
    says = {
        "batch": "on rank 1, in microbatch 0, its batch holds NaN",
        "module": "on rank 3, in microbatch 0, the first module with a non-finite output is '2'; its inputs are not",
        "weight": "on rank 2, in microbatch 0, the first module with a non-finite output is '2'.",
    }
    assert says[where] in texts[0]


def test_a_weight_is_to_blame_on_the_first_rank(ranks: Callable[[int], RankPool]) -> None:
    texts = ranks(2).run(told, {"zero": {"stage": 3}}, 0, "weight")
    assert len(set(texts)) == 1
    assert "on rank 0, in microbatch 0, the first module with a non-finite output is '2'." in texts[0]
