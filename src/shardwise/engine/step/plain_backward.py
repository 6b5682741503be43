"""``loss.backward()`` called by the script itself, counted as ``engine.backward(loss, weight=1)``.

    engine.adopt_backward()
    loss = engine(batch); (2 * loss).backward(); engine.step()

A hook on the tensors that the model returns runs at the first gradient of a backward pass. The hook begins the engine's
pass, and multiplies the gradient by the factor with which the engine would have begun (accumulation, loss scale). The
result is the same, because gradients are linear. The pass ends with a callback of autograd's. Passes that do not reach
this model's weights, as ``autograd.grad`` to the inputs, are left alone. The loss of such a pass is unknown to the
engine, so ``StepResult.loss`` is 0.

Cost: a few microseconds a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.pytree import tensors_in
from shardwise.parallel.zero.hooks import ModuleHook, UnitHooks


class PlainBackward:
    """The backward passes that a script runs itself on one engine's model.

    Args:
        model: The model.
        hooks: The hooks on the model's Units.
        begin: Begins a pass, and returns the factor by which its loss is multiplied.
        end: Ends a pass.
    """

    def __init__(
        self, model: nn.Module, hooks: UnitHooks, begin: Callable[[], float], end: Callable[[], None]
    ) -> None:
        self._hooks = hooks
        self._begin = begin
        self._end = end
        self._scale: float | None = None
        """Factor of the gradients while such a pass runs; None otherwise."""
        self._weights = list(model.parameters())
        self._handle = model.register_forward_hook(ModuleHook(self._watch))
        hooks.adopts = self.adopt

    def remove(self) -> None:
        """Remove the hooks; a plain ``loss.backward()`` is an error again."""
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
        """Begin a pass if the running pass of autograd reaches the weights.

        Returns:
            True if a pass has begun.
        """
        if not any(map(_gets_gradient, self._weights)):
            return False
        self._scale = self._begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return True

    def _finish(self) -> None:
        self._scale = None
        self._end()


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the running pass of autograd accumulates a gradient in ``parameter``."""
    if not parameter.requires_grad:
        return False
    # ``view_as`` does not read the values, so the weight may be released.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        made = parameter.view_as(parameter).grad_fn
    if made is None:  # inside torch.func.grad and its kin, whose passes accumulate in no weight
        return False
    leaf = made.next_functions[0][0]
    assert leaf is not None, "where they are accumulated"
    return bool(torch._C._will_engine_execute_node(leaf))
