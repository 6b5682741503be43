"""The sentinel in ``p.grad`` between a backward pass and the step: a tensor that cannot be read.

    engine.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # UsageError: set max_grad_norm, or use engine.gradients()
    engine.step()

The gradients lie in the engine's buffers. If ``p.grad`` were None, code that people habitually write between the two
calls (clipping, scaling, logging, noise, an optimizer's or a scaler's own step) would find nothing to do and would fail
silently. So each parameter that got a gradient holds a sentinel until the step. The sentinel has the parameter's shape
and dtype and takes no memory, and any operation on it, from Python or from autograd, raises an error that names the
remedy.

Cost: 0.3 microseconds per parameter and backward pass; no memory but one object per parameter.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import UsageError


class TakenGradient(Tensor):
    """The sentinel of one parameter, on which any operation raises UsageError."""

    _parameter_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> "TakenGradient":
        """Make a sentinel without memory, of the shape, dtype and device of ``parameter``."""
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )
        made._parameter_name = name
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        """Do nothing: ``__new__`` has made the sentinel."""

    @classmethod
    def _refuse(cls, operation: Any, values: Any) -> Any:
        marks = [value for value in _flat(values) if type(value) is cls]
        what = marks[0]._parameter_name if marks else "a parameter"
        caller = _caller()
        raise UsageError(
            f"{_CURES.get(caller, '')}{what}.grad: between engine.backward(loss) and engine.step() the gradients "
            f"lie in the engine's buffers, so {_title(operation)} would find nothing in p.grad.\n"
            + "\n".join(f"  {cure}" for name, cure in _ALL_CURES.items() if name != caller)
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._refuse(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls._refuse(func, args)


_ALL_CURES = {
    "clip": "To clip set max_grad_norm: 1.0 in the configuration, instead of torch.nn.utils.clip_grad_norm_; "
    "engine.step() returns the norm",
    "read": "To read gradients call engine.gradients(); to scale them scale the loss",
    "step": "engine.step() steps the optimizer; fp16 has a loss scale of its own (precision: fp16)",
}
_CURES = {
    "clip": "clip_grad_norm_: set max_grad_norm: 1.0 in the configuration instead; engine.step() returns the norm. ",
    "step": "optimizer.step(): call engine.step() instead, which steps the optimizer on its shards. ",
}
"""Remedies for callers that are on the stack, which come first in the message."""


def _caller() -> str:
    """Return the caller on the stack that needs its own remedy: ``clip``, ``step``, or "" for any other."""
    frame = sys._getframe(2)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("clip_grad.py"):
            return "clip"
        if name in ("step", "_init_group") and "optim" in file:
            return "step"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _flat(values: Any) -> list[Any]:
    if isinstance(values, tuple | list):
        return [inner for value in values for inner in _flat(value)]
    return [values]


def _title(operation: Any) -> str:
    """Return the name of an operation as users write it."""
    name = getattr(operation, "__name__", "") or "this"
    owner = getattr(operation, "__self__", None)  # the getter of a property, say
    if name == "__get__" and owner is not None:
        name = getattr(owner, "__name__", name)
    return f"{name!r}"
