"""The plain loop that parity is measured against: one process, one batch, torch's own optimizer.

The measure of an error: relative L2, over the larger of the gradient's norm and the norm of its summed absolute addends
(some true gradients are zero, and then nothing but rounding is left to divide by).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.parallel.zero.modules import holdings


class Truth(NamedTuple):
    """What the plain loop did in one step."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    addends: dict[str, Tensor]
    """Sum of the absolute gradients of the samples."""
    weights: dict[str, Tensor]
    """After the step."""


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    steps: Sequence[Sequence[tuple[Any, float]]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    clip: float | None = None,
) -> list[Truth]:
    """Each step is a list of (batch, weight): gradients are Σ w ∇loss / Σ w."""
    found = []
    for batches in steps:
        total = sum(weight for _, weight in batches)
        addends = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        sums: dict[str, Tensor] = {}
        loss_sum = 0.0
        for batch, weight in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            (loss * (weight / total)).backward()
            loss_sum += float(loss.detach()) * weight / total
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    addends[name] += parameter.grad.abs()
                    sums[name] = sums.get(name, 0) + parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].clone() if name in sums else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append(Truth(loss_sum, float(norm), sums, addends, weights))
    return found


def error(got: Tensor, wanted: Tensor, addends: Tensor | None = None) -> float:
    """Relative L2 error by the measure above."""
    scale = max(float(wanted.double().norm()), 0.0 if addends is None else float(addends.double().norm()))
    difference = float((got.double().cpu() - wanted.double()).norm())
    return difference / scale if scale else difference


def worst(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], addends: Mapping[str, Tensor] | None = None
) -> float:
    """Largest error over all names; infinite where the names differ."""
    if set(got) != set(wanted):
        return float("inf")
    return max((error(got[n], wanted[n], addends[n] if addends else None) for n in wanted), default=0.0)


def against_plain(
    world: Any,
    make: Callable[[], nn.Module],
    piece_of: Callable[[int, int], Any],
    config: Mapping[str, Any],
    steps: int = 3,
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
    before_backward: Callable[[Any], None] = lambda engine: None,
) -> float:
    """Worst error of gradients and weights when the ranks share the pieces ``piece_of(step, i)`` of each batch.

    Pieces weigh alike. The optimizer is that of ``config``.
    """
    options = dict(config.get("optimizer", {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}))
    accumulation = config.get("batch", {}).get("accumulation", 1)
    pieces = world.size * accumulation
    loss_of = loss_of or (lambda model, batch: model(*batch))
    plain = make()
    trained = [p for p in plain.parameters() if p.requires_grad]
    cls = {"adamw": optim.AdamW, "sgd": optim.SGD}[options["type"]]
    truth = train(
        plain,
        cls(trained, **{key: value for key, value in options.items() if key != "type"}),
        [[(piece_of(step, i), 1.0) for i in range(pieces)] for step in range(steps)],
        loss_of,
    )
    model = make()
    engine = shardwise.initialize(model, {"optimizer": options, **config}, world=world, loss=loss_of)
    largest = 0.0
    aliases = {a: h.name for h in holdings(plain) for a in h.aliases}
    for step, wanted in enumerate(truth):
        for microbatch in range(accumulation):
            loss = engine(piece_of(step, microbatch * world.size + world.rank))
            before_backward(engine)
            engine.backward(loss)
            if microbatch == accumulation - 1:
                largest = max(largest, worst(engine.gradients(), wanted.gradients, wanted.addends))
            engine.step()
        state = engine.state_dict()
        for alias, name in aliases.items():
            assert torch.equal(state[alias], state[name]), f"{alias} and {name} came apart"
        weights = {name: state[name] for name in wanted.weights}
        largest = max(largest, worst(weights, wanted.weights))
    engine.close()
    return largest
