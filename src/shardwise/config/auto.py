"""The resolution of "auto" and left-out numbers: a function that returns a new configuration and lists its choices."""

from typing import NamedTuple

from shardwise.base.errors import ConfigError
from shardwise.config.batch import BatchPolicy
from shardwise.config.rules import check
from shardwise.config.run import RunConfig
from shardwise.data.clicks.policy import ClickPolicy
from shardwise.optim.schedule_policy import ends_at, lacks_end, needs_end
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.tiers.offload import OffloadPolicy

_PREFETCH_BYTES = 64 << 20
"""Bytes to prefetch: enough to keep a network busy, and little compared with a device's memory."""


class ResolvedConfig(NamedTuple):
    """A configuration in which every number is determined, its mesh, and a description of each choice."""

    config: RunConfig
    mesh: Mesh
    choices: tuple[str, ...]


def resolve(config: RunConfig, world_size: int, device_type: str) -> ResolvedConfig:
    """Fill in the values that follow from the number of ranks and the device.

    Args:
        config: The configuration.
        world_size: The number of ranks.
        device_type: ``cpu``, ``cuda`` or another device type of torch.

    Returns:
        A new configuration, its mesh, and the choices in words.

    Raises:
        MeshError: if the mesh does not fit the number of ranks.
        ConfigError: if values contradict one another, or a schedule has no last step.
    """
    check(config)
    offload = config.offload
    mesh = config.mesh.mesh(world_size, config.pipeline.folded)
    batch = config.batch.derived(mesh.size("data"))
    if offload.parameters != "device" and config.zero.stage in (1, 2) and mesh.dp_shard > 1:
        raise ConfigError(
            f"offload.parameters: {offload.parameters} at zero.stage {config.zero.stage}, where weights are whole for "
            "the next step; zero.stage: 3 keeps a shard of them, and that may lie elsewhere"
        )
    choices = [f"mesh {mesh}", _batch_text(batch, mesh.size("data"))]
    if offload.optimizer == "host" and device_type == "cpu" and offload.step != "delayed":
        offload = offload.model_copy(update={"optimizer": "device", "parameters": "device"})
        choices.append("offload.optimizer: host memory is where CPU ranks keep all state")
    if offload.activations == "host" and device_type == "cpu":
        offload = offload.model_copy(update={"activations": "device"})
        choices.append("offload.activations: host memory is where CPU ranks keep what a block saves")
    schedule = config.schedule
    if lacks_end(schedule) and "steps" in config.train.model_fields_set:
        schedule = ends_at(schedule, config.train.steps)
    has_epochs = isinstance(config.data, ClickPolicy) and config.data.epochs is not None
    if lacks_end(schedule) and needs_end(schedule) and not has_epochs:
        raise ConfigError(
            f"schedule: {schedule.type} needs a last step; give schedule.total_steps, train.steps or data.epochs"
        )
    zero = _resolved_zero(config.zero, batch, offload, device_type)
    tensor = config.tensor
    if tensor.overlap == "auto" and device_type == "cpu":
        # CPU ranks copy what they exchange on the cores that multiply: pieces would cost calls and hide nothing.
        tensor = tensor.model_copy(update={"overlap": "off"})
    resolved = config.model_copy(
        update={"batch": batch, "offload": offload, "schedule": schedule, "zero": zero, "tensor": tensor}
    )
    check(resolved)
    return ResolvedConfig(resolved, mesh, tuple(choices))


def _resolved_zero(
    zero: ZeroPolicy, batch: BatchPolicy, offload: OffloadPolicy, device_type: str
) -> ZeroPolicy:
    """Return ``zero`` with a number of bytes to prefetch, a number of reductions under way and a time of reductions."""
    # CPU ranks share their cores with the copies: a collective beside the computation saves no time on them, but a
    # read from a disk does.
    is_beside = device_type != "cpu"
    prefetch, under_way = (
        (default if gains else 0) if wanted == "auto" else wanted
        for wanted, default, gains in (
            (zero.prefetch_bytes, _PREFETCH_BYTES, is_beside or offload.parameters == "disk"),
            (zero.reductions_under_way, 1, is_beside),
        )
    )
    # A single microbatch has no gradient to add to, so its gradient is cut at once and the full one frees its memory.
    once = batch.accumulation == 1 and zero.stage >= 1
    reduce = "microbatch" if once else zero.reduce
    return zero.model_copy(
        update={"prefetch_bytes": prefetch, "reductions_under_way": under_way, "reduce": reduce}
    )


def _batch_text(batch: BatchPolicy, dp: int) -> str:
    micro = "?" if batch.micro_size is None else batch.micro_size
    total = "?" if batch.global_size is None else batch.global_size
    return f"batch {total} = {micro} micro × {batch.accumulation} accumulation × {dp} ranks"
