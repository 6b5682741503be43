"""Wrappers that let a script that names ``cuda`` compute on the CPU if torch has no CUDA; only for ``--as-deepspeed``.

    model.cuda()    tensor.to("cuda:1")    tensor.to(engine.local_rank)    torch.zeros(2, device="cuda")
    torch.cuda.set_device(rank % torch.cuda.device_count())    torch.distributed.init_process_group("nccl")
    with torch.device("cuda"): ...

``begin`` wraps these few functions of torch, only in the process that calls it. A call that has no meaning on a CPU
does nothing. The first use is logged once, on rank 0. If there is an accelerator, nothing is wrapped.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext, _device_constructors

from shardwise.comm import default_group
from shardwise.comm.world import own_seat, ranks_of_host

_log = logging.getLogger(__name__)
_QUIET = (
    "set_device",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "manual_seed",
    "manual_seed_all",
)
"""Functions of torch.cuda that do nothing on a CPU."""
_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "current_device",
)
_MAKERS = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "eye",
    "linspace",
)


@cache
def begin() -> None:
    """Wrap these functions if torch finds no accelerator; a second call does nothing."""
    if torch.accelerator.is_available():
        return
    # torch caches the functions that ``with torch.device(...)`` applies to, read from ``torch`` at the first use. The
    # cache must hold torch's own functions: filled with the wrappers, it would let no device context reach any tensor.
    _device_constructors()
    _swap(Tensor, "to", _to)
    _swap(nn.Module, "to", _to)
    for owner in (Tensor, nn.Module):
        _swap(owner, "cuda", lambda own: lambda self, *args, **kwargs: _told(self))
    for name in _QUIET:
        _swap(torch.cuda, name, lambda own: lambda *args, **kwargs: _told(None))
    for name in _ZERO:
        _swap(torch.cuda, name, lambda own: lambda *args, **kwargs: _told(0))
    for name in _MAKERS:
        _swap(torch, name, _on_cpu)
    _swap(DeviceContext, "__init__", lambda own: lambda self, device: own(self, _cpu(device)))
    # Scripts compute rank % device_count(), so the count must cover the ranks of a host; torch also forks the
    # generators of that many devices.
    _swap(torch.cuda, "device_count", lambda own: ranks_of_host)
    _swap(torch.cuda, "get_rng_state", lambda own: lambda device="cuda": torch.get_rng_state())
    _swap(
        torch.cuda,
        "set_rng_state",
        lambda own: lambda new_state, device="cuda": torch.set_rng_state(new_state),
    )
    default_group.accept_nccl_on_cpu()


def _swap(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    own = getattr(owner, name)
    made = wraps(own)(wrap(own))
    if owner is torch:  # pickle finds a function by these names
        made.__module__, made.__qualname__ = "torch", name
    setattr(owner, name, made)


def _told(value: Any) -> Any:
    say()
    return value


@cache
def say() -> None:
    """Log once, on rank 0 of the job, that ``cuda`` means the CPU."""
    if own_seat().rank == 0:
        _log.warning(
            "--as-deepspeed: torch finds no CUDA here, so cuda, nccl and device numbers mean the CPU"
        )


def _is_cuda(place: Any) -> bool:
    if isinstance(place, bool):
        return False
    if isinstance(place, int):
        return True
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.partition(":")[0] == "cuda"


def _cpu(place: Any) -> Any:
    return _told(torch.device("cpu")) if _is_cuda(place) else place


def _to(own: Any) -> Any:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return own(self, *args, **kwargs)

    return to


def _on_cpu(own: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return own(*args, **kwargs)

    return make
