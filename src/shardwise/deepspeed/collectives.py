"""``deepspeed.comm``: torch.distributed's names, and the few that DeepSpeed adds.

Every collective of a script goes to torch's default group (comm/default_group.py). What the engine sends travels on
groups of its own; ``log_summary`` prints that.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from shardwise.comm import default_group
from shardwise.comm.world import own_seat
from shardwise.deepspeed.accelerate_state import name_backend
from shardwise.deepspeed.device import get_accelerator
from shardwise.deepspeed.living import living


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
    """Meet the other ranks and make torch's default group; nothing where there is one. All ranks call it.

    The ranks are found in the environment, whoever started them (our launcher, torchrun, SLURM, MPI), and so are
    address and port. ``dist_backend``: of accelerators; CPU ranks take gloo whatever it says.
    """
    if dist_init_required is False and not default_group.is_begun():
        return
    wait_s = None if timeout is None else timeout.total_seconds()
    default_group.begin(*(() if wait_s is None else (wait_s,)))
    name_backend()


def is_initialized() -> bool:
    """Whether the ranks have met."""
    name_backend()
    return default_group.is_begun()


def is_available() -> bool:
    """torch has collectives."""
    return True


def get_rank(group: Any = None) -> int:
    """This rank in ``group``, or in the job; 0 for one process."""
    return default_group.rank(group)


def get_world_size(group: Any = None) -> int:
    """Ranks of ``group``, or of the job; 1 for one process."""
    return default_group.size(group)


def get_local_rank() -> int:
    """This rank's place on its host."""
    return own_seat().local_rank


def get_world_group() -> Any:
    """The group of all ranks."""
    return default_group.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Which rank of the job is ``group_rank`` of ``group``."""
    return default_group.ranks_of(group)[group_rank]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of ``group``, as the job counts them."""
    return default_group.ranks_of(group)


def inference_all_reduce(tensor: Tensor, op: Any = None, group: Any = None) -> Any:
    """A sum over the ranks of ``group``, in place."""
    return default_group.all_reduce(tensor, op or default_group.ReduceOp.SUM, group)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **ignored: Any
) -> Any:
    """All ranks' tensors one after another in ``output_tensor``."""
    return default_group.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    **ignored: Any,
) -> Any:
    """This rank's part of the sum over all ranks."""
    return default_group.reduce_scatter_tensor(
        output_tensor, tensor, op or default_group.ReduceOp.SUM, group, async_op
    )


def has_all_gather_into_tensor() -> bool:
    """torch has it."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """torch's DeviceMesh over all ranks."""
    default_group.begin()
    return default_group.device_mesh(get_accelerator().device_name(), mesh_shape, mesh_dim_names)


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: what was sent is always counted; see ``log_summary``."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print on rank 0 what this rank's engines sent so far: calls, elements and bytes by operation and purpose.

    ``return_dict``: give the numbers back instead.
    """
    counts = {
        f"{operation} of {purpose}": count._asdict()
        for engine in living()
        for (operation, purpose), count in engine.ours.traffic.counts.items()
    }
    if return_dict:
        return counts
    if get_rank() == 0:
        for what, count in counts.items():
            print(
                f"{what:<32} {count['calls']:>8} calls {count['elements']:>14} elements {count['bytes']:>15} bytes"
            )
    return None
