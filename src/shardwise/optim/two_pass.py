"""Optimizers whose update of an element looks at the whole tensor: in two halves, with a look in between.

    direct    moments and directions, element by element, wherever the elements lie
    look      at the whole tensor: its norms, or the whole matrix                 (TwoPass.needs)
    apply     weights ← weights - factor · direction, element by element

Between the halves the direction stands where the gradient stood. On shards the halves run on flat pieces and ranks look
together (engine/whole_tensors.py); ``step`` does all three on whole tensors of one process, as any optimizer of torch.

Cost: no memory beyond the moments.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.plan.registry import Needs

_CHUNK = 1 << 17
"""Elements that stay in a core's cache through the passes over them."""


class Whole(NamedTuple):
    """What a rank knows of a whole tensor between the two halves."""

    shape: tuple[int, ...]
    weight_norm: float = 0.0
    direction_norm: float = 0.0


class TwoPass(optim.Optimizer):
    """See the module's docstring."""

    needs: ClassVar[Needs]
    moments: ClassVar[tuple[str, ...]]
    """What it keeps for every element, from zero on."""
    counts: ClassVar[bool] = False
    """Whether it counts a parameter's steps."""

    @abstractmethod
    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        """``gradient`` becomes the direction, and the moments grow by it."""

    @abstractmethod
    def factor(self, group: Mapping[str, Any], whole: Whole) -> float:
        """By what the direction of a tensor is multiplied."""

    def scale(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, factor: float) -> None:
        """Multiply a tensor's direction, or a piece of it."""
        direction.mul_(factor)

    @abstractmethod
    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        """Move the weights by the direction, which is multiplied already."""

    def look(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor) -> Whole:
        """What ``step`` finds of a whole tensor; a matrix's direction becomes what it is dealt out as."""
        return Whole(tuple(weights.shape), float(weights.norm()), float(direction.norm()))

    def _init_group(self, group: Mapping[str, Any]) -> None:
        """State of what has a gradient."""
        for weights in group["params"]:
            state = self.state[weights]
            if weights.grad is None or state:
                continue
            if self.counts:
                state["step"] = torch.zeros(())
            for moment in self.moments:
                state[moment] = torch.zeros_like(weights, memory_format=torch.preserve_format)

    def _each(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """(group, weights, gradient or direction) of what has one."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    yield group, weights, weights.grad

    @torch.no_grad()
    def direct(self) -> None:
        """The first half, of every parameter that has a gradient."""
        for group in self.param_groups:
            self._init_group(group)
        for group, weights, gradient in self._each():
            if self.counts:
                self.state[weights]["step"] += 1
            self._direct_in_chunks(group, weights, gradient)

    @torch.no_grad()
    def apply(self) -> None:
        """The second half."""
        for group, weights, direction in self._each():
            self.apply_part(group, weights, direction, self.state[weights])

    def _direct_in_chunks(self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor) -> None:
        state = self.state[weights]
        if weights.dim() != 1 or weights.device.type != "cpu":
            self.direct_part(group, weights, gradient, state)
            return
        for start in range(0, weights.numel(), _CHUNK):
            here = slice(start, start + _CHUNK)
            part = {key: value[here] if key in self.moments else value for key, value in state.items()}
            self.direct_part(group, weights[here], gradient[here], part)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A whole step on whole tensors. Gradients are spent: they hold directions afterwards."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.direct()
        for group, weights, direction in self._each():
            whole = self.look(group, weights, direction)
            self.scale(group, weights, direction, self.factor(group, whole))
        self.apply()
        return loss
