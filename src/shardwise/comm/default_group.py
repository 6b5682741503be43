"""torch's default group, for scripts that are written with torch.distributed's names.

A World (world.py) has groups of its own. A script for DeepSpeed calls ``torch.distributed`` itself, also as a single
process without a launcher. ``begin`` makes the default group for all of these calls, with a sealed store if there are
several ranks; without a group, the functions below return the results of one process. All other names are torch's own:
``default_group.all_reduce`` is ``torch.distributed.all_reduce``.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.comm.groups import backends
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import join


def begin(timeout_s: float | None = None, device: str = "auto") -> None:
    """Wait for the other ranks and make torch's default group, if there is none. All ranks make this call.

    Args:
        timeout_s: Seconds within which all ranks must join; None: the default of ``comm.join_timeout_s``.
        device: Value of ``comm.device``.
    """
    if dist.is_initialized():
        return
    policy = CommPolicy(device=device)
    if timeout_s is not None:
        policy = policy.model_copy(update={"join_timeout_s": timeout_s})
    world = join(policy=policy, quiet=True)
    world.release()
    if not dist.is_initialized():  # one process
        dist.init_process_group(
            backends(world.device, world.backend or "gloo"), store=dist.HashStore(), rank=0, world_size=1
        )


def is_begun() -> bool:
    """Return whether there is a default group."""
    return dist.is_initialized()


def end() -> None:
    """Leave torch's groups; all ranks make this call."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank(group: Any = None) -> int:
    """Return this rank in ``group``, or in the job."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size(group: Any = None) -> int:
    """Return the number of ranks of ``group``, or of the job."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None) -> None:
    """Wait until all ranks have arrived."""
    if dist.is_initialized():
        dist.barrier(group)


def ranks_of(group: Any = None) -> list[int]:
    """Return the ranks of ``group`` in the numbering of the job."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def own_group(lists: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
    """Make a group for each list of ranks, on all ranks together, and return that of this rank with its ranks."""
    found: tuple[Any, list[int]] = (None, [])
    for ranks in lists:
        made = dist.new_group(list(ranks))
        if rank() in ranks:
            found = made, list(ranks)
    return found


def device_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> Any:
    """Return a DeviceMesh of torch over all ranks."""
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))


def accept_nccl_on_cpu() -> None:
    """Make ``init_process_group("nccl")`` create a gloo group in this process from now on.

    This is for a script that was written for CUDA, run with a torch without CUDA.
    """
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
