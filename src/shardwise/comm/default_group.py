"""torch's default group, for scripts that are written in torch.distributed's names.

A World (world.py) has groups of its own; a script of DeepSpeed's calls ``torch.distributed`` itself, also as one
process that nobody launched. ``begin`` makes the default group that all of it goes to, sealed as ever where there are
several ranks; the functions below answer as one process where there is none. Any other name of torch.distributed's is
torch's own: ``default_group.all_reduce`` is ``torch.distributed.all_reduce``.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.comm.groups import backends
from shardwise.comm.world import JOIN_S, join


def begin(timeout_s: float = JOIN_S, device: str = "auto") -> None:
    """Meet the other ranks and make torch's default group, where there is none. All ranks call it."""
    if dist.is_initialized():
        return
    world = join(timeout_s=timeout_s, device=device, quiet=True)
    world.release()
    if not dist.is_initialized():  # one process
        dist.init_process_group(
            backends(world.device, world.backend or "gloo"), store=dist.HashStore(), rank=0, world_size=1
        )


def is_begun() -> bool:
    """Whether there is a default group."""
    return dist.is_initialized()


def end() -> None:
    """All ranks leave torch's groups."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank(group: Any = None) -> int:
    """This rank in ``group``, or in the job."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size(group: Any = None) -> int:
    """The ranks of ``group``, or of the job."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None) -> None:
    """Return when all ranks are here."""
    if dist.is_initialized():
        dist.barrier(group)


def ranks_of(group: Any = None) -> list[int]:
    """The ranks of ``group``, as the job counts them."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def own_group(lists: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
    """A group for each list of ranks, made by all ranks together; that of this rank, and its ranks."""
    found: tuple[Any, list[int]] = (None, [])
    for ranks in lists:
        made = dist.new_group(list(ranks))
        if rank() in ranks:
            found = made, list(ranks)
    return found


def device_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> Any:
    """torch's DeviceMesh over all ranks."""
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))


def accept_nccl_on_cpu() -> None:
    """From here on ``init_process_group("nccl")`` makes a gloo group, in this process: for a script that was written
    for CUDA, where torch has none."""
    own = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str) and "nccl" in backend:
            backend = "gloo"
            kwargs.pop("device_id", None)
        own(backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
