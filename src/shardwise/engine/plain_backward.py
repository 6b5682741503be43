"""``loss.backward()`` by the script itself, counted as ``engine.backward(loss, weight=1)``.

    engine.adopt_backward()
    loss = engine(batch); (2 * loss).backward(); engine.step()

A hook on the tensors that the model returns meets the first gradient of a backward pass: it begins the engine's pass,
and multiplies what comes by what the engine would have begun with (accumulation, loss scale), which is the same, for
gradients are linear. The pass ends with a callback of autograd's. What does not land in this model's weights, as
``autograd.grad`` to the inputs, is left alone; losses are not known here, so ``StepResult.loss`` is 0.

Cost: a few microseconds a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.zero.hooks import ModuleHook, UnitHooks
from shardwise.plan.pytree import tensors_in


class PlainBackward:
    """Of one engine. ``begin`` enters a pass and returns what its loss is multiplied by; ``end`` leaves it."""

    def __init__(
        self, model: nn.Module, hooks: UnitHooks, begin: Callable[[], float], end: Callable[[], None]
    ) -> None:
        self._hooks = hooks
        self._begin = begin
        self._end = end
        self._scale: float | None = None
        """While such a pass runs."""
        self._weights = list(model.parameters())
        self._handle = model.register_forward_hook(ModuleHook(self._watch))
        hooks.adopts = self.adopt

    def remove(self) -> None:
        """A plain ``loss.backward()`` is refused again."""
        self._handle.remove()
        self._hooks.adopts = None

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._arrives)

    def _arrives(self, gradient: Tensor) -> Tensor | None:
        if self._hooks.is_idle:
            self.adopt()
        return None if self._scale is None else gradient * self._scale

    def adopt(self) -> bool:
        """Begin a pass, where the one of autograd's that runs lands in the weights; whether it did."""
        if not any(map(_gets_gradient, self._weights)):
            return False
        self._scale = self._begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return True

    def _finish(self) -> None:
        self._scale = None
        self._end()


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Whether the pass of autograd's that runs accumulates in ``parameter``."""
    if not parameter.requires_grad:
        return False
    # Its values are not read: a released weight will do.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        made = parameter.view_as(parameter).grad_fn
    if made is None:  # inside torch.func.grad and its kin, whose passes accumulate in no weight
        return False
    leaf = made.next_functions[0][0]
    assert leaf is not None, "where they are accumulated"
    return bool(torch._C._will_engine_execute_node(leaf))
