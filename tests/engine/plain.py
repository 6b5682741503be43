"""The plain loop that parity is measured against: one process, one batch, torch's own optimizer.

The measure of an error: relative L2, over the larger of the gradient's norm and the norm of its summed absolute addends
(some true gradients are zero, and then nothing but rounding is left to divide by).
"""

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.parallel.zero.modules import holdings

TRUTHS = "SHARDWISE_TESTS_TRUTHS"
"""The variable that names a test session's folder of truths."""


OPTIMIZER: dict[str, Any] = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}


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


def once(function: Callable[..., list[Truth]]) -> Callable[..., list[Truth]]:
    """As ``functools.cache``, and among all processes of a test session: whoever comes first computes, others read."""

    @cache
    def kept(*args: Any) -> list[Truth]:
        folder = os.environ.get(TRUTHS)
        if folder is None:
            return function(*args)
        path = Path(folder, "-".join((function.__module__, *map(str, args))))
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return [Truth(*step) for step in torch.load(path)]
            truth = function(*args)
            torch.save([tuple(step) for step in truth], path)
            return truth

    return kept


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
    loss_of: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch),
    before_backward: Callable[[Any], None] = lambda engine: None,
    truth: list[Truth] | None = None,
) -> float:
    """Worst error of gradients and weights when the ranks share the pieces ``piece_of(step, i)`` of each batch.

    Pieces weigh alike. The optimizer is that of ``config``. ``truth``: what ``plainly`` found before.
    """
    options = dict(config.get("optimizer", OPTIMIZER))
    accumulation = config.get("batch", {}).get("accumulation", 1)
    if truth is None:
        truth = plainly(make, piece_of, world.size * accumulation, options, steps, loss_of)
    engine = shardwise.initialize(make(), {"optimizer": options, **config}, world=world, loss=loss_of)
    largest = 0.0
    aliases = {a: h.name for h in holdings(make()) for a in h.aliases}
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


def plainly(
    make: Callable[[], nn.Module],
    piece_of: Callable[[int, int], Any],
    pieces: int,
    options: Mapping[str, Any] = OPTIMIZER,
    steps: int = 3,
    loss_of: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch),
) -> list[Truth]:
    """The plain loop over batches of ``pieces`` pieces; ``options``: of the optimizer, its type among them."""
    model = make()
    optimizer = {"adamw": optim.AdamW, "sgd": optim.SGD}[options["type"]](
        [p for p in model.parameters() if p.requires_grad],
        **{key: value for key, value in options.items() if key != "type"},
    )
    batches = [[(piece_of(step, i), 1.0) for i in range(pieces)] for step in range(steps)]
    return train(model, optimizer, batches, loss_of)
