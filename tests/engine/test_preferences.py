"""Training on preferences (DPO): two passes of one engine, a reference model, and labels that are counted unevenly.

The usual loop takes log-probabilities of chosen and rejected answers in two passes, or in one of both, from the model
and from a reference (a second engine, or a frozen copy). Each pair weighs alike, whatever number of its labels counts.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from tests.engine.nets import seeded
from tests.engine.plain import worst

WORDS, WIDTH, BETA, STEPS = 11, 8, 0.5, 2


class Policy(nn.Module):
    """A small causal model that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x.cumsum(1)))
        logits: Tensor = self.head(x)
        return logits


Pairs = tuple[Tensor, Tensor, Tensor, Tensor]


def pairs(number: int) -> Pairs:
    """Return two pairs: chosen and rejected tokens, and their labels, of which unlike numbers count."""
    generator = torch.Generator().manual_seed(number)
    chosen, rejected = torch.randint(0, WORDS, (2, 2, 7), generator=generator)
    labels = chosen.clone(), rejected.clone()
    for i, each in enumerate(labels):
        for row in range(2):
            each[row, : 1 + (number + 2 * row + i) % 5] = -100
    return chosen, rejected, *labels


def of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each row's counted labels."""
    targets = labels[:, 1:]
    each = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (each * (targets != -100)).sum(-1)


def dpo(
    model: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], given: Pairs, at_once: bool
) -> Tensor:
    """Return DPO's loss (arXiv:2305.18290), a mean over pairs."""
    chosen, rejected, of_chosen, of_rejected = given
    labels = torch.cat([of_chosen, of_rejected])
    both = torch.cat([chosen, rejected])
    if at_once:
        ours = of_labels(model(both), labels)
    else:
        ours = torch.cat([of_labels(model(chosen), of_chosen), of_labels(model(rejected), of_rejected)])
    with torch.no_grad():
        theirs = of_labels(reference(both), labels)
    better, worse = (ours - theirs).chunk(2)
    return -F.logsigmoid(BETA * (better - worse)).mean()


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(Policy)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([dpo(model, reference, pairs(10 * step + i), False) for i in range(4)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def on_ranks(world: World, stage: int, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    config = {
        "zero": {"stage": stage},
        "batch": {"accumulation": 2},
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.01},
    }
    model = seeded(Policy)
    reference: Any = copy.deepcopy(model).requires_grad_(False).eval()
    engine = shardwise.initialize(model, config, world=world)
    if kind == "second engine":
        reference = shardwise.initialize(seeded(Policy), {"zero": {"stage": 3}}, world=world)
    losses = []
    for step in range(STEPS):
        for i in range(2):
            loss = dpo(engine, reference, pairs(10 * step + 2 * world.rank + i), kind == "at once")
            engine.backward(loss)
            result = engine.step()
        losses.append(result.loss)
    weights = dict(engine.state_dict())
    engine.close()
    if kind == "second engine":
        reference.close()
    return losses, weights


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "frozen copy"), (2, "at once"), (3, "frozen copy"), (3, "second engine")]
)
def test_preferences_equal_one_process(ranks: Any, stage: int, kind: str) -> None:
    losses, weights = one_process()
    for found, held in ranks(2).run(on_ranks, stage, kind):
        assert found == pytest.approx(losses, rel=1e-10)
        assert worst(held, weights) <= 1e-10
