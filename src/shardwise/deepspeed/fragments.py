"""Whole tensors of one parameter, whatever the stage: DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*``.

Each is collective: all ranks call it with the same parameter. Masters and gradients come in fp32; gradients are means,
as the optimizer sees them before clipping, between the last backward pass of a step and ``engine.step()``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.deepspeed.living import engine_of, find


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The weight that the optimizer updates; None of a parameter that no engine has."""
    found = find(param)
    if found is None:
        return None
    engine, name = found
    with engine.ours.full_parameters() as whole:
        return whole[name].detach().to(torch.float32, copy=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the weight, in all its copies. All ranks bring the same ``value``."""
    engine, name = engine_of(param, "safe_set_full_fp32_param")
    engine.ours.load_state_dict({name: value}, strict=False)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient; None of a parameter that no rank used."""
    found = find(param)
    if found is None:
        return param.grad
    engine, name = found
    gradient: Tensor | None = engine.ours.gradients().get(name)
    return None if gradient is None else gradient.to(torch.float32)


def is_zero_param(parameter: Any) -> bool:
    """Whether an engine has it."""
    return isinstance(parameter, nn.Parameter) and find(parameter) is not None
