"""Optimizers whose update of an element depends on the whole tensor: in two halves, with a look in between.

    direct    moments and directions, element by element, on the rank that holds the elements
    look      at the whole tensor: its norms, or the whole matrix                 (TwoPass.needs)
    apply     weights ← weights - factor · direction, element by element

Between the halves the direction occupies the memory of the gradient. On shards the halves run on flat pieces and ranks
look together (engine/whole_tensors.py); ``step`` does all three on whole tensors of one process, as any optimizer of
torch.

Cost: no memory beyond the moments.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.plan.registry import Needs

_CHUNK = 1 << 17
"""Number of elements that stay in a core's cache through the passes over them."""


class WholeTensor(NamedTuple):
    """Facts about a whole tensor that ``factor`` needs between the two halves."""

    shape: tuple[int, ...]
    """Shape of the tensor."""
    weight_norm: float = 0.0
    """Norm of the weights."""
    direction_norm: float = 0.0
    """Norm of the direction."""


class TwoPass(optim.Optimizer):
    """Base of optimizers whose update of an element depends on the whole tensor."""

    needs: ClassVar[Needs]
    """Fact about the whole tensor that the update needs: its norms, or the whole matrix."""
    moments: ClassVar[tuple[str, ...]]
    """Names of the state that is kept for every element, starting at zero."""
    counts: ClassVar[bool] = False
    """True if the optimizer counts a parameter's steps."""

    @abstractmethod
    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        """Replace ``gradient`` by the direction, in place, and update the moments."""

    @abstractmethod
    def factor(self, group: Mapping[str, Any], whole: WholeTensor) -> float:
        """Return the factor of a tensor's direction."""

    def scale(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, factor: float) -> None:
        """Multiply the direction of a tensor, or of a piece of it, by ``factor``."""
        direction.mul_(factor)

    @abstractmethod
    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        """Move the weights by the direction, which has been scaled."""

    def look(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor) -> WholeTensor:
        """Return the facts about a whole tensor for ``step``.

        A matrix's direction is replaced by its orthogonal form.
        """
        return WholeTensor(tuple(weights.shape), float(weights.norm()), float(direction.norm()))

    def _init_group(self, group: Mapping[str, Any]) -> None:
        """Make the state of every parameter that has a gradient."""
        for weights in group["params"]:
            state = self.state[weights]
            if weights.grad is None or state:
                continue
            if self.counts:
                state["step"] = torch.zeros(())
            for moment in self.moments:
                state[moment] = torch.zeros_like(weights, memory_format=torch.preserve_format)

    def _each(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """Yield (group, weights, gradient or direction) of every parameter that has one."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    yield group, weights, weights.grad

    @torch.no_grad()
    def direct(self) -> None:
        """Run the first half for every parameter that has a gradient."""
        for group in self.param_groups:
            self._init_group(group)
        for group, weights, gradient in self._each():
            if self.counts:
                self.state[weights]["step"] += 1
            self._direct_in_chunks(group, weights, gradient)

    @torch.no_grad()
    def apply(self) -> None:
        """Run the second half for every parameter that has a direction."""
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
        """Run a whole step on whole tensors. Gradients contain directions afterwards.

        Args:
            closure: computes the loss again; may be None.

        Returns:
            The result of ``closure``, or None.
        """
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
