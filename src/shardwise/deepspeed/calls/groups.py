"""``deepspeed.utils.groups``: groups of ranks for scripts, taken from the open engine.

Hugging Face's libraries call the names with an underscore. The data-parallel numbers are the engine's; before an
engine is built, all ranks are data-parallel.
"""

from typing import Any

from shardwise.base.errors import UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.calls.living import living


def _sizes() -> tuple[int, int, int, int]:
    """Return (data-parallel index, size, tensor-parallel index, size) of the first open engine."""
    for engine in living():
        mesh = engine.ours.plan.mesh
        return engine.ours.dp_index, engine.ours.dp_size, mesh.index("tp", engine.global_rank), mesh.tp
    return default_group.rank(), default_group.size(), 0, 1


def get_data_parallel_rank() -> int:
    """Return the index of this rank among the data-parallel ranks."""
    return _sizes()[0]


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return _sizes()[1]


def get_data_parallel_group() -> Any:
    """Return torch's process group of the data-parallel ranks.

    Raises:
        UsageError: if the data-parallel ranks are not all ranks of the job.
    """
    return _all_ranks(_sizes()[1], "data-parallel")


def get_tensor_model_parallel_rank() -> int:
    """Return the index of this rank among the tensor-parallel ranks, which share its matrices."""
    return _sizes()[2]


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks, which share a matrix."""
    return _sizes()[3]


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first of the tensor-parallel ranks that share matrices with this rank."""
    return default_group.rank() - _sizes()[2]


def get_tensor_model_parallel_group() -> Any:
    """Return torch's process group of the tensor-parallel ranks.

    Raises:
        UsageError: if the tensor-parallel ranks are not all ranks of the job.
    """
    return _all_ranks(_sizes()[3], "tensor-parallel")


def _all_ranks(size: int, what: str) -> Any:
    """Return torch's group of all ranks; raise UsageError if ``size`` ranks are not all ranks of the job.

    Returning None for a smaller group would be wrong: torch's collectives take None for all ranks and would sum over
    the wrong ranks.
    """
    if size != default_group.size():
        raise UsageError(
            f"groups: the {size} {what} ranks are some of {default_group.size()}, in groups of the engine's own; make "
            "one of torch's with torch.distributed.new_group on all ranks"
        )
    return default_group.group.WORLD if default_group.is_begun() else None


def _get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence, of the first open engine; 1 before an engine is built."""
    return next((engine.ours.plan.mesh.cp for engine in living()), 1)


def _get_sequence_parallel_rank() -> int:
    """Return the index of this rank among those that share its sequences."""
    return next((engine.ours.plan.mesh.index("cp", engine.global_rank) for engine in living()), 0)


def _get_sequence_parallel_group() -> Any:
    """Return torch's process group of the ranks that share sequences with this rank; None if sequences are whole.

    Raises:
        UsageError: if these ranks are some of the job's, and the engine was given no mpu with a group of them.
    """
    for engine in living():
        call = getattr(engine.mpu, "get_sequence_parallel_group", None)
        if call is not None:
            return call()
    size = _get_sequence_parallel_world_size()
    return None if size == 1 else _all_ranks(size, "sequence-parallel")


def _get_sequence_data_parallel_rank() -> int:
    """Return the index of this rank among those that share the state of its part of the model."""
    return next(
        (engine.ours.plan.mesh.index("dp", engine.global_rank) for engine in living()), default_group.rank()
    )


def _get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks that share the state of a part of the model."""
    return next((engine.ours.plan.mesh.size("dp") for engine in living()), default_group.size())


def _get_sequence_data_parallel_group() -> Any:
    """Return torch's process group of the ranks that share the state of a part of the model.

    Raises:
        UsageError: if these ranks are not all ranks of the job.
    """
    return _all_ranks(_get_sequence_data_parallel_world_size(), "sequence-data-parallel")


def _expert_axis(axis: str, what: str, group_name: str) -> tuple[int, int]:
    """Return (index of this rank, size) of an axis of the experts, for the first open engine.

    Raises:
        UsageError: if there is no engine, or its experts are not in the group ``group_name``.
    """
    for engine in living():
        mesh = engine.ours.plan.mesh
        if group_name not in ("", f"ep_size_{mesh.ep}"):
            raise UsageError(
                f"groups: no {group_name!r}; the experts of this engine lie in 'ep_size_{mesh.ep}'"
            )
        return mesh.index(axis, engine.global_rank), mesh.size(axis)
    raise UsageError(f"groups: no engine lives that has {what} ranks; call deepspeed.initialize first")


def _get_expert_parallel_rank(group_name: str = "") -> int:
    """Return the index of this rank among the ranks that hold all experts together."""
    return _expert_axis("ep", "expert-parallel", group_name)[0]


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    """Return the number of ranks that hold all experts together."""
    return _expert_axis("ep", "expert-parallel", group_name)[1]


def _get_expert_parallel_group(group_name: str = "") -> Any:
    """Return torch's process group of the ranks that hold all experts together.

    Raises:
        UsageError: if these ranks are not all ranks of the job.
    """
    return _all_ranks(_expert_axis("ep", "expert-parallel", group_name)[1], "expert-parallel")


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    """Return the index of this rank among the ranks that hold the same experts."""
    return _expert_axis("expert_dp", "expert-data-parallel", group_name)[0]


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    """Return the number of ranks that hold the same experts."""
    return _expert_axis("expert_dp", "expert-data-parallel", group_name)[1]


def _get_expert_data_parallel_group(group_name: str = "") -> Any:
    """Return torch's process group of the ranks that hold the same experts.

    Raises:
        UsageError: if these ranks are not all ranks of the job.
    """
    return _all_ranks(
        _expert_axis("expert_dp", "expert-data-parallel", group_name)[1], "expert-data-parallel"
    )


def _get_max_expert_size() -> int:
    """Return the ``ep_size`` that all layers of experts share."""
    return _get_expert_parallel_world_size()


def _get_max_expert_size_name() -> str:
    """Return the name of the group of ranks that hold all experts together."""
    return f"ep_size_{_get_max_expert_size()}"


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks that hold all experts together, and the groups of ranks that hold the same experts.

    Raises:
        UsageError: if the sizes do not divide the number of ranks.
    """
    stage, tp, ep = (
        world_size // max(pipeline_parallel_size_, 1),
        tensor_parallel_size_,
        expert_parallel_size_,
    )
    if (
        min(tp, ep, pipeline_parallel_size_) < 1
        or stage * pipeline_parallel_size_ != world_size
        or stage % (tp * ep)
    ):
        raise UsageError(
            f"groups: {world_size} ranks do not divide into {pipeline_parallel_size_} stages of {tp} tensor-parallel "
            f"and {ep} expert-parallel ranks"
        )
    together: list[list[int]] = []
    alike: list[list[int]] = []
    for first in range(0, world_size, stage):
        for place in range(tp):
            replicas = list(range(first + place, first + stage, tp))
            runs = len(replicas) // ep
            if use_data_before_expert_parallel_:
                own = [replicas[run::runs] for run in range(runs)]
            else:
                own = [replicas[run * ep : (run + 1) * ep] for run in range(runs)]
            together += own
            alike += [list(each) for each in zip(*own, strict=True)]
    return together, alike
