"""Helpers around the plain loop that parity is measured against, which is shardwise/verify/reference.py's."""

import fcntl
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.parallel.zero.modules import holdings
from shardwise.verify.reference import Truth, error, train, worst

__all__ = ["Truth", "against_plain", "error", "once", "plainly", "train", "worst"]

TRUTHS = "SHARDWISE_TESTS_TRUTHS"
"""The variable that names a test session's folder of truths."""


OPTIMIZER: dict[str, Any] = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}


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
