"""Proof of a Plan: the conditions that its lists must fulfil before they may run.

    schedule     passes and messages of all stages                                     (validate_schedule.py)
    registry     buffers, buckets and Units agree with the registered tensors          (validate_registry.py)
    Units        F and B of a Unit only while its weights are gathered, and inside a pass of its own stage; what was
                 brought is gathered in that pass, what was gathered is released; one REDUCE per step, or per
                 microbatch if the gradient is kept cut
    tables       one FETCH of each collection per microbatch, inside its forward pass; one DELIVER after all passes
    end          SUM if ranks hold addends of one gradient, then NORM once, then one STEP of each Unit that trains,
                 tables among them, and the gather of weights that are whole but were updated in pieces; if updates
                 need whole tensors, DIRECT of their Units before the first STEP, then TRUST and DEAL if needed;
                 if state lies on a disk, LOAD of the Unit before its STEP and STORE after it; if updates take effect
                 one step late, ADOPT of each Unit, and its gather, before the first STEP

Cost: one look at each Action and at each tensor.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.base.errors import PlanError
from shardwise.plan.action import DEAL, NORM, SUM, TRUST, Action, Kind
from shardwise.plan.mesh import DENSE
from shardwise.plan.placement import FLAT, Shard
from shardwise.plan.plan import Plan, RankClass
from shardwise.plan.registry import Kind as RegisteredKind
from shardwise.plan.registry import Registry
from shardwise.plan.slices import Slices
from shardwise.plan.validate_registry import validate_registered
from shardwise.plan.validate_schedule import validate_schedule


def validate_plan(plan: Plan, microbatches: int) -> None:
    """Check that the lists of ``plan`` are one optimizer step and that its parts fit together.

    Args:
        plan: The Plan.
        microbatches: Microbatches of the step.

    Raises:
        PlanError: if not; the message names ranks and Action or tensor.
    """
    lists = {place: list(each.actions) for place, each in enumerate(plan.classes.values())}
    validate_schedule(lists, plan.mesh.pp, microbatches)
    slices = Slices(plan.registry, plan.mesh, 0)
    validate_registered(plan, slices)
    for name, each in plan.classes.items():
        _RankList(name, each, microbatches, slices).check()


class _Rules(NamedTuple):
    """Conditions that the placements of a Unit's tensors set for its Actions."""

    trains: bool
    moves: bool
    """The Unit's weights are cut or have windows: gathered before use, released after use."""
    reduces_each: bool
    """The Unit's gradients are cut between microbatches, or lie on another tier."""
    returns: bool
    """The Unit's weights are whole, but updated in pieces: gathered after STEP."""
    directs: bool = False
    """The Unit's updates need whole tensors: a DIRECT before STEP."""
    brings: bool = False
    """The Unit's shard comes from another tier before it is gathered; a BRING may start this."""
    adopts: bool = False
    """The Unit's updates take effect one step late: an ADOPT before STEP."""
    loads: bool = False
    """The Unit's masters and moments lie on a disk: a LOAD before STEP, a STORE after it."""


def _rules(ranks: RankClass, registry: Registry) -> list[_Rules]:
    found: list[_Rules] = []
    names = [
        [(slot.name, bucket.key.trained) for bucket in unit.buckets for slot in bucket.slots]
        for unit in ranks.units
    ]
    # A root that holds no parameter is gathered if the dense Units are.
    dense = [held for unit, held in zip(ranks.units, names, strict=True) if unit.axes == DENSE and held]
    any_moves = any(_is_cut(registry, "parameter", name) for held in dense or names for name, _ in held)
    for unit, held in zip(ranks.units, names, strict=True):
        if unit.has_rows:
            found.append(_Rules(trains=True, moves=False, reduces_each=False, returns=False))
            continue
        trained = [name for name, trains in held if trains]
        moves = any(_is_cut(registry, "parameter", name) for name, _ in held) if held else any_moves
        rows = [row for place in range(len(unit.buckets)) for row in ranks.buffers[unit.index, place]]
        is_away = any(row.kind == "weight" and row.tier != "device" for row in rows)
        brings = moves and is_away
        moves |= ranks.windows or is_away
        reduces_each = any(_is_cut(registry, "gradient", name) for name in trained)
        is_alone = all(registry.mesh.size(axis) == 1 for axis in unit.axes)
        reduces_each |= is_alone and any(row.kind == "grad" and row.tier != "device" for row in rows)
        returns = not moves and any(_is_cut(registry, "master", name) for name in trained)
        directs = bool(registry.needs_of(unit) - {"elements"})
        loads = bool(trained) and any(row.tier == "disk" for row in rows)
        adopts = any(row.kind == "next weight" for row in rows)
        found.append(_Rules(bool(trained), moves, reduces_each, returns, directs, brings, adopts, loads))
    return found


def _is_cut(registry: Registry, kind: RegisteredKind, name: str) -> bool:
    """Return whether a rank keeps only a range of the tensor's elements."""
    placed = registry.get(kind, name).placement.values()
    return any(isinstance(where, Shard) and where.dim == FLAT for where in placed)


_INSIDE = {Kind.F: (Kind.F,), Kind.FETCH: (Kind.F,)} | {
    kind: (Kind.B,) for kind in (Kind.B, Kind.RECALL, Kind.REDUCE)
}
"""Passes of a stage in which an Action may stand, for Kinds that may not stand in both."""


class _Updates:
    """Checks of the Actions after NORM.

    ``ended`` is the caller's list of DELIVER, SUM, NORM and the other Actions that end the step, which grows meanwhile.
    """

    def __init__(
        self,
        rules: Sequence[_Rules],
        ranks: RankClass,
        registry: Registry,
        ended: list[Action],
        refuse: Callable[[Action | str, str], None],
    ):
        self._rules = rules
        self._ended = ended
        self._refuse = refuse
        self.between: list[Action] = [TRUST] * bool(registry.needs("norm"))
        """Actions that stand between DIRECT and STEP."""
        if any("matrix" in registry.needs_of(unit) for unit in ranks.units):
            self.between.append(DEAL)
        self._directed: set[int] = set()
        self.stepped: set[int] = set()
        self.returned: set[int] = set()
        self._moved: set[Action] = set()
        """LOAD, STORE and ADOPT so far."""

    def of_unit(self, action: Action, rules: _Rules) -> None:
        """Check a DIRECT, ADOPT, LOAD, STEP, STORE, or the UNSHARD behind STEP or ADOPT."""
        if action.kind is Kind.UNSHARD:
            self._return(action, rules)
            return
        if NORM not in self._ended:
            self._refuse(action, "before NORM, which decides by what the gradient is scaled")
        if action.kind is Kind.DIRECT:
            self._direct(action, rules)
        elif action.kind is Kind.ADOPT:
            self._adopt(action, rules)
        elif action.kind in (Kind.LOAD, Kind.STORE):
            self._move(action, rules)
        else:
            self._step(action, rules)

    def look(self, action: Action) -> None:
        """Check a TRUST or DEAL."""
        if action not in self.between:
            self._refuse(action, "though no update here needs it (registry: needs)")
        for unit, rules in enumerate(self._rules):
            if rules.directs and unit not in self._directed:
                self._refuse(action, f"before {Action(Kind.DIRECT, unit)}, whose directions it looks at")

    def complete(self) -> None:
        """Check that no Action is missing between the halves of updates."""
        for action in self.between:
            if action not in self._ended:
                self._refuse(f"no {action}", "though updates need it (registry: needs)")
        for unit, rules in enumerate(self._rules):
            if rules.loads and Action(Kind.STORE, unit) not in self._moved:
                self._refuse(f"no STORE(u{unit})", "though its updated state belongs on a disk")

    def _adopt(self, action: Action, rules: _Rules) -> None:
        if not rules.adopts:
            self._refuse(action, "of a Unit whose updates count at once")
        if action in self._moved:
            self._refuse(action, "twice; expected once per step")
        if self.stepped:
            self._refuse(action, f"after STEP(u{min(self.stepped)}), which a skipped step leaves out")
        self._moved.add(action)

    def _move(self, action: Action, rules: _Rules) -> None:
        if not rules.loads:
            self._refuse(action, "of a Unit whose state stays in memory")
        if action in self._moved:
            self._refuse(action, "twice; expected once per step")
        if (action.unit in self.stepped) != (action.kind is Kind.STORE):
            where = "before" if action.kind is Kind.STORE else "after"
            self._refuse(action, f"{where} STEP(u{action.unit}), which updates what it moves")
        self._moved.add(action)

    def _direct(self, action: Action, rules: _Rules) -> None:
        if not rules.directs:
            self._refuse(action, "of a Unit whose updates look at each element alone")
        if action.unit in self._directed:
            self._refuse(action, "twice; expected once per step")
        self._directed.add(action.unit)

    def _step(self, action: Action, rules: _Rules) -> None:
        if not rules.trains:
            self._refuse(action, "of a Unit in which nothing trains")
        if rules.loads and Action(Kind.LOAD, action.unit) not in self._moved:
            self._refuse(action, f"before LOAD(u{action.unit}), which brings what it updates")
        if rules.adopts and Action(Kind.ADOPT, action.unit) not in self._moved:
            self._refuse(action, f"before ADOPT(u{action.unit}), which takes what it writes over")
        missing = [each for each in self.between if each not in self._ended] if rules.directs else []
        if missing:
            self._refuse(action, f"before {missing[0]}, which tells what its update needs of whole tensors")
        if action.unit in self.stepped:
            self._refuse(action, "twice; expected once per step")
        self.stepped.add(action.unit)

    def _return(self, action: Action, rules: _Rules) -> None:
        if not rules.returns:
            self._refuse(action, "at the end of the step, where nothing is to be gathered")
        if rules.adopts and (Action(Kind.ADOPT, action.unit) not in self._moved or self.stepped):
            self._refuse(
                action, f"not between ADOPT(u{action.unit}), which changes what is gathered, and STEP"
            )
        if not rules.adopts and action.unit not in self.stepped:
            self._refuse(action, f"before STEP(u{action.unit}), which changes what is gathered")
        if action.unit in self.returned:
            self._refuse(action, "twice after its STEP")
        self.returned.add(action.unit)


class _RankList:
    """Check of the list of one class of ranks, Action by Action."""

    def __init__(self, name: str, ranks: RankClass, microbatches: int, slices: Slices):
        self._name = name
        self._ranks = ranks
        self._microbatches = microbatches
        self._sums = slices.shares_gradients(ranks.stages)
        self._rules = _rules(ranks, slices.registry)
        self._roots = {
            stage: ranks.units_of(stage)[0].index for stage in ranks.stages if ranks.units_of(stage)
        }
        self._pass: Action | None = None
        self._is_sent = False
        """True if the result of the running pass has been sent."""
        self._is_opened = False
        """True if the root of the pass's stage has begun, which encloses all other Units."""
        self._gathered: set[int] = set()
        self._brought: set[int] = set()
        """Units whose BRING has run and whose gather has not."""
        self._counts: Counter[Action] = Counter()
        """F, B, REDUCE and FETCH of Units so far."""
        self._ended: list[Action] = []
        """DELIVER, SUM, NORM, TRUST and DEAL so far."""
        self._updates = _Updates(self._rules, ranks, slices.registry, self._ended, self._refuse)

    def check(self) -> None:
        """Check the list.

        Raises:
            PlanError: at the first Action that is missing or wrong.
        """
        for action in self._ranks.actions:
            if action.kind in (Kind.SUM, Kind.NORM):
                self._end(action)
            elif action in (TRUST, DEAL):
                self._updates.look(action)
                self._end(action)
            elif action.unit >= 0:
                self._of_unit(action)
            elif self._ended:
                self._refuse(action, f"after {self._ended[-1]}")
            elif action.kind.computes:
                self._end_pass()
                self._pass, self._is_sent, self._is_opened = action, False, False
            elif self._pass is not None and action.kind is Kind.SEND:
                self._is_sent |= action[2:4] == self._pass[2:4]
        self._complete()

    def _refuse(self, action: Action | str, why: str) -> None:
        raise PlanError(f"plan: {self._name} ranks have {action} {why}")

    def _end_pass(self) -> None:
        for unit in self._brought:
            self._refuse(f"BRING(u{unit})", f"without UNSHARD(u{unit}) behind it in its pass, which sends it")

    def _end(self, action: Action) -> None:
        if any(done[:2] == action[:2] for done in self._ended):
            self._refuse(action, "twice; expected once per step")
        if action.kind is Kind.DELIVER and self._ended and self._ended[-1].kind is not Kind.DELIVER:
            self._refuse(action, f"after {self._ended[-1]}, which would leave out its gradients")
        if action.kind is Kind.SUM and not self._sums:
            self._refuse(action, "though they hold no gradient that other ranks of the model add to")
        if action.kind is Kind.SUM and self._is_normed:
            self._refuse(action, "after NORM, which would leave out what is summed")
        if action.kind is Kind.NORM and self._sums and SUM not in self._ended:
            self._refuse(
                action,
                "without SUM before it, but hold addends of gradients (registry: Partial, tied or copied)",
            )
        if self._updates.stepped:
            self._refuse(action, f"after STEP(u{min(self._updates.stepped)})")
        self._ended.append(action)

    @property
    def _is_normed(self) -> bool:
        return NORM in self._ended

    def _of_unit(self, action: Action) -> None:
        kind, unit, microbatch, _, _ = action
        if unit >= len(self._rules):
            self._refuse(action, f"but {len(self._rules)} Units")
        rules = self._rules[unit]
        if kind is Kind.ASK:
            self._refuse(action, "in the list of a step; it goes ahead of the step, in a list of its own")
        if kind.updates or (kind is Kind.UNSHARD and self._ended):
            self._updates.of_unit(action, rules)
            return
        has_rows = self._ranks.units[unit].has_rows
        if has_rows != (kind in (Kind.FETCH, Kind.DELIVER)):
            self._refuse(action, f"of a Unit of {'embedding tables' if has_rows else 'parameters'}")
        if kind is Kind.DELIVER:
            self._end(action)
            return
        if self._ended:
            self._refuse(action, f"after {self._ended[-1]}")
        self._in_its_pass(action)
        if kind in (Kind.F, Kind.B, Kind.FETCH):
            root = self._roots[self._ranks.unit_stages[unit]]
            if self._is_sent:
                self._refuse(action, f"after the result of {self._pass} was sent")
            if unit != root and not self._is_opened:
                around = Action(Kind.B if kind is Kind.B else Kind.F, root, microbatch)
                self._refuse(action, f"before {around}, inside of which it runs")
        if kind in (Kind.F, Kind.B):
            self._is_opened = True
            for needed in (unit, root):
                if self._rules[needed].moves and needed not in self._gathered:
                    whose = (
                        "its weights are" if needed == unit else f"the weights of its root, Unit {root}, are"
                    )
                    self._refuse(action, f"while {whose} not gathered")
            if kind is Kind.B and self._counts[Action(Kind.REDUCE, unit, microbatch)]:
                self._refuse(action, "after the REDUCE that its gradient belongs to")
        elif kind is Kind.BRING:
            if not rules.brings:
                self._refuse(action, "of a Unit whose shard lies on the device, or that is whole")
            is_here = unit in self._brought or unit in self._gathered
            self._changes(action, rules, is_here, "while its weights are gathered, or on their way")
            self._brought.add(unit)
        elif kind is Kind.UNSHARD:
            self._changes(action, rules, unit in self._gathered, "while its weights are gathered already")
            self._gathered.add(unit)
            self._brought.discard(unit)
        elif kind is Kind.RESHARD:
            self._changes(action, rules, unit not in self._gathered, "while its weights are not gathered")
            self._gathered.discard(unit)
        elif kind is Kind.RECALL:
            recalled, opened, saved = (
                self._counts[Action(each, unit, microbatch)] for each in (kind, Kind.B, Kind.F)
            )
            if opened == saved:
                self._refuse(action, f"behind {Action(Kind.B, unit, microbatch)}, which needs it")
            if recalled == saved:  # a Unit that runs twice in a row has both ahead of its first B
                self._refuse(action, f"more often than {Action(Kind.F, unit, microbatch)}, which saves it")
        elif kind is Kind.REDUCE:
            if not rules.trains:
                self._refuse(action, "of a Unit in which nothing trains")
            if not self._counts[Action(Kind.B, unit, microbatch)]:
                self._refuse(action, f"before {Action(Kind.B, unit, microbatch)}")
        self._counts[Action(kind, unit, microbatch)] += 1

    def _changes(self, action: Action, rules: _Rules, is_so: bool, why: str) -> None:
        if not rules.moves:
            self._refuse(action, "of a Unit whose weights every rank keeps whole")
        if is_so:
            self._refuse(action, why)

    def _in_its_pass(self, action: Action) -> None:
        """Check that ``action`` stands inside a pass of its stage and microbatch.

        Gathers and releases for a whole step name no microbatch.
        """
        stage = self._ranks.unit_stages[action.unit]
        if action.microbatch < 0 and action.kind is Kind.UNSHARD:
            return
        around = self._pass
        wanted = _INSIDE.get(action.kind, (Kind.F, Kind.B))
        if around is None or (around.stage, around.microbatch) != (stage, action.microbatch):
            self._refuse(action, f"outside a pass of stage {stage} with microbatch {action.microbatch}")
        elif around.kind not in wanted:
            self._refuse(action, f"inside {around}; expected inside {' or '.join(k.value for k in wanted)}")

    @property
    def _recalled(self) -> set[int]:
        """Units whose forward saves tensors on another tier."""
        return {action.unit for action in self._counts if action.kind is Kind.RECALL}

    def _complete(self) -> None:
        self._end_pass()
        if not self._is_normed:
            self._refuse("no NORM", "; expected one after the last REDUCE")
        self._updates.complete()
        for unit, rules in enumerate(self._rules):
            if unit in self._gathered:
                self._refuse(f"Unit {unit}", "gathered to the end: its last RESHARD is missing")
            if self._ranks.units[unit].has_rows:
                self._complete_table(unit)
            else:
                self._complete_unit(unit, rules)

    def _complete_table(self, unit: int) -> None:
        for i in range(self._microbatches):
            fetched = self._counts[Action(Kind.FETCH, unit, i)]
            if fetched != 1:
                self._refuse(f"{fetched} FETCH", f"of Unit {unit} in microbatch {i}; expected one")
        delivered = Action(Kind.DELIVER, unit)
        if delivered not in self._ended:
            self._refuse(f"no {delivered}", "though the Unit's rows get gradients")
        if unit not in self._updates.stepped:
            self._refuse(f"no STEP(u{unit})", "though the Unit trains")

    def _complete_unit(self, unit: int, rules: _Rules) -> None:
        of = self._counts
        for i in range(self._microbatches):
            forward, backward = of[Action(Kind.F, unit, i)], of[Action(Kind.B, unit, i)]
            if not forward or forward != backward:
                self._refuse(
                    f"{forward} F and {backward} B",
                    f"of Unit {unit} in microbatch {i}; expected as many of each",
                )
            recalled = of[Action(Kind.RECALL, unit, i)]
            if recalled != backward and unit in self._recalled:
                self._refuse(
                    f"{recalled} RECALL and {backward} B",
                    f"of Unit {unit} in microbatch {i}; expected as many of each",
                )
        if not rules.trains:
            return
        reduced = [i for i in range(self._microbatches) for _ in range(of[Action(Kind.REDUCE, unit, i)])]
        wanted = list(range(self._microbatches)) if rules.reduces_each else [self._microbatches - 1]
        if reduced != wanted:
            self._refuse(
                f"REDUCE of Unit {unit}",
                f"in microbatches {reduced}; its gradient's placement asks for {wanted}",
            )
        if unit not in self._updates.stepped:
            self._refuse(f"no STEP(u{unit})", "though the Unit trains")
        if rules.returns and unit not in self._updates.returned:
            self._refuse(
                f"STEP(u{unit})", f"without UNSHARD(u{unit}) after it: others would keep the old weights"
            )
