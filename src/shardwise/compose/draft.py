"""Draft: a model, a mesh and the policies become a Plan. Pure but for reading the model's structure.

The order of the techniques, outermost first:
    1  slices      of matrices along "tp"                      parallel/tensor/layout.py
    2  stages      of blocks along "pp"                        parallel/pipeline/partition.py, cut.py
    3  recompute   around the blocks                           memory/recompute.py
    4  Units       which parameters move together              parallel/zero/modules.py
    5  dtypes      of each parameter's buffers                 precision/policy.py
    6  buckets     parameters of one dtype, trained or frozen, and one optimizer group, laid out flat
    7  placements  of each bucket's buffers on the mesh        parallel/zero/layout.py
    8  Actions     of one optimizer step                       plan/lists.py, compose/schedule.py

The first three are in compose/cut.py, the others here: a Unit is made of what a stage holds of a slice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.compose.whole import Whole
from shardwise.parallel.zero import layout
from shardwise.parallel.zero.modules import Found, Holding, find_units, unit_names
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan import lists
from shardwise.plan.action import Action
from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.names import chosen_by
from shardwise.plan.plan import Plan
from shardwise.plan.registry import Registry
from shardwise.plan.unit import BucketKey, Unit, lay_out
from shardwise.precision.policy import Dtypes, PrecisionPolicy


@dataclass(frozen=True)
class Draft:
    """The Plan of one pipeline stage (or of the whole model), and what the running parts need beside it."""

    plan: Plan
    strategy: Strategy
    found: tuple[Found, ...]
    """One per Unit."""
    holdings: dict[str, Holding]
    """Parameters by their first name in the whole model."""
    dtypes: dict[tuple[int, int], Dtypes]
    """By (Unit, bucket)."""


def names_of_units(model: nn.Module, zero: ZeroPolicy) -> list[str]:
    """Modules of the whole model whose parameters move together, the root left out: as the user, the model or its
    repeated blocks say."""
    if zero.external_parameters:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        chosen_by(zero.external_parameters, names, "zero.external_parameters", "parameter")
    own = getattr(model, "unit_patterns", None)
    return unit_names(model, own() if zero.units == "auto" and own is not None else zero.units)


def draft(
    model: nn.Module,
    whole: Whole,
    registry: Registry,
    mesh: Mesh,
    zero: ZeroPolicy,
    precision: PrecisionPolicy,
    units: Sequence[str],
    group_of: Callable[[str], int],
    moments: Sequence[str] = (),
) -> Draft:
    """The Plan of ``model`` (one stage), its Actions left to ``full_step``: their order is known after the first step.

    ``units``: from ``names_of_units``; ``group_of``: optimizer group of a parameter name; ``moments``: names of the
    optimizer's moments.
    """
    found = find_units(model, units, zero.external_parameters)
    strategy = layout.strategy_of(zero, mesh)
    shards = mesh.size("dp_shard")
    laid, buffers, dtypes = [], {}, {}
    for index, entry in enumerate(found):
        buckets = []
        for place, (key, bucket_dtypes, members) in enumerate(_grouped(entry, whole, precision, group_of)):
            slots = []
            for holding in members:
                name = whole.canonical[holding.name]
                slots.append((name, tuple(holding.parameter.shape), whole.parameters[name].aliases))
            buckets.append(lay_out(key, slots, shards))
            dtypes[index, place] = bucket_dtypes
            buffers[index, place] = layout.buffers(strategy, bucket_dtypes, key.trained, moments)
        laid.append(Unit(index, entry.name, tuple(buckets)))
    holdings = {whole.canonical[h.name]: h for entry in found for h in entry.holdings}
    plan = Plan(mesh, registry, tuple(laid), buffers, {}, _notes(found, zero))
    return Draft(plan, strategy, tuple(found), holdings, dtypes)


def full_step(
    units: Sequence[Unit],
    strategy: Strategy,
    accumulation: int,
    brackets: Sequence[lists.Bracket] | None = None,
    prefetch_units: int = 0,
) -> tuple[Action, ...]:
    """The list of one optimizer step, in the order of ``brackets`` (default: of registration)."""
    brackets = brackets or lists.registration_brackets([unit.name for unit in units])
    return tuple(lists.step_actions(units, brackets, strategy, accumulation, prefetch_units))


def _grouped(
    found: Found, whole: Whole, precision: PrecisionPolicy, group_of: Callable[[str], int]
) -> list[tuple[BucketKey, Dtypes, list[Holding]]]:
    groups: dict[BucketKey, list[Holding]] = {}
    dtypes: dict[BucketKey, Dtypes] = {}
    for holding in found.holdings:
        name = whole.canonical[holding.name]
        own = precision.dtypes(name, holding.parameter.dtype)
        trained = holding.parameter.requires_grad
        tie = name if trained and len(whole.stages.get(name, ())) > 1 else ""
        key = BucketKey(own.compute, trained, group_of(name) if trained else 0, tie)
        groups.setdefault(key, []).append(holding)
        dtypes[key] = own
    return [(key, dtypes[key], members) for key, members in groups.items()]


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
