"""``deepspeed.comm``: torch.distributed's names, and the few that DeepSpeed adds.

Every collective of a script uses torch's default group (comm/default_group.py). The engine communicates on groups of
its own; ``log_summary`` prints what the engine sent.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from shardwise.comm import default_group
from shardwise.comm.world import own_seat
from shardwise.deepspeed.calls.accelerate_state import name_backend
from shardwise.deepspeed.calls.device import get_accelerator
from shardwise.deepspeed.calls.living import living


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Connect to the other ranks and make torch's default group, unless the group exists. Collective.

    The environment provides the rank, the number of ranks, the address and the port, whichever launcher set them
    (Shardwise's own, torchrun, SLURM, MPI).

    Args:
        dist_backend: No effect: accelerators use their own backend, and CPU ranks use gloo.
        auto_mpi_discovery: No effect: the environment of MPI is always read.
        distributed_port: No effect: the environment gives the port.
        verbose: No effect.
        timeout: The time to wait for the other ranks; None: the default.
        init_method: No effect: the environment gives the address.
        dist_init_required: False to make no group if there is none.
        config: No effect.
        rank: No effect: the environment gives the rank.
        world_size: No effect: the environment gives the number of ranks.
    """
    if dist_init_required is False and not default_group.is_begun():
        return
    wait_s = None if timeout is None else timeout.total_seconds()
    default_group.begin(*(() if wait_s is None else (wait_s,)))
    name_backend()


def is_initialized() -> bool:
    """Return whether torch's default group exists."""
    name_backend()
    return default_group.is_begun()


def is_available() -> bool:
    """Return True: torch has collectives."""
    return True


def get_rank(group: Any = None) -> int:
    """Return the index of this rank in ``group``, or in the job; 0 for one process."""
    return default_group.rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in ``group``, or in the job; 1 for one process."""
    return default_group.size(group)


def get_local_rank() -> int:
    """Return the index of this rank on its host."""
    return own_seat().local_rank


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return default_group.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank in the job of the rank ``group_rank`` of ``group``."""
    return default_group.ranks_of(group)[group_rank]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of ``group``, numbered as in the job."""
    return default_group.ranks_of(group)


def inference_all_reduce(tensor: Tensor, op: Any = None, group: Any = None) -> Any:
    """Reduce ``tensor`` over the ranks of ``group`` in place; the default operation is a sum."""
    return default_group.all_reduce(tensor, op or default_group.ReduceOp.SUM, group)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **ignored: Any
) -> Any:
    """Gather the tensors of all ranks, one after another, into ``output_tensor``."""
    return default_group.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    **ignored: Any,
) -> Any:
    """Reduce ``tensor`` over all ranks and write this rank's part into ``output_tensor``."""
    return default_group.reduce_scatter_tensor(
        output_tensor, tensor, op or default_group.ReduceOp.SUM, group, async_op
    )


def has_all_gather_into_tensor() -> bool:
    """Return True: torch has this collective."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return torch's DeviceMesh over all ranks."""
    default_group.begin()
    return default_group.device_mesh(get_accelerator().device_name(), mesh_shape, mesh_dim_names)


def configure(*args: Any, **kwargs: Any) -> None:
    """Do nothing: traffic is always counted, and ``log_summary`` prints the counts."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print on rank 0 what this rank's engines sent: calls, elements and bytes per operation, purpose and axis.

    Args:
        show_straggler: No effect.
        return_dict: True to return the numbers on every rank in place of printing them.
    """
    counts = {
        f"{operation} of {purpose} on {axis}": count._asdict()
        for engine in living()
        for (operation, purpose, axis), count in engine.ours.traffic.counts.items()
    }
    if return_dict:
        return counts
    if get_rank() == 0:
        for what, count in counts.items():
            print(
                f"{what:<44} {count['calls']:>8} calls {count['elements']:>14} elements {count['bytes']:>15} bytes"
            )
    return None
