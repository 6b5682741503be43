"""What belongs to one parameter, whatever the stage: DeepSpeed's ``safe_get_*`` and ``safe_set_*``.

    full    whole, a copy on every rank; all ranks call it with the same parameter, and write the same values
    local   this rank's own elements, flat

Masters, moments and gradients as the optimizer has them, in fp32 where it computes in fp32. A gradient is the mean
before clipping, between the last backward pass of a step and ``engine.step()``. Getters return None where there is
nothing: of a parameter that no engine has, of a frozen one, of one that no rank used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.deepspeed.living import engine_of, find

_MASTER, _GRADIENT = "master", "gradient"


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The weight that the optimizer updates."""
    return _full(param, _MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write it; the weight that computes is rounded from it."""
    _set_full(param, value, _MASTER)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A moment of the optimizer, by torch's name: ``exp_avg``, ``exp_avg_sq``."""
    return _full(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write it."""
    _set_full(param, value, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient; of a parameter that no engine has its own."""
    return param.grad if find(param) is None else _full(param, _GRADIENT)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write it: the step that comes works with it."""
    _set_full(param, value, _GRADIENT)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by what ``update_func(gradient, parameter)`` makes of it."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the weight that the optimizer updates."""
    return _local(param, _MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write them. Collective."""
    _set_local(param, value, _MASTER)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of a moment."""
    return _local(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write them. Collective."""
    _set_local(param, value, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the gradient."""
    return _local(param, _GRADIENT)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write them. Collective."""
    _set_local(param, value, _GRADIENT)


def is_zero_param(parameter: Any) -> bool:
    """Whether an engine has it."""
    return isinstance(parameter, nn.Parameter) and find(parameter) is not None


def _full(param: nn.Parameter, of: str) -> Tensor | None:
    found = find(param)
    return (
        None if found is None or not param.requires_grad else _wide(found[0].ours.full_tensor(found[1], of))
    )


def _local(param: nn.Parameter, of: str) -> Tensor | None:
    found = find(param)
    return (
        None if found is None or not param.requires_grad else _wide(found[0].ours.local_tensor(found[1], of))
    )


def _set_full(param: nn.Parameter, value: Tensor, of: str) -> None:
    engine, name = engine_of(param, f"safe_set_full of a {of}")
    engine.ours.set_full_tensor(name, value, of)


def _set_local(param: nn.Parameter, value: Tensor, of: str) -> None:
    engine, name = engine_of(param, f"safe_set_local of a {of}")
    engine.ours.set_local_tensor(name, value, of)


def _wide(found: Tensor | None) -> Tensor | None:
    """16-bit numbers as fp32."""
    return found.float() if found is not None and found.dtype in (torch.float16, torch.bfloat16) else found
