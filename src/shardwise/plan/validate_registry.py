"""Proof that a Plan and its registry agree.

    buffers      lie as the tensors in them are registered, and have their dtypes
    strategies   of Units lie as the buffers, so that the registry decides which Actions a Unit needs
    state        every gradient, master and moment has the shape of its parameter, and a buffer
    parameters   every parameter in one bucket of each stage that holds it
    tables       every table in one Unit of its stage
    gradients    every gradient with addends on several ranks is summed

Cost: one look at each tensor.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwise.base.errors import PlanError
from shardwise.plan.lists import is_inside
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Shard
from shardwise.plan.plan import BucketBuffers, Plan, RankClass
from shardwise.plan.registry import Registry, TensorInfo, TensorKind
from shardwise.plan.slices import TensorSlices
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket, ParameterSlot


def validate_registered(plan: Plan, slices: TensorSlices) -> None:
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


def _registered(name: str, ranks: RankClass, plan: Plan, slices: TensorSlices) -> None:
    """Check that buffers and strategies lie as the tensors in them are registered."""
    moments: dict[str, set[str]] = defaultdict(set)
    for info in slices.registry.of_kind("moment"):
        moments[info.name].add(info.label)
    for unit, stage, strategy in zip(ranks.units, ranks.unit_stages, ranks.strategies, strict=True):
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
                _check_state(slot, rows, stage, moments[slot.name], slices.registry)
            _check_strategy(
                f"plan: bucket {place} of Unit {unit.title} on {name} ranks", strategy, bucket, rows
            )


def _check_slot(
    slot: ParameterSlot, bucket: Bucket, rows: Sequence[BucketBuffers], stage: int, slices: TensorSlices
) -> None:
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
        kept = _registered_as(row, slot.name, registry)
        for axis, placement in row.placement.items():
            if kept.on(axis) != placement:
                raise PlanError(
                    f"{where}: its {row.kind} is registered {kept.on(axis)} on {axis}, but its buffer is {placement}"
                )
    if bucket.key.trained:
        _check_gradient(where, registry.get("gradient", slot.name), info, rows[0].placement, slices.mesh)


def _check_state(
    slot: ParameterSlot,
    rows: Sequence[BucketBuffers],
    stage: int,
    moments: Collection[str],
    registry: Registry,
) -> None:
    """Check that what is registered beside a parameter has its shape, its dtype, and a buffer."""
    info, where = registry.get("parameter", slot.name), f"plan: {slot.name!r} on stage {stage}"
    held = {row.kind: row for row in rows}
    missing = sorted(set(moments) - set(held))
    if missing and "grad" in held:
        raise PlanError(f"{where}: its moment {missing[0]} is registered, but has no buffer")
    for row in rows:
        kept = _registered_as(row, slot.name, registry)
        if kept.shape != info.shape:
            raise PlanError(
                f"{where}: its {row.kind} is registered as {list(kept.shape)}, but the parameter is {list(info.shape)}"
            )
        # A moment may be stored in another form than its dtype, and what is adopted later is a weight.
        if row.kind in ("weight", "grad", "master") and kept.dtype.itemsize != row.itemsize:
            raise PlanError(
                f"{where}: its {row.kind} is registered as {kept.dtype}, but an element of its buffer has "
                f"{row.itemsize} bytes"
            )
    if "grad" in held:
        master = registry.get("master", slot.name)
        if master.shape != info.shape or ("master" not in held and master.dtype != info.dtype):
            raise PlanError(
                f"{where}: its master is registered as {master.dtype} {list(master.shape)}, but the weight, which is "
                f"its own master, is {info.dtype} {list(info.shape)}"
            )
        for label in moments:
            dtype = registry.get("moment", slot.name, label).dtype
            if dtype != master.dtype:
                raise PlanError(
                    f"{where}: its {label} is registered as {dtype}, but its master as {master.dtype}"
                )


def _registered_as(row: BucketBuffers, name: str, registry: Registry) -> TensorInfo:
    """Return the registered tensor that lies in a buffer."""
    return registry.get("moment", name, row.kind) if row.is_moment else registry.get(_KIND_OF[row.kind], name)


def _check_strategy(where: str, strategy: Strategy, bucket: Bucket, rows: Sequence[BucketBuffers]) -> None:
    """Check that a bucket's buffers lie as the strategy of its Unit says, which decides the Unit's Actions."""
    wanted = {
        "weight": (strategy.weight, strategy.weight_tier),
        "grad": (strategy.grad, strategy.grad_tier),
        "next weight": (strategy.master, "host"),
    }
    for row in rows:
        placement, tier = wanted.get(row.kind, (strategy.master, strategy.tier))
        if dict(row.placement) != dict(zip(bucket.key.axes, placement, strict=True)) or row.tier != tier:
            lies = "/".join(map(str, row.placement.values()))
            raise PlanError(
                f"{where}: its {row.kind} lies {lies} in {row.tier} memory, but the Unit's strategy says "
                f"{'/'.join(map(str, placement))} in {tier} memory"
            )


_KIND_OF: Mapping[str, TensorKind] = {
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
