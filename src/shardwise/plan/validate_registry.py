"""Proof that a Plan and its registry agree.

    buffers      lie as the tensors in them are registered
    parameters   every parameter in one bucket of each stage that holds it
    tables       every table in one Unit of its stage
    gradients    every gradient with addends on several ranks is summed

Cost: one look at each tensor.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shardwise.base.errors import PlanError
from shardwise.plan.lists import is_inside
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Shard
from shardwise.plan.plan import Buffers, Plan, RankClass
from shardwise.plan.registry import Kind as RegisteredKind
from shardwise.plan.registry import TensorInfo
from shardwise.plan.slices import Slices
from shardwise.plan.unit import Bucket, Slot


def validate_registered(plan: Plan, slices: Slices) -> None:
    """Check that the parts of ``plan`` lie as they are registered.

    Args:
        plan: The Plan.
        slices: Slices of its registry, seen from any rank.

    Raises:
        PlanError: if not; the message names ranks and tensor.
    """
    for name, each in plan.classes.items():
        _registered(name, each, plan, slices)
    _everywhere(plan)


def _registered(name: str, ranks: RankClass, plan: Plan, slices: Slices) -> None:
    """Check that buffers lie as the tensors in them are registered."""
    for unit, stage in zip(ranks.units, ranks.unit_stages, strict=True):
        for place, bucket in enumerate(unit.buckets):
            rows = ranks.buffers.get((unit.index, place), ())
            axis = bucket.key.axes[1]
            if bucket.shards != plan.mesh.size(axis) or not rows:
                raise PlanError(
                    f"plan: bucket {place} of Unit {unit.title} on {name} ranks is laid out for {bucket.shards} ranks "
                    f"in {len(rows)} buffers; the mesh has {axis} {plan.mesh.size(axis)}"
                )
            for slot in bucket.slots:
                _check_slot(slot, bucket, rows, stage, slices)


def _check_slot(slot: Slot, bucket: Bucket, rows: Sequence[Buffers], stage: int, slices: Slices) -> None:
    registry = slices.registry
    info = registry.get("parameter", slot.name)
    where = f"plan: {slot.name!r} on stage {stage}"
    if stage not in info.stages:
        raise PlanError(f"{where}: the registry has it on stages {list(info.stages)}")
    local = slices.local_shape(info)
    if slot.shape != local:
        raise PlanError(
            f"{where}: its slot is {list(slot.shape)}, but by the registry a rank holds {list(local)} of "
            f"{list(info.shape)}"
        )
    if (info.dtype, len(info.stages) > 1) != (bucket.key.dtype, bool(bucket.key.tie)) and bucket.key.trained:
        raise PlanError(
            f"{where}: its bucket is of {bucket.key.dtype}, tied to {bucket.key.tie or 'nothing'}, but the registry "
            f"has {info.dtype} on stages {list(info.stages)}"
        )
    if info.axes != bucket.key.axes:
        raise PlanError(
            f"{where}: its bucket is cut over {' and '.join(bucket.key.axes)}, but the registry has its state on "
            f"{' and '.join(info.axes)}"
        )
    for row in rows:
        if row.is_moment:
            kept = registry.get("moment", slot.name, row.kind)
        else:
            kept = registry.get(_KIND_OF[row.kind], slot.name)
        for axis, placement in row.placement.items():
            if kept.on(axis) != placement:
                raise PlanError(
                    f"{where}: its {row.kind} is registered {kept.on(axis)} on {axis}, but its buffer is {placement}"
                )
    if bucket.key.trained:
        _check_gradient(where, registry.get("gradient", slot.name), info, rows[0].placement, slices.mesh)


_KIND_OF: Mapping[str, RegisteredKind] = {
    "weight": "parameter",
    "grad": "gradient",
    "master": "master",
    "next weight": "master",
}


def _check_gradient(
    where: str, gradient: TensorInfo, info: TensorInfo, data_axes: Iterable[str], mesh: Mesh
) -> None:
    """Check that each data-parallel rank has an addend, and that other axes cut gradients as they cut weights."""
    if gradient.grad_placement != info.grad_placement:
        raise PlanError(f"{where}: parameter and gradient are registered with different gradient placements")
    for axis in data_axes:
        if mesh.size(axis) > 1 and not isinstance(info.gradient_on(axis), Partial):
            raise PlanError(
                f"{where}: its gradient is registered {info.gradient_on(axis)} on {axis}, where each rank has samples "
                "of its own; expected P, an addend"
            )
    for axis in mesh.model_axes(info.axes):
        if isinstance(info.on(axis), Shard) and info.gradient_on(axis) != info.on(axis):
            raise PlanError(
                f"{where}: it is cut {info.on(axis)} on {axis}, but its gradient is {info.gradient_on(axis)}"
            )
        if gradient.on(axis) != info.on(axis):
            raise PlanError(
                f"{where}: it lies {info.on(axis)} on {axis}, but its gradient's buffer {gradient.on(axis)}"
            )


def _everywhere(plan: Plan) -> None:
    """Check that every parameter is in one bucket of each of its stages, and every table in one Unit of its stage."""
    found = Counter(
        (slot.name, stage)
        for each in plan.classes.values()
        for unit, stage in zip(each.units, each.unit_stages, strict=True)
        for bucket in unit.buckets
        for slot in bucket.slots
    )
    for info in plan.registry.of_kind("parameter"):
        for stage in info.stages:
            if found[info.name, stage] != 1:
                raise PlanError(
                    f"plan: {info.name!r} is in {found[info.name, stage]} buckets on stage {stage}; expected one"
                )
    _tables(plan)


def _tables(plan: Plan) -> None:
    """Check that every table is in one Unit and every Unit of tables has a table.

    A table in no Unit would never be fetched, delivered or updated. Tables are registered after the Plan is made, when
    they have places, so a Plan without registered tables is not checked for Units.
    """
    placed = [
        (unit, stage)
        for each in plan.classes.values()
        for unit, stage in zip(each.units, each.unit_stages, strict=True)
        if unit.has_rows
    ]
    found: Counter[tuple[str, int]] = Counter()
    for name, stages in sorted({(info.name, info.stages) for info in plan.registry.of_kind("table")}):
        for stage in stages:
            units = [unit.name for unit, at in placed if at == stage and is_inside(name, unit.name)]
            if len(units) != 1:
                raise PlanError(
                    f"plan: table {name!r} is in {len(units)} Units on stage {stage}; expected one, which fetches its "
                    "rows, delivers their gradients and updates them"
                )
            found[units[0], stage] += 1
    for unit, stage in placed if found else ():
        if not found[unit.name, stage]:
            raise PlanError(
                f"plan: Unit {unit.title} on stage {stage} has rows of no table that is registered"
            )
