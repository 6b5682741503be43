"""Own use: only the layer that owns a slice of a weight may use the slice.

The output of a cut layer is right because the layer accounts for the cut. Other code that reads the slice (a penalty
over ``model.parameters()``, ``F.linear(x, other.weight)``, the norm of a weight) takes a part for the whole. A use of a
whole weight whose gradient is summed over the ranks counts as often as there are ranks. Neither error shows in the loss
if the slices are alike. So in the passes of the first step, and in the first pass without gradients, those parameters
are withheld (passes/absent.py) except while their owner's forward runs.

Cost: two hooks per owner in the first step; none afterwards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.passes.absent import give, withhold


class OwnUse:
    """The check that cut parameters of one model are used only by their owners.

    Args:
        owned: (name, parameter, owner) of every parameter that is cut or has a gradient summed over the ranks.
        names: Names of the owners.
    """

    def __init__(
        self, owned: Sequence[tuple[str, nn.Parameter, nn.Module]], names: Mapping[nn.Module, str]
    ) -> None:
        self._names: dict[int, str] = {}
        self._by_owner: dict[nn.Module, list[nn.Parameter]] = {}
        self._owners: dict[int, list[str]] = {}
        for name, parameter, layer in owned:
            owner = next(iter(getattr(layer, "used_by", ())), layer)
            self._names.setdefault(id(parameter), name)
            self._by_owner.setdefault(owner, []).append(parameter)
            self._owners.setdefault(id(parameter), []).append(names[layer])
        self._parameters = list(
            {id(each): each for held in self._by_owner.values() for each in held}.values()
        )
        self._running: Counter[int] = Counter()
        """Number of running forward passes of owners, by identity of the parameter."""
        self._classes: dict[type, type] = {}
        self._handles: list[Any] = []
        self._seen: set[bool] = set() if owned else {True, False}
        """Kinds of passes (True with gradients, False without) that need no further check."""

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Check the uses of parameters in the pass that runs inside the context."""
        gradients = torch.is_grad_enabled()
        if gradients in self._seen:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            self.end()
        if not gradients:
            self._seen.add(False)

    def begin(self) -> None:
        """Make any other use of the parameters a UsageError until ``end``, unless this kind of pass was checked."""
        if torch.is_grad_enabled() in self._seen:
            return
        self._running.clear()
        for owner in () if self._handles else self._by_owner:
            self._handles.append(owner.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(owner.register_forward_hook(self._leave, always_call=True))
        withhold(self._parameters, self._told, self._classes)

    def end(self) -> None:
        """Remove the hooks and give the parameters back, because a backward pass may read them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._give(self._parameters)

    def step_ended(self) -> None:
        """End the checks of passes with gradients, after the first step."""
        self.end()
        self._seen.add(True)

    def _enter(self, owner: nn.Module, args: Any) -> None:
        for parameter in self._by_owner[owner]:
            self._running[id(parameter)] += 1
        self._give(self._by_owner[owner])

    def _leave(self, owner: nn.Module, args: Any, output: Any) -> None:
        for parameter in self._by_owner[owner]:
            self._running[id(parameter)] -= 1
        over = [each for each in self._by_owner[owner] if self._running[id(each)] <= 0]
        withhold(over, self._told, self._classes)

    def _give(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give back the parameters that this object withholds; parameters released at stage 3 stay released."""
        ours = set(self._classes.values())
        give([parameter for parameter in parameters if type(parameter) in ours])

    def _told(self, parameter: nn.Parameter) -> str:
        key = id(parameter)
        owners = " and ".join(dict.fromkeys(self._owners[key]))
        return (
            f"parameter {self._names[key]!r}, which along tp is cut or has a gradient that is summed over the ranks,\n"
            f"Under tensor parallelism only the forward pass of {owners} may use it, where the cut is known: call that "
            "module; take a penalty on weights from optimizer.weight_decay, or compute it on parameters that are "
            "whole everywhere (tensor.table: {NAME: 'replicate'}), or set mesh.tp: 1"
        )
