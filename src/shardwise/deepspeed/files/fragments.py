"""The fp32 weight, moments and gradient of one parameter at any stage: DeepSpeed's ``safe_get_*`` and ``safe_set_*``.

    full    the whole tensor, copied to every rank; all ranks pass the same parameter, and write the same values
    local   this rank's own elements, flat

Masters, moments and gradients are the optimizer's, in fp32 if the optimizer computes in fp32. A gradient is the mean
before clipping, and exists between the last backward pass of a step and ``engine.step()``. Getters return None if
there is no such tensor: for a parameter that no engine has, a frozen parameter, or a parameter that no rank used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.deepspeed.calls.living import engine_of, find

_MASTER, _GRADIENT = "master", "gradient"


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole master weight, which the optimizer updates. Collective."""
    return _full(param, _MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole master weight; the weight for computation is rounded from it. Collective."""
    _set_full(param, value, _MASTER)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole moment of the optimizer, by torch's name: ``exp_avg``, ``exp_avg_sq``. Collective."""
    return _full(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write a whole moment of the optimizer. Collective."""
    _set_full(param, value, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient; for a parameter that no engine has, its ``grad``. Collective."""
    return param.grad if find(param) is None else _full(param, _GRADIENT)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient, which the next step uses. Collective."""
    _set_full(param, value, _GRADIENT)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, parameter)``. Collective."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the master weight, which the optimizer updates."""
    return _local(param, _MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the master weight. Collective."""
    _set_local(param, value, _MASTER)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of a moment."""
    return _local(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's elements of a moment. Collective."""
    _set_local(param, value, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the gradient."""
    return _local(param, _GRADIENT)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's elements of the gradient. Collective."""
    _set_local(param, value, _GRADIENT)


def is_zero_param(parameter: Any) -> bool:
    """Return whether ``parameter`` belongs to a model that an engine has."""
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
    """Return 16-bit tensors as fp32, and other tensors as they are."""
    return found.float() if found is not None and found.dtype in (torch.float16, torch.bfloat16) else found
