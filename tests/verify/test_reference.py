"""The plain loop has torch's own optimizer for every type that torch has, with the rates of the schedule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.config.run import load
from shardwise.optim.policy import READS, OptimizerPolicy
from shardwise.verify.reference import TorchOptimizers, run_reference, why_not

NOT_TORCHS = ("lion", "lamb", "lars")


class Blocks(nn.Module):
    """Two equal blocks, whose matrices Muon updates, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embed(x)
        for block in self.blocks:
            y = y + block(y)
        return nn.functional.cross_entropy(self.head(y), x)


def reference(optimizer: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    batch = torch.arange(6) % 7
    config = load({"optimizer": optimizer, **more})
    steps = [[(batch[:3], 3.0), (batch[3:], 1.0)]] * 3
    loss_of = lambda model, inputs: model(inputs)  # noqa: E731
    return run_reference(
        Blocks().double(),
        config.optimizer,
        steps,
        loss_of,
        clip=0.5,
        seed=0,
        rows=3,
        schedule=config.schedule,
    )


@pytest.mark.parametrize("kind", [kind for kind in READS if kind not in NOT_TORCHS])
def test_every_optimizer_of_torch_has_a_plain_loop(kind: str) -> None:
    found = reference({"type": kind, "lr": 0.01, "groups": [{"match": "head*", "lr": 0.02}]})
    assert found.rates[0][:2] == [0.01, 0.02] and len(found.steps) == 3
    assert found.steps[2].loss < found.steps[0].loss
    assert set(found.counts[2].values()) <= {3.0}


@pytest.mark.parametrize("kind", NOT_TORCHS)
def test_an_optimizer_that_torch_lacks_is_named(kind: str) -> None:
    policy = OptimizerPolicy(type=kind)  # type: ignore[arg-type]
    assert repr(kind) in why_not(policy, load({}).schedule)
    with pytest.raises(UsageError, match=f"no optimizer '{kind}'.*--against"):
        TorchOptimizers(Blocks(), policy)


def test_muon_updates_the_matrices_of_blocks_alone() -> None:
    model = Blocks()
    optimizer = TorchOptimizers(model, OptimizerPolicy(type="muon"))
    muon = next(each for each in optimizer.each if isinstance(each, torch.optim.Muon))
    assert [*map(id, muon.param_groups[0]["params"])] == [id(block[0].weight) for block in model.blocks]


def test_the_schedule_is_on_and_torchs_own_schedulers_are_named() -> None:
    found = reference({"type": "sgd", "lr": 0.1}, schedule={"type": "linear", "total_steps": 2})
    assert [rates[0] for rates in found.rates] == [0.1, 0.05, 0.0]
    last, before = found.steps[2].weights, found.steps[1].weights
    assert all(torch.equal(last[name], before[name]) for name in last)
    schedule = load(
        {"schedule": {"type": "torch", "scheduler": "StepLR", "arguments": {"step_size": 1}}}
    ).schedule
    assert "schedule.type torch" in why_not(OptimizerPolicy(), schedule)
