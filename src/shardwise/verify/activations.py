"""Tensors of a pass, recorded by hooks on all modules while a run lasts: inputs, weights, outputs and their gradients.

    key of a tensor    "blocks.1 step 0 piece 3"; piece: place of the microbatch in the global batch of the step

The reference and the ranks of a layout are recorded by the same hooks, so that each tensor has one key in both. A
module that runs again (recompute) or several times in a microbatch counts once, with its first call. The model itself
has the name "".

The weights of a module are recorded as the pass uses them, after they were gathered. They are recorded for the first
microbatch of a step, and again for a microbatch in which they have changed.

Cost: a copy of every recorded tensor; a tensor that several modules hand on is copied once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.base.pytree import tensors_in
from shardwise.passes.replay import DrawReplay


class PassKey(NamedTuple):
    """The name of a recorded tensor and its place in the run."""

    name: str
    step: int
    """Number of the optimizer step, from 1."""
    piece: int
    """Place of the microbatch in the global batch of the step."""

    def __str__(self) -> str:
        return f"{self.name} step {self.step} piece {self.piece}"

    @classmethod
    def parse(cls, key: str) -> "PassKey":
        """Return the key that was written as text."""
        name, _, place = key.rpartition(" step ")
        step, _, piece = place.partition(" piece ")
        return cls(name, int(step), int(piece))


class ActivationRecorder:
    """Records the tensors that pass through the modules of one model.

    Args:
        replay: The replay that knows the place of the running microbatch.
        rows: Samples of a microbatch.
        weights: Record the weights of modules as the passes use them.
        mark: A function that is called with ``input``, ``output`` or ``gradient`` and the key of each tensor as it is
            recorded.
    """

    def __init__(
        self,
        replay: DrawReplay,
        rows: int,
        weights: bool = False,
        mark: Callable[[str], None] = lambda said: None,
    ) -> None:
        self._replay = replay
        self._rows = rows
        self._has_weights = weights
        self._mark = mark
        self._names: dict[int, str] = {}
        self._copies: Any = WeakIdKeyDictionary()
        self._entered: set[str] = set()
        self._returned: set[str] = set()
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        """Tensors among the positional arguments of a module, under its name and ``#`` and their number."""
        self.gradients: dict[str, Tensor] = {}
        """Gradients of outputs."""
        self.weights: dict[str, Tensor] = {}
        """Parameters under their names, as a module used them."""
        self.order: list[str] = []
        """Names of modules in the order in which they first returned."""
        self.began: list[str] = []
        """``name >`` for each call of a module and ``name`` for each return, in the order of their first time."""

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record every pass inside the context."""
        self._names = {id(module): name for name, module in model.named_modules()}
        handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ran),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def key_of_pass(self) -> str:
        """Return the key of the running pass, as that of a tensor without a name."""
        return str(self._key(""))

    def _key(self, name: str) -> PassKey:
        place = self._replay.place
        return PassKey(name, place.step, place.first_sample // self._rows)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor; one copy serves all modules that hand the tensor on unchanged."""
        version, copy = self._copies.get(tensor, (-1, None))
        if copy is None or version != tensor._version:
            copy = tensor.detach().clone()
            self._copies[tensor] = (tensor._version, copy)
        return copy  # type: ignore[no-any-return]

    def _begins(self, module: nn.Module, args: Any) -> Any:
        name = self._names.get(id(module))
        if name is None or not self._replay.is_running:
            return
        if name not in self._entered:
            self._entered.add(name)
            self.began.append(f"{name} >")
        found = [each for each in tensors_in(args) if type(each) is Tensor]
        for number, tensor in enumerate(found):
            key = str(self._key(f"{name}#{number}"))
            if key not in self.inputs:
                self.inputs[key] = self._copy(tensor)
                self._mark(f"input {key}")

    def _ran(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = self._names.get(id(module))
        if name is None or not self._replay.is_running:
            return
        if self._has_weights:
            self._keep_weights(name, module)
        tensor = next((each for each in tensors_in(output) if type(each) is Tensor), None)
        if tensor is not None and tensor.is_floating_point():
            self._keep_output(name, tensor)
            self._watch_gradient(name, tensor)

    def _keep_output(self, name: str, tensor: Tensor) -> None:
        key = str(self._key(name))
        if name not in self._returned:
            self._returned.add(name)
            self.order.append(name)
            self.began.append(name)
        if key not in self.outputs:
            self.outputs[key] = self._copy(tensor)
            self._mark(f"output {key}")

    def _watch_gradient(self, name: str, tensor: Tensor) -> None:
        """Record the gradient that reaches an output."""
        key = str(self._key(name))
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return

        def reached(gradient: Tensor) -> None:
            if key not in self.gradients:
                self.gradients[key] = gradient.detach().clone()
                self._mark(f"gradient {key}")

        tensor.register_hook(reached)

    def _keep_weights(self, name: str, module: nn.Module) -> None:
        """Copy the module's own weights if they have changed since the microbatch before."""
        for label, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = self._key(f"{name}.{label}".removeprefix("."))
            earlier = [str(key._replace(piece=piece)) for piece in range(key.piece, -1, -1)]
            before = next((self.weights[each] for each in earlier if each in self.weights), None)
            with torch.no_grad():
                if before is None or before.shape != parameter.shape or not torch.equal(before, parameter):
                    self.weights.setdefault(str(key), parameter.detach().clone())
