"""The model, the configuration and the batches of one verification, as the plain process and the ranks get them.

samples        dim 0 of every tensor of the example, and each sample of a Ragged
microbatch i   samples [i · rows, (i + 1) · rows) of the global batch; each step begins at another sample
weights        unequal on purpose, because a mean of means is right where microbatches weigh alike
round          what the plain loop computes at once: a microbatch; with ``batch_norm: synchronized`` the microbatches of
               all data-parallel ranks, which share their statistics, and which weigh alike
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardwise.verify.reference as plain
from shardwise.base.errors import UsageError
from shardwise.base.pytree import rebuilt
from shardwise.base.ragged import Ragged, offsets_of
from shardwise.config.run import RunConfig
from shardwise.engine.parts.inputs import call_model, find_loss
from shardwise.plan.registry import TensorInfo
from shardwise.verify.compare import FP64_LIMIT
from shardwise.verify.layout import VerifiedLayout
from shardwise.verify.rows import widen_rows

_WEIGHTS = (1.0, 1.5, 0.75)
"""Weights of microbatches in turn, as multiples of their samples."""


@dataclass
class Verification:
    """One model, one configuration with its layout, and the batches of the steps."""

    make: Callable[[], nn.Module]
    config: RunConfig
    layout: VerifiedLayout
    example: Any
    steps: int
    loss_of: plain.LossOf | None
    limit: float = FP64_LIMIT
    """Largest relative error of the pass in fp64."""
    placements: dict[tuple[str, str], TensorInfo] = field(default_factory=dict)
    """Placements of activations along "tp", as ``RankRecords`` takes them."""

    def __post_init__(self) -> None:
        self.pieces = self.layout.mesh.size("data") * (self.config.batch.accumulation or 1)
        counts = {path: size for path, size in _samples_by_path(self.example)}
        if not counts:
            raise UsageError(
                "verify: the example has no tensor with samples along dim 0; give tensors or Ragged features, in any "
                "nesting of tuples, lists and dictionaries"
            )
        self.samples = next(iter(counts.values()))
        others = [f"example{path} has {size}" for path, size in counts.items() if size != self.samples]
        if others:
            raise UsageError(
                f"verify: example{next(iter(counts))} has {self.samples} samples along dim 0, and {others[0]}; "
                "verify cuts every tensor of the example into microbatches along dim 0, so give all the same number of "
                "samples, and hold what is not a sample in the model or in loss="
            )
        self.rows = self.samples // self.pieces
        if not self.rows:
            raise UsageError(
                f"verify: the example has {self.samples} samples, fewer than the {self.pieces} microbatches of a step "
                f"({self.layout.mesh.size('dp')} data-parallel ranks x {self.config.batch.accumulation or 1}); give "
                "an example with more samples"
            )

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch of a step."""
        if self.together > 1:
            return [float(self.rows)] * self.pieces
        return [self.rows * _WEIGHTS[place % len(_WEIGHTS)] for place in range(self.pieces)]

    @property
    def together(self) -> int:
        """Microbatches whose samples share the statistics of batch norms."""
        return self.layout.mesh.size("data") if self.config.batch_norm == "synchronized" else 1

    @property
    def round_weights(self) -> list[float]:
        """The weight of each round of a step."""
        starts = range(0, self.pieces, self.together)
        return [sum(self.weights[start : start + self.together]) for start in starts]

    def rounds(self, dtype: torch.dtype | None) -> list[list[Any]]:
        """Return what the plain loop computes at once, for each step."""
        return self._cut(self.rows * self.together, dtype)

    def batches(self, dtype: torch.dtype | None) -> list[list[Any]]:
        """Return the microbatches of each step; each step has the samples in another order."""
        return self._cut(self.rows, dtype)

    def _cut(self, rows: int, dtype: torch.dtype | None) -> list[list[Any]]:
        def piece(step: int, place: int) -> Any:
            first = place * rows + step
            return cut(self.example, [(first + i) % self.samples for i in range(rows)], dtype)

        places = range(self.rows * self.pieces // rows)
        return [[piece(step, place) for place in places] for step in range(self.steps)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the plain model, found as the engine finds it."""
        return find_loss(call_model(model, self.loss_of, batch, torch.device("cpu")))

    def made(self, dtype: torch.dtype | None, is_silent: bool) -> Callable[[], nn.Module]:
        """Return the function that makes the same model each time."""
        seed, make = self.config.train.seed, self.make

        def same() -> nn.Module:
            torch.manual_seed(seed)
            model = make()
            if is_silent:
                plain.silence_dropout(model)
            if dtype == torch.float64:
                widen_rows(model)
            return model if dtype is None else model.to(dtype)

        return same


def _samples_by_path(value: Any, path: str = "") -> list[tuple[str, int]]:
    """Return the number of samples of each tensor in ``value``, by its place; tensors without dims are left out."""
    if isinstance(value, Ragged):
        return [(path, value.samples)]
    if isinstance(value, Tensor):
        return [(path, value.shape[0])] if value.dim() else []
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in _samples_by_path(inner, f"{path}[{key!r}]")]
    found: list[tuple[str, int]] = []
    places = iter(range(1_000_000))

    def look(inner: Any) -> Any:
        found.extend(_samples_by_path(inner, f"{path}[{next(places)}]"))
        return inner

    rebuilt(value, look)
    return found


def cut(value: Any, samples: list[int], dtype: torch.dtype | None) -> Any:
    """Return a batch with the given samples alone, and with floating tensors in ``dtype``."""
    if isinstance(value, Ragged):
        spans = [slice(*value.offsets[i : i + 2].tolist()) for i in samples]
        lengths = torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64)
        weights = value.weights
        if weights is not None:
            weights = torch.cat([weights[span] for span in spans])
        return Ragged(torch.cat([value.values[span] for span in spans]), offsets_of(lengths), weights)
    if isinstance(value, Tensor):
        chosen = value[samples].clone() if value.dim() else value.clone()
        return chosen.to(dtype) if dtype is not None and chosen.is_floating_point() else chosen
    return rebuilt(value, lambda inner: cut(inner, samples, dtype))
