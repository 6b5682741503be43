"""Own use: a slice of a weight is used by the layer that owns it, and by nobody else.

What a cut layer computes from its slice is right because the layer knows the cut. Anything else that reads the slice
(a penalty over ``model.parameters()``, ``F.linear(x, other.weight)``, the norm of a weight) takes a part for the whole,
and a use of a whole weight whose gradient is summed over the ranks counts as often as there are ranks. Neither shows in
the loss where the slices are alike, so it is looked for: in the passes of the first step, and in the first pass without
gradients, those parameters are withheld (memory/absent.py) but for the time in which their owner's forward runs.

Cost: two hooks per owner in the first step; none afterwards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.memory.absent import give, withhold


class OwnUse:
    """Of one model. ``owned``: (name, parameter, its owners); ``names`` of the owners."""

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
        """Forward passes of owners that run now, by parameter."""
        self._classes: dict[type, type] = {}
        self._handles: list[Any] = []
        self._seen: set[bool] = set() if owned else {True, False}
        """Kinds of passes, with gradients or without, that need no look any more."""

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Around a pass."""
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
        """From here to ``end`` any other use is a UsageError, unless the first step is over."""
        if torch.is_grad_enabled() in self._seen:
            return
        self._running.clear()
        for owner in () if self._handles else self._by_owner:
            self._handles.append(owner.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(owner.register_forward_hook(self._leave, always_call=True))
        withhold(self._parameters, self._told, self._classes)

    def end(self) -> None:
        """Give the parameters back; a backward pass, say, may read them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._give(self._parameters)

    def step_ended(self) -> None:
        """Passes with gradients need no look any more."""
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
        """Those that are withheld here; one that is released at stage 3 stays so."""
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
