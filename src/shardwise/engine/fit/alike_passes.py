"""Alike passes: the passes of the stages of any pipeline, from those of three stages.

Blocks that are alike have the same share of a pass wherever they stand, except the first of a stage, and the last one,
behind which the code of the root runs. So the first, a middle and the last stage, measured once with three blocks or
more each, give the pass of each stage of any number of stages with two blocks or more:

    first stage    first block, second block, ..., second block, last block     of the measured first stage
    between        the same                                                     of the measured middle stage
    last stage     the same                                                     of the measured last stage

Stages with other Units, blocks of several kinds, or tensors of the root in a middle stage have no such rule; their
passes are measured as they are.

Cost: one look at each Unit and each parameter.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from shardwise.compose.spec import ModelSpec
from shardwise.plan.action import Kind
from shardwise.plan.lists import is_inside
from shardwise.simulate.passes import MeasuredPass

MEASURED_STAGES = 3
"""Number of stages whose passes give those of all others."""
_LEAST_MEASURED, _LEAST = 3, 2
"""Least blocks of a measured stage, and of a stage whose pass is made from it."""


def blocks_by_stage(
    spec: ModelSpec, starts: Sequence[str], recomputed: Collection[str]
) -> list[list[str]] | None:
    """Return the outermost Units of each stage if all are alike and the rule of this file holds, else None.

    Args:
        spec: Description of the model.
        starts: Blocks that begin each stage but the first.
        recomputed: Units that compute again.
    """
    outer = [unit for unit in spec.units if not any(is_inside(unit, other) for other in spec.units)]
    if len({_kind(spec, unit, recomputed) for unit in outer}) != 1 or spec.tables:
        return None
    stage_of = spec.stages(starts)
    stages: list[list[str]] = [[] for _ in range(len(starts) + 1)]
    for unit in outer:
        places = {stage for name, stage in stage_of.items() if name.startswith(f"{unit}.")}
        if len(places) != 1:
            return None
        stages[places.pop()].append(unit)
    of_root = {
        stage for name, stage in stage_of.items() if not any(name.startswith(f"{unit}.") for unit in outer)
    }
    return stages if of_root <= {0, len(starts)} else None


def _kind(spec: ModelSpec, unit: str, recomputed: Collection[str]) -> Hashable:
    """Return a value that is equal for Units which hold and compute alike."""
    own = tuple(
        (name.removeprefix(unit), each.shape, each.dtype, each.trained)
        for name, each in spec.parameters.items()
        if name.startswith(f"{unit}.")
    )
    inner = tuple(each.removeprefix(unit) for each in spec.units if is_inside(each, unit))
    return own, inner, unit in recomputed


def can_share(measured: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> bool:
    """Return True if the passes of the measured stages give those of the wanted ones."""
    return (
        len(measured) == MEASURED_STAGES
        and min(map(len, measured)) >= _LEAST_MEASURED
        and min(map(len, wanted)) >= _LEAST
        and len(wanted) >= MEASURED_STAGES - 1
    )


def shared_passes(
    passed: Mapping[int, MeasuredPass], measured: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]
) -> dict[int, MeasuredPass]:
    """Return the passes of the wanted stages.

    Args:
        passed: Passes of the measured stages.
        measured: Outermost Units of the measured stages.
        wanted: Outermost Units of the wanted stages.
    """
    found = {}
    for stage, units in enumerate(wanted):
        role = 0 if stage == 0 else MEASURED_STAGES - 1 if stage == len(wanted) - 1 else 1
        found[stage] = _renamed(passed[role], measured[role], units)
    return found


def _renamed(passed: MeasuredPass, measured: Sequence[str], units: Sequence[str]) -> MeasuredPass:
    """Return the pass of a stage with ``units``, from that of a stage in the same place with other Units."""
    sources = {
        unit: measured[0] if place == 0 else measured[-1] if place == len(units) - 1 else measured[1]
        for place, unit in enumerate(units)
    }

    def named(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries by Unit for the Units of the other stage."""
        found = {
            name: each
            for name, each in given.items()
            if not any(name == unit or is_inside(name, unit) for unit in measured)
        }
        for unit, source in sources.items():
            found |= {
                unit + name.removeprefix(source): each
                for name, each in given.items()
                if name == source or is_inside(name, source)
            }
        return found

    shares = {
        (kind, name): share
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        for name, share in named(
            {name: each for (own, name), each in passed.shares.items() if own is kind}
        ).items()
    }
    return passed._replace(
        shares=shares,
        evaluated=named(passed.evaluated),
        alike_sizes=named(passed.alike_sizes),
        kinds=named(passed.kinds),
    )
