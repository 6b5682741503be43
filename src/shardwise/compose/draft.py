"""Draft: a model, a mesh and the policies become a Plan. Pure but for reading the model's structure.

The order of the techniques, outermost first:
    1  Units       which parameters move together              parallel/zero/modules.py
    2  dtypes      of each parameter's buffers                 precision/policy.py
    3  buckets     parameters of one dtype, trained or frozen, and one optimizer group, laid out flat
    4  placements  of each bucket's buffers on the mesh        parallel/zero/layout.py
    5  Actions     of one optimizer step                       parallel/zero/layout.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.parallel.zero import layout
from shardwise.parallel.zero.modules import Found, Holding, find_units
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import Action
from shardwise.plan.errors import PlanError
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Buffers, Plan
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.unit import Bucket, BucketKey, Unit, lay_out
from shardwise.precision.policy import Dtypes, PrecisionPolicy


@dataclass(frozen=True)
class Draft:
    """A Plan, and what the running parts need beside it."""

    plan: Plan
    strategy: layout.Strategy
    found: tuple[Found, ...]
    """One per Unit."""
    holdings: dict[str, Holding]
    """Parameters by name."""
    dtypes: dict[tuple[int, int], Dtypes]
    """By (Unit, bucket)."""


def draft(
    model: nn.Module,
    mesh: Mesh,
    zero: ZeroPolicy,
    precision: PrecisionPolicy,
    group_of: Callable[[str], int],
    moments: Sequence[str] = (),
) -> Draft:
    """The Plan of a data-parallel run, its Actions left to ``full_step``: their order is known after the first step.

    ``group_of``: optimizer group of a parameter name; ``moments``: names of the optimizer's moments.
    Errors: PlanError where the model has no parameters, or complex ones.
    """
    own_units = getattr(model, "unit_patterns", None)
    found = find_units(model, own_units() if zero.units == "auto" and own_units is not None else zero.units)
    if not any(entry.holdings for entry in found):
        raise PlanError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    strategy = layout.strategy_of(zero, mesh)
    shards = mesh.size("dp_shard")
    units, buffers, dtypes = [], {}, {}
    registry = Registry()
    for index, entry in enumerate(found):
        buckets = []
        for place, (key, bucket_dtypes, members) in enumerate(_grouped(entry, precision, group_of)):
            bucket = lay_out(key, [(h.name, tuple(h.parameter.shape), h.aliases) for h in members], shards)
            buckets.append(bucket)
            dtypes[index, place] = bucket_dtypes
            buffers[index, place] = layout.buffers(strategy, bucket_dtypes, key.trained, moments)
            _register(registry, bucket, buffers[index, place], strategy, bucket_dtypes, moments)
        units.append(Unit(index, entry.name, tuple(buckets)))
    for name, buffer in model.named_buffers():
        registry.add(TensorInfo(name, tuple(buffer.shape), buffer.dtype, "buffer"))
    holdings = {holding.name: holding for entry in found for holding in entry.holdings}
    plan = Plan(mesh, registry, tuple(units), buffers, {}, _notes(found, zero))
    return Draft(plan, strategy, tuple(found), holdings, dtypes)


def full_step(
    units: Sequence[Unit],
    strategy: layout.Strategy,
    accumulation: int,
    brackets: Sequence[layout.Bracket] | None = None,
    prefetch_units: int = 0,
) -> tuple[Action, ...]:
    """The list of one optimizer step, in the order of ``brackets`` (default: of registration)."""
    brackets = brackets or layout.registration_brackets([unit.name for unit in units])
    return tuple(layout.step_actions(units, brackets, strategy, accumulation, prefetch_units))


def _grouped(
    found: Found, precision: PrecisionPolicy, group_of: Callable[[str], int]
) -> list[tuple[BucketKey, Dtypes, list[Holding]]]:
    groups: dict[BucketKey, list[Holding]] = {}
    dtypes: dict[BucketKey, Dtypes] = {}
    for holding in found.holdings:
        if holding.parameter.is_complex():
            raise PlanError(
                f"model: parameter {holding.name!r} has dtype {holding.parameter.dtype}; expected a real one. Hold its "
                "real and imaginary parts (torch.view_as_real) and put them together in forward"
            )
        own = precision.dtypes(holding.name, holding.parameter.dtype)
        trained = holding.parameter.requires_grad
        key = BucketKey(own.compute, trained, group_of(holding.name) if trained else 0)
        groups.setdefault(key, []).append(holding)
        dtypes[key] = own
    return [(key, dtypes[key], members) for key, members in groups.items()]


def _register(
    registry: Registry,
    bucket: Bucket,
    rows: Sequence[Buffers],
    strategy: layout.Strategy,
    dtypes: Dtypes,
    moments: Sequence[str],
) -> None:
    placed = {row.kind: row.placement for row in rows}
    master = dict(zip(layout.AXES, strategy.master, strict=True))
    addends = dict.fromkeys(layout.AXES, layout.Partial())
    for slot in bucket.slots:
        shape, aliases = slot.shape, slot.aliases
        registry.add(
            TensorInfo(
                slot.name, shape, dtypes.compute, "parameter", placed["weight"], addends, aliases=aliases
            )
        )
        if not bucket.key.trained:
            continue
        registry.add(TensorInfo(slot.name, shape, dtypes.grad, "gradient", placed["grad"], addends))
        registry.add(TensorInfo(slot.name, shape, dtypes.master, "master", master))
        for moment in moments:
            registry.add(TensorInfo(slot.name, shape, dtypes.master, "moment", master, label=moment))


def _notes(found: Sequence[Found], zero: ZeroPolicy) -> tuple[str, ...]:
    notes = []
    if zero.units == "auto":
        blocks = len(found) - 1
        notes.append(
            f"{blocks} repeated blocks became Units; what lies outside them belongs to the root"
            if blocks
            else "no repeated blocks found: the whole model is one Unit (name modules in zero.units to cut it)"
        )
    tied = [alias for entry in found for holding in entry.holdings for alias in holding.aliases]
    if tied:
        notes.append(
            f"tied: {', '.join(tied[:4])}{' ...' if len(tied) > 4 else ''} share another parameter's slot"
        )
    return tuple(notes)
