"""Proof of a Plan: the conditions that its lists must fulfil before they may run.

    schedule     passes and messages of all stages                                     (validate_schedule.py)
    registry     buffers, buckets, strategies and Units agree with the registered tensors    (validate_registry.py)
    passes       each Action of a Unit stands in a pass of its stage and microbatch; F and B of a Unit stand only
                 while its weights are gathered, and inside those of the root
    windows      what was brought is gathered in that pass, and what was gathered is released
    the table    each Kind stands where its row allows, behind and before the Kinds that its row names, and as often as
                 the placements of the Unit ask for                                    (kinds.py)

The checks of single Kinds are read off the table of Kinds, so a new Kind is checked by its row.

Cost: one look at each Action and at each tensor.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.base.errors import PlanError
from shardwise.plan.action import NORM, Action
from shardwise.plan.kinds import Kind, OrderRule, RankFacts, Times, UnitFacts, Use
from shardwise.plan.plan import Plan, RankClass, class_of
from shardwise.plan.registry import Registry
from shardwise.plan.slices import TensorSlices
from shardwise.plan.validate_registry import validate_registered
from shardwise.plan.validate_schedule import validate_schedule


def validate_plan(plan: Plan, microbatches: int, kinds: Sequence[Kind] = tuple(Kind)) -> None:
    """Check that the lists of ``plan`` are one optimizer step and that its parts fit together.

    Args:
        plan: The Plan.
        microbatches: Microbatches of the step.
        kinds: Table of the Kinds.

    Raises:
        PlanError: if not; the message names ranks and Action or tensor.
    """
    lists = {place: list(each.actions) for place, each in enumerate(plan.classes.values())}
    validate_schedule(lists, plan.mesh.pp, microbatches, folded=plan.mesh.folded)
    slices = TensorSlices(plan.registry, plan.mesh, 0)
    validate_registered(plan, slices)
    for name, each in plan.classes.items():
        _RankList(name, each, each.actions, microbatches, slices, kinds).check()
        skipped = (*each.actions[: each.actions.index(NORM) + 1], *each.skipped)
        _RankList(name, each, skipped, microbatches, slices, kinds, is_skipped=True).check()


def validate_forward(
    plan: Plan, actions: Sequence[Action], microbatches: int, stage: int | None = None
) -> None:
    """Check that a list of the Plan's rank is an evaluation: forward passes without a backward pass.

    Args:
        plan: The Plan.
        actions: The list.
        microbatches: Forward passes.
        stage: The stage whose passes the list has; None: all stages of the rank.

    Raises:
        PlanError: if not; the message names ranks and Action.
    """
    name, slices = class_of(plan.mesh, plan.rank), TensorSlices(plan.registry, plan.mesh, 0)
    _RankList(name, plan.own, actions, microbatches, slices, tuple(Kind), False, stage).check()


def facts_of(ranks: RankClass, registry: Registry, trains: bool = True) -> list[UnitFacts]:
    """Return the facts about each Unit of a class of ranks, from which the Actions of the Unit follow.

    Args:
        ranks: The class of ranks.
        registry: The registered tensors.
        trains: False for a list without backward passes.
    """
    found = []
    for unit, strategy, is_trained in zip(ranks.units, ranks.strategies, ranks.trained, strict=True):
        directs = bool(registry.needs_of(unit) - {"elements"})
        found.append(UnitFacts(strategy, trains and (is_trained or unit.has_rows), unit.has_rows, directs))
    return found


@dataclass
class _RunningPass:
    """The pass of a stage in which the Actions of Units stand."""

    action: Action | None = None
    is_sent: bool = False
    """True if the result of the pass has been sent."""
    is_opened: bool = False
    """True if the root of the pass's stage has begun, which encloses all other Units."""


class _RankList:
    """Check of one list of one class of ranks, Action by Action."""

    def __init__(
        self,
        name: str,
        ranks: RankClass,
        actions: Sequence[Action],
        microbatches: int,
        slices: TensorSlices,
        kinds: Sequence[Kind],
        trains: bool = True,
        stage: int | None = None,
        is_skipped: bool = False,
    ):
        self._stage = stage
        self._name = name
        self._ranks = ranks
        self._actions = actions
        self._microbatches = microbatches
        self._kinds = {kind.name: kind for kind in kinds}
        self._trains = trains
        self._units = [
            facts._replace(is_skipped=is_skipped) for facts in facts_of(ranks, slices.registry, trains)
        ]
        needs = [slices.registry.needs_of(unit) for unit in ranks.units]
        self._rank = RankFacts(
            sums=slices.shares_gradients(ranks.stages),
            norms=bool(slices.registry.needs("norm")) and not is_skipped,
            matrices=any("matrix" in each for each in needs) and not is_skipped,
            loads=bool(slices.registry.needs("loads", ranks.stages)) and not is_skipped,
            scales=ranks.updates_fp8 and not is_skipped,
        )
        self._pass = _RunningPass()
        self._open: dict[str, set[int]] = {"brought": set(), "gathered": set()}
        """Units in each state of weights that a row of the table opens and closes."""
        self._travelling: dict[int, list[int]] = {stage: [] for stage in ranks.stages}
        """Units whose reductions are under way, by stage, the oldest first."""
        self._saved: dict[int, list[int]] = {stage: [] for stage in ranks.stages}
        """Units whose saved tensors leave for another tier and are still on the device, by stage, the oldest first."""
        self._counts: Counter[tuple[str, Action]] = Counter()
        """Actions so far, by phase."""
        self._ended: list[Action] = []
        """Actions behind the last pass, in order."""

    def check(self) -> None:
        """Check the list.

        Raises:
            PlanError: at the first Action that is missing or wrong.
        """
        for action in self._actions:
            kind = action.kind
            if kind is not Kind.ARRIVE:
                self._check_under_way(action)
            if kind.row.of == "message":
                around = self._pass.action
                self._pass.is_sent |= kind is Kind.SEND and around is not None and action[2:4] == around[2:4]
            elif kind.computes and action.unit < 0:
                self._begin_pass(action)
            elif kind.computes:
                self._compute(action)
            else:
                self._serve(action, self._use_of(action))
        self._complete()

    @cached_property
    def _halves(self) -> set[tuple[int, ...]]:
        """Microbatch and stage of each backward pass that the list has in two parts, I and W."""
        return {action[2:4] for action in self._actions if action.kind is Kind.W and action.unit < 0}

    def _backward(self, unit: int, microbatch: int) -> Kind:
        """Return B, or I for a backward pass in two parts: the Kind that gives the gradient of a Unit's input."""
        return Kind.I if (microbatch, self._ranks.unit_stages[unit]) in self._halves else Kind.B

    def _gives_gradients(self, unit: int, microbatch: int) -> Kind:
        """Return B, I or W: the Kind behind which all gradients of a Unit's parameters are complete."""
        kind = self._backward(unit, microbatch)
        return Kind.W if kind is Kind.I and unit in self._ranks.later_units else kind

    def _refuse(self, action: Action | str, why: str) -> None:
        raise PlanError(f"plan: {self._name} ranks have {action} {why}")

    # Passes ----------------------------------------------------------------------------------------------------

    def _begin_pass(self, action: Action) -> None:
        if self._ended:
            self._refuse(action, f"after {self._ended[-1]}")
        self._end_pass()
        self._pass = _RunningPass(action)

    def _end_pass(self) -> None:
        stage = -1 if self._pass.action is None else self._pass.action.stage
        saved = self._saved.get(stage, [])
        if len(saved) > (stage not in self._ranks.turning_stages):
            why = f"before the end of {self._pass.action}: what the Unit has saved stays on the device"
            self._refuse(f"no OFFLOAD(u{saved[0]})", why)
        for unit in self._open["brought"]:
            self._refuse(
                f"LOAD_WEIGHT(u{unit})", f"without UNSHARD(u{unit}) behind it in its pass, which sends it"
            )

    def _compute(self, action: Action) -> None:
        """Check the pass of a Unit."""
        kind, unit, _, _, _ = action
        self._is_of_units(action)
        if self._ended:
            self._refuse(action, f"after {self._ended[-1]}")
        self._is_in_pass(action, (kind.name,))
        if kind is not Kind.F and self._counts["pass", action._replace(kind=Kind.REDUCE)]:
            self._refuse(action, "after the REDUCE that its gradient belongs to")
        if kind is Kind.W:
            self._compute_weights(action)
            return
        root = self._is_inside_root(action)
        for needed in (unit, root):
            if self._units[needed].moves and needed not in self._open["gathered"]:
                whose = "its weights are" if needed == unit else f"the weights of its root, Unit {root}, are"
                self._refuse(action, f"while {whose} not gathered")
        if kind is Kind.F and self._units[unit].recalls and self._trains:
            saved = self._saved[self._ranks.unit_stages[unit]]
            if len(saved) > 1:
                left = f"OFFLOAD(u{saved[0]})"
                self._refuse(
                    action, f"before {left}, while what {len(saved)} Units have saved is on the device"
                )
            saved.append(unit)
        self._pass.is_opened = True
        self._counts["pass", action] += 1

    def _compute_weights(self, action: Action) -> None:
        """Check the W of a Unit, which needs no weights in memory."""
        if action.unit not in self._ranks.later_units:
            self._refuse(action, "of a Unit whose gradients are all complete behind I")
        if not self._counts["pass", action._replace(kind=Kind.I)]:
            self._refuse(action, f"before {action._replace(kind=Kind.I)}, whose products it computes")
        self._counts["pass", action] += 1

    def _is_inside_root(self, action: Action) -> int:
        """Check that ``action`` stands between the beginning of its stage's root and the sending of its result."""
        root = self._ranks.units_of(self._ranks.unit_stages[action.unit])[0].index
        if self._pass.is_sent:
            self._refuse(action, f"after the result of {self._pass.action} was sent")
        if action.unit != root and not self._pass.is_opened:
            around = Action(action.kind if action.kind.computes else Kind.F, root, action.microbatch)
            self._refuse(action, f"before {around}, inside of which it runs")
        return root

    def _is_in_pass(self, action: Action, wanted: Sequence[str]) -> None:
        """Check that ``action`` stands inside a pass of its stage and microbatch.

        A gather for all passes of a step names no microbatch.
        """
        if action.microbatch < 0 and action.kind.row.opens:
            return
        stage, around = self._ranks.unit_stages[action.unit], self._pass.action
        if around is None or (around.stage, around.microbatch) != (stage, action.microbatch):
            self._refuse(action, f"outside a pass of stage {stage} with microbatch {action.microbatch}")
        elif around.kind.name not in wanted:
            self._refuse(action, f"inside {around}; expected inside {' or '.join(wanted)}")

    # Actions that serve a pass, and the end of the step ----------------------------------------------------------

    def _is_of_units(self, action: Action) -> None:
        if action.unit >= len(self._units):
            self._refuse(action, f"but {len(self._units)} Units")
        of, has_rows = action.kind.row.of, self._units[action.unit].has_rows
        if of != "any unit" and has_rows != (of == "tables"):
            self._refuse(action, f"of a Unit of {'embedding tables' if has_rows else 'parameters'}")

    def _use_of(self, action: Action) -> Use:
        """Return the row's use of the place at which ``action`` stands."""
        uses = action.kind.row.uses
        if not uses:
            self._refuse(action, "in the list of a step; it goes ahead of the step, in a list of its own")
        phase = "update" if NORM in self._ended else "sums" if self._ended else "pass"
        for use in uses:
            if use.phase == phase or (use.phase == "update" and self._ended and len(uses) > 1):
                return use
        return uses[0]

    def _serve(self, action: Action, use: Use) -> None:
        """Check an Action against the row of its Kind."""
        is_of_rank = action.kind.row.of == "rank"
        if not is_of_rank:
            self._is_of_units(action)
        if use.phase == "pass" and self._ended:
            self._refuse(action, f"after {self._ended[-1]}")
        if use.phase == "update" and NORM not in self._ended:
            self._refuse(action, "before NORM, which decides by what the gradient is scaled")
        facts = self._rank if is_of_rank else self._units[action.unit]
        if use.phase == "pass":
            self._is_in_pass(action, use.inside)
            if action.kind.is_announced:
                self._is_inside_root(action)
        times = use.times(facts)
        if times is Times.NEVER:
            self._refuse(action, use.unasked)
        if times is Times.STEP and self._counts[use.phase, action]:
            self._refuse(action, "twice; expected once per step")
        self._is_ordered(action, use)
        if times is Times.PASS:
            self._is_ahead(action)
        if times is Times.AT_MOST_REDUCED:
            self._is_under_way(action)
        if times is Times.SAVED:
            self._is_saved(action)
        if use.phase == "pass":
            self._move(action, facts)
        else:
            if use.phase == "sums" and self._ended and self._ended[-1].kind.updates:
                self._refuse(action, f"after {self._ended[-1]}")
            self._ended.append(action)
        if action.kind is Kind.REDUCE:
            self._travelling[self._ranks.unit_stages[action.unit]].append(action.unit)
        self._counts[use.phase, action] += 1

    def _is_ahead(self, action: Action) -> None:
        """Check an Action that serves the Unit's B or I, and comes as often as its F."""
        backward = self._backward(action.unit, action.microbatch)
        done, opened, saved = (
            self._counts["pass", action._replace(kind=kind)] for kind in (action.kind, backward, Kind.F)
        )
        if opened == saved:
            self._refuse(action, f"behind {action._replace(kind=backward)}, which needs it")
        if done == saved:  # a Unit that runs twice in a row has both ahead of its first B
            self._refuse(action, f"more often than {action._replace(kind=Kind.F)}, which saves it")

    def _check_under_way(self, action: Action) -> None:
        """Check that no more reductions are under way than the Plan allows."""
        for units in self._travelling.values():
            if len(units) > self._ranks.under_way and NORM not in self._ended:
                self._refuse(
                    action,
                    f"while the reductions of {len(units)} Units are under way; expected at most "
                    f"{self._ranks.under_way}, and ARRIVE(u{units[0]}) before it",
                )

    def _is_under_way(self, action: Action) -> None:
        """Check an Action that waits for a reduction: one of the Unit's that nothing has waited for."""
        units = self._travelling[self._ranks.unit_stages[action.unit]]
        if action.unit not in units:
            self._refuse(action, f"though no reduction of Unit {action.unit} is under way")
        units.remove(action.unit)

    def _is_saved(self, action: Action) -> None:
        """Check an Action that releases what a Unit has saved: it must still be on the device."""
        saved = self._saved[self._ranks.unit_stages[action.unit]]
        if action.unit not in saved:
            self._refuse(action, f"though nothing that Unit {action.unit} has saved is on the device")
        saved.remove(action.unit)

    def _is_ordered(self, action: Action, use: Use) -> None:
        """Check that the Kinds that the row names stand on the right side of ``action``."""
        facts = self._rank if action.unit < 0 else self._units[action.unit]
        for order in use.order:
            if not order.when(facts):
                continue
            for other in self._others(action, order):
                has_run = any(self._counts[phase, other] for phase in ("pass", "sums", "update"))
                if has_run != order.follows:
                    side = "before" if order.follows else "after"
                    self._refuse(action, f"{side} {other}{order.why}")

    def _others(self, action: Action, order: OrderRule) -> list[Action]:
        """Return the Actions that a condition concerns: of those that must stand before, only those that are needed."""
        kind = self._kinds[order.other]
        if kind.computes:
            if kind.name == Kind.B.name:
                kind = self._gives_gradients(action.unit, action.microbatch)
            return [action._replace(kind=kind)]
        use = kind.row.uses[-1]

        def is_needed(facts: UnitFacts | RankFacts) -> bool:
            return not order.follows or use.times(facts) is not Times.NEVER

        if order.scope == "rank":
            return [Action(kind)] * is_needed(self._rank)
        units = [action.unit] if order.scope == "unit" else range(len(self._units))
        return [Action(kind, unit) for unit in units if is_needed(self._units[unit])]

    def _move(self, action: Action, facts: UnitFacts | RankFacts) -> None:
        """Check and change the state of a Unit's weights."""
        row, unit, gathered, brought = (
            action.kind.row,
            action.unit,
            self._open["gathered"],
            self._open["brought"],
        )
        if row.opens and (unit in gathered or unit in self._open[row.opens]):
            is_there = "gathered already" if row.opens == "gathered" else "gathered, or on their way"
            self._refuse(action, f"while its weights are {is_there}")
        if row.closes == "gathered" and unit not in gathered:
            self._refuse(action, "while its weights are not gathered")
        if row.closes == "brought" and unit not in brought and isinstance(facts, UnitFacts) and facts.brings:
            needed = action._replace(kind=Kind.LOAD_WEIGHT)
            self._refuse(action, f"without {needed} before it, which brings the shard that it sends")
        if row.closes:
            self._open[row.closes].discard(unit)
        if row.opens:
            self._open[row.opens].add(unit)

    # The end ---------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Check that nothing is missing."""
        self._end_pass()
        for unit in self._open["gathered"]:
            self._refuse(f"Unit {unit}", "gathered to the end: its last RESHARD is missing")
        stages = self._ranks.unit_stages
        walked = [unit for unit, at in enumerate(stages) if self._stage in (None, at)]
        for unit in walked:
            if not self._units[unit].has_rows:
                self._complete_passes(unit)
        for kind in self._kinds.values():
            for use in kind.row.uses:
                if kind.row.of == "rank":
                    self._complete_once(Action(kind), use, self._rank)
                    continue
                for unit in walked:
                    facts = self._units[unit]
                    if kind.row.of == "any unit" or facts.has_rows == (kind.row.of == "tables"):
                        self._complete_unit(kind, unit, use, facts)

    def _complete_once(self, action: Action, use: Use, facts: UnitFacts | RankFacts) -> None:
        needed = use.times(facts) is Times.STEP and (self._trains or use.phase == "pass")
        if needed and not self._counts[use.phase, action]:
            self._refuse(f"no {action}", use.missing)

    def _complete_unit(self, kind: Kind, unit: int, use: Use, facts: UnitFacts) -> None:
        times = use.times(facts)
        of = [self._counts[use.phase, Action(kind, unit, i)] for i in range(self._microbatches)]
        if times is Times.STEP:
            self._complete_once(Action(kind, unit), use, facts)
        elif times in (Times.MICROBATCH, Times.LAST) and kind.row.of == "tables":
            for i, found in enumerate(of):
                if found != 1:
                    self._refuse(f"{found} {kind.name}", f"of Unit {unit} in microbatch {i}; expected one")
        elif times in (Times.MICROBATCH, Times.LAST):
            done = [i for i, found in enumerate(of) for _ in range(found)]
            wanted = list(range(self._microbatches))[0 if times is Times.MICROBATCH else -1 :]
            if done != wanted:
                self._refuse(
                    f"{kind.name} of Unit {unit}",
                    f"in microbatches {done}; its gradient's placement asks for {wanted}",
                )
        elif times is Times.PASS and self._trains:
            for i, found in enumerate(of):
                needs = self._backward(unit, i)
                backward = self._counts["pass", Action(needs, unit, i)]
                if found != backward:
                    self._refuse(
                        f"{found} {kind.name} and {backward} {needs.name}",
                        f"of Unit {unit} in microbatch {i}; expected as many of each",
                    )

    def _complete_passes(self, unit: int) -> None:
        for i in range(self._microbatches):
            kind = self._backward(unit, i)
            forward, backward, weights = (
                self._counts["pass", Action(each, unit, i)] for each in (Kind.F, kind, Kind.W)
            )
            if not forward or backward != forward * self._trains:
                self._refuse(
                    f"{forward} F and {backward} {kind.name}",
                    f"of Unit {unit} in microbatch {i}; expected {'as many of each' if self._trains else 'F alone'}",
                )
            wanted = int(kind is Kind.I and unit in self._ranks.later_units)
            if weights != wanted:
                self._refuse(f"{weights} W", f"of Unit {unit} in microbatch {i}; expected {wanted}")
