"""Where a NaN came from: the first module whose output is not finite, found by running the last batch once more."""

from typing import Any

import torch
from torch import Tensor, nn


def first_non_finite(engine: Any, pending: Any) -> str:
    """A sentence that names the first module with a non-finite output, or says that the backward pass is to blame.

    Collective at stage 3, like the forward pass that it repeats.
    """
    if pending is None:
        return "no batch is at hand to look for the cause (with a pipeline, try the batch with mesh.pp: 1)"
    found: list[str] = []
    names = {module: name or "(root)" for name, module in engine.module.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if found:
            return
        tensors = output if isinstance(output, tuple | list) else [output]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                found.append(names[module])
                return

    handles = [module.register_forward_hook(look) for module in names]
    args, kwargs = pending
    try:
        with torch.no_grad():
            engine(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"the first module with a non-finite output is {found[0]!r}"
    return "all outputs of the forward pass are finite on this rank, so they overflow in the backward pass or elsewhere"
