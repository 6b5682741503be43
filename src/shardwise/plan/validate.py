"""Proof of a Plan: what must hold before its lists may run.

    passes       every microbatch once per stage, on the stage's rank: F, and B or I and W
    dataflow     F after its activation arrived, B after its F and after its gradient arrived, W after its I
    messages     every result goes to the next stage; two ranks send and receive in one order
    progress     no deadlock where a SEND blocks until it is received
    Units        F and B of a Unit only while its weights are gathered, and inside a pass of its own stage; what was
                 gathered is released; one REDUCE per step, or per microbatch where the gradient is kept cut
    tables       one FETCH of each collection per microbatch, inside its forward pass; one DELIVER after all passes
    end          SUM where ranks hold addends of one gradient, then NORM once, then one STEP of each Unit that trains,
                 tables among them, and the gather of weights that are whole but were updated in pieces; where updates
                 look at whole tensors, DIRECT of their Units before the first STEP, then TRUST and DEAL as these need
    registry     buffers lie as their tensors are registered, every tensor in one bucket of each stage that holds it,
                 every table in one Unit of its stage, and every gradient that ranks add to is summed

Cost: one look at each Action and at each tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from shardwise.plan.action import DEAL, NORM, RECV, SEND, SUM, TRUST, Action, B, F, Kind
from shardwise.plan.dataflow import stages_of
from shardwise.plan.errors import PlanError
from shardwise.plan.lists import is_inside
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import FLAT, Partial, Shard
from shardwise.plan.plan import Buffers, Plan, RankClass
from shardwise.plan.registry import Kind as RegisteredKind
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.slices import Slices
from shardwise.plan.unit import Bucket, Slot

_Lists = Mapping[int, Sequence[Action]]


def validate_plan(plan: Plan, microbatches: int) -> None:
    """Raise PlanError, naming ranks and Action or tensor, where the lists of ``plan`` are not one optimizer step of
    ``microbatches``, or its parts do not fit together."""
    lists = {place: list(each.actions) for place, each in enumerate(plan.classes.values())}
    validate(lists, plan.mesh.pp, microbatches)
    slices = Slices(plan.registry, plan.mesh, 0)
    for name, each in plan.classes.items():
        _registered(name, each, plan, slices)
        _RankList(name, each, microbatches, slices).check()
    _everywhere(plan)


def validate(lists: _Lists, ranks: int, microbatches: int | None = None, forward_only: bool = False) -> None:
    """Raise PlanError, naming rank and Action, where the passes and messages of ``lists`` would hang or compute
    something else than one step.

    ``microbatches``: how many there must be (default: as many as stage 0 runs).
    """
    stages = stages_of(lists)
    _every_rank_has_its_stages(lists, ranks, stages)
    if microbatches is None:
        microbatches = sum(
            action.kind is Kind.F and action.unit < 0 for action in lists[0] if action.stage == 0
        )
    for rank, row in lists.items():
        _passes_once(rank, row, range(rank, stages, ranks), microbatches, forward_only)
        _in_order(rank, row, ranks, stages)
    _channels(lists, ranks)
    _progress(lists, ranks)


# Passes and messages -----------------------------------------------------------------------------------------------


def _every_rank_has_its_stages(lists: _Lists, ranks: int, stages: int) -> None:
    if set(lists) != set(range(ranks)):
        raise PlanError(
            f"schedule: lists for ranks {sorted(lists)}; expected one for each of 0 to {ranks - 1}"
        )
    if stages == 0 or stages % ranks:
        raise PlanError(
            f"schedule: {stages} stages on {ranks} ranks; expected as many on each: "
            f"{max(1, -(-stages // ranks)) * ranks}"
        )
    for rank, row in lists.items():
        for action in row:
            if action.stage >= 0 and action.stage % ranks != rank:
                raise PlanError(
                    f"schedule: rank {rank} has {action}, but stage {action.stage} lives on rank {action.stage % ranks}"
                )
            if action.other >= 0 and action.other % ranks == rank:
                raise PlanError(
                    f"schedule: {action} on rank {rank} is a message of the rank to itself; leave it out"
                )


def _passes_once(
    rank: int, row: Sequence[Action], own: Sequence[int], microbatches: int, forward_only: bool
) -> None:
    counts = Counter(action for action in row if action.kind.computes and action.unit < 0)
    for action, times in counts.items():
        if times > 1:
            raise PlanError(f"schedule: rank {rank} runs {action} {times} times; expected once")
        if not 0 <= action.microbatch < microbatches:
            raise PlanError(f"schedule: rank {rank} runs {action}; microbatches are 0 to {microbatches - 1}")
    for stage in own:
        for i in range(microbatches):
            has = {kind for kind in Kind if kind.computes and Action(kind, -1, i, stage) in counts}
            wanted = [{Kind.F}] if forward_only else [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]
            if has not in wanted:
                found = ", ".join(sorted(kind.value for kind in has)) or "nothing"
                expected = " or ".join(" ".join(sorted(kind.value for kind in kinds)) for kinds in wanted)
                raise PlanError(
                    f"schedule: rank {rank}, stage {stage}, microbatch {i} has {found}; expected {expected}"
                )


def _in_order(rank: int, row: Sequence[Action], ranks: int, stages: int) -> None:
    """A pass and a SEND come after what they take; every result for another rank is sent."""
    done: set[Action] = set()
    for action in row:
        for needed in _before(action, ranks, stages):
            halves = {needed, needed._replace(kind=Kind.I)} if needed.kind is Kind.B else {needed}
            if not halves & done:
                raise PlanError(f"schedule: rank {rank} has {action} without {needed} before it")
        if action.kind in (Kind.SEND, Kind.RECV) and action in done:
            raise PlanError(f"schedule: rank {rank} has {action} twice")
        if action.unit < 0:
            done.add(action)
    for action in list(done):
        if action.kind in (Kind.F, Kind.B, Kind.I):
            target = action.stage + (1 if action.kind is Kind.F else -1)
            sent = SEND(action.stage, action.microbatch, target)
            if 0 <= target < stages and target % ranks != rank and sent not in done:
                raise PlanError(f"schedule: rank {rank} has {action} without {sent} after it")


def _before(action: Action, ranks: int, stages: int) -> Iterator[Action]:
    """What stands before ``action`` in the list of the same rank; a B may be its I."""
    kind, unit, i, stage, other = action
    if unit >= 0:
        return
    if kind is Kind.SEND:
        yield B(stage, i) if action.carries_gradient else F(stage, i)
    elif kind is Kind.W:
        yield Action(Kind.I, -1, i, stage)
    elif kind is Kind.F and stage > 0:
        yield F(stage - 1, i) if ranks == 1 else RECV(stage, i, stage - 1)
    elif kind is Kind.B or kind is Kind.I:
        yield F(stage, i)
        if stage < stages - 1:
            yield B(stage + 1, i) if ranks == 1 else RECV(stage, i, stage + 1)


def _channels(lists: _Lists, ranks: int) -> None:
    """Between two ranks messages are received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in lists.items():
        for action in row:
            if action.kind is Kind.SEND:
                sent.setdefault((rank, action.other % ranks), []).append(action)
            elif action.kind is Kind.RECV:
                received.setdefault((action.other % ranks, rank), []).append(action)
    for source, target in sorted({*sent, *received}):
        pairs = zip_longest(sent.get((source, target), ()), received.get((source, target), ()))
        for number, (send, receive) in enumerate(pairs):
            if send is None or receive is None or send != _other_end(receive):
                raise PlanError(
                    f"schedule: message {number} from rank {source} to rank {target} is {send or 'nothing'} at its "
                    f"sender and {receive or 'nothing'} at its receiver; a channel keeps its order, so both lists must "
                    "have the same"
                )


def _other_end(action: Action) -> Action:
    kind = Kind.SEND if action.kind is Kind.RECV else Kind.RECV
    return Action(kind, -1, action.microbatch, action.other, action.stage)


def _progress(lists: _Lists, ranks: int) -> None:
    """Run the messages alone; a SEND and its RECV take place together, when both ranks stand before them."""
    rows = {rank: [a for a in row if a.kind in (Kind.SEND, Kind.RECV)] for rank, row in lists.items()}
    position = dict.fromkeys(rows, 0)
    free = list(rows)
    while free:
        rank = free.pop()
        while position[rank] < len(rows[rank]):
            action = rows[rank][position[rank]]
            peer = action.other % ranks
            if position[peer] == len(rows[peer]) or rows[peer][position[peer]] != _other_end(action):
                break
            position[rank] += 1
            position[peer] += 1
            free.append(peer)
    stuck = {rank: row[position[rank]] for rank, row in rows.items() if position[rank] < len(row)}
    if stuck:
        stands = "; ".join(f"rank {rank} before {action}" for rank, action in stuck.items())
        raise PlanError(
            f"schedule: deadlock where a SEND blocks until it is received: {stands}. A rank of the ring must "
            "receive before it sends"
        )


# Units -------------------------------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """What the placements of a Unit's tensors ask of its Actions."""

    trains: bool
    moves: bool
    """Its weights are cut or have windows all the same: gathered before use, released after."""
    reduces_each: bool
    """Its gradients are cut between microbatches."""
    returns: bool
    """Its weights are whole, but updated in pieces: gathered after STEP."""
    directs: bool = False
    """Its updates look at whole tensors: a DIRECT before STEP."""


def _rules(ranks: RankClass, registry: Registry) -> list[_Rules]:
    found: list[_Rules] = []
    names = [
        [(slot.name, bucket.key.trained) for bucket in unit.buckets for slot in bucket.slots]
        for unit in ranks.units
    ]
    any_moves = any(_is_cut(registry, "parameter", name) for held in names for name, _ in held)
    for unit, held in zip(ranks.units, names, strict=True):
        if unit.has_rows:
            found.append(_Rules(trains=True, moves=False, reduces_each=False, returns=False))
            continue
        trained = [name for name, trains in held if trains]
        moves = any(_is_cut(registry, "parameter", name) for name, _ in held) if held else any_moves
        moves |= ranks.windows
        cuts_gradient = any(_is_cut(registry, "gradient", name) for name in trained)
        returns = not moves and any(_is_cut(registry, "master", name) for name in trained)
        directs = bool(registry.needs_of(unit) - {"elements"})
        found.append(_Rules(bool(trained), moves, cuts_gradient, returns, directs))
    return found


def _is_cut(registry: Registry, kind: RegisteredKind, name: str) -> bool:
    """Whether a rank keeps a range of the tensor's elements alone."""
    placed = registry.get(kind, name).placement.values()
    return any(isinstance(where, Shard) and where.dim == FLAT for where in placed)


_INSIDE = {Kind.F: (Kind.F,), Kind.FETCH: (Kind.F,), Kind.B: (Kind.B,), Kind.REDUCE: (Kind.B,)}
"""In which passes of a stage an Action may stand, where not in both."""


class _Updates:
    """What comes after NORM. ``ended``: DELIVER, SUM, NORM and what else ends the step, so far."""

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
        """What stands between DIRECT and STEP."""
        if any("matrix" in registry.needs_of(unit) for unit in ranks.units):
            self.between.append(DEAL)
        self._directed: set[int] = set()
        self.stepped: set[int] = set()
        self.returned: set[int] = set()

    def of_unit(self, action: Action, rules: _Rules) -> None:
        """DIRECT, STEP, or the UNSHARD behind it."""
        if action.kind is Kind.UNSHARD:
            self._return(action, rules)
            return
        if NORM not in self._ended:
            self._refuse(action, "before NORM, which decides by what the gradient is scaled")
        if action.kind is Kind.DIRECT:
            self._direct(action, rules)
        else:
            self._step(action, rules)

    def look(self, action: Action) -> None:
        """TRUST or DEAL."""
        if action not in self.between:
            self._refuse(action, "though no update here needs it (registry: needs)")
        for unit, rules in enumerate(self._rules):
            if rules.directs and unit not in self._directed:
                self._refuse(action, f"before {Action(Kind.DIRECT, unit)}, whose directions it looks at")

    def complete(self) -> None:
        """Nothing is missing between the halves of updates."""
        for action in self.between:
            if action not in self._ended:
                self._refuse(f"no {action}", "though updates need it (registry: needs)")

    def _direct(self, action: Action, rules: _Rules) -> None:
        if not rules.directs:
            self._refuse(action, "of a Unit whose updates look at each element alone")
        if action.unit in self._directed:
            self._refuse(action, "twice; expected once per step")
        self._directed.add(action.unit)

    def _step(self, action: Action, rules: _Rules) -> None:
        if not rules.trains:
            self._refuse(action, "of a Unit in which nothing trains")
        missing = [each for each in self.between if each not in self._ended] if rules.directs else []
        if missing:
            self._refuse(action, f"before {missing[0]}, which tells what its update needs of whole tensors")
        if action.unit in self.stepped:
            self._refuse(action, "twice; expected once per step")
        self.stepped.add(action.unit)

    def _return(self, action: Action, rules: _Rules) -> None:
        if not rules.returns:
            self._refuse(action, "at the end of the step, where nothing is to be gathered")
        if action.unit not in self.stepped:
            self._refuse(action, f"before STEP(u{action.unit}), which changes what is gathered")
        if action.unit in self.returned:
            self._refuse(action, "twice after its STEP")
        self.returned.add(action.unit)


class _RankList:
    """The list of one class of ranks, looked at Action by Action."""

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
        """Whether the result of the running pass has been sent."""
        self._is_opened = False
        """Whether the root of its stage has begun, which is around all other Units."""
        self._gathered: set[int] = set()
        self._counts: Counter[Action] = Counter()
        """F, B, REDUCE and FETCH of Units so far."""
        self._ended: list[Action] = []
        """DELIVER, SUM, NORM, TRUST and DEAL so far."""
        self._updates = _Updates(self._rules, ranks, slices.registry, self._ended, self._refuse)

    def check(self) -> None:
        """Errors: PlanError."""
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
                self._pass, self._is_sent, self._is_opened = action, False, False
            elif self._pass is not None and action.kind is Kind.SEND:
                self._is_sent |= action[2:4] == self._pass[2:4]
        self._complete()

    def _refuse(self, action: Action | str, why: str) -> None:
        raise PlanError(f"plan: {self._name} ranks have {action} {why}")

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
        if kind in (Kind.STEP, Kind.DIRECT) or (kind is Kind.UNSHARD and self._ended):
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
        elif kind is Kind.UNSHARD:
            self._changes(action, rules, unit in self._gathered, "while its weights are gathered already")
            self._gathered.add(unit)
        elif kind is Kind.RESHARD:
            self._changes(action, rules, unit not in self._gathered, "while its weights are not gathered")
            self._gathered.discard(unit)
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
        """Inside a pass of its stage and microbatch; gathers and releases for a whole step name no microbatch."""
        stage = self._ranks.unit_stages[action.unit]
        if action.microbatch < 0 and action.kind is Kind.UNSHARD:
            return
        around = self._pass
        wanted = _INSIDE.get(action.kind, (Kind.F, Kind.B))
        if around is None or (around.stage, around.microbatch) != (stage, action.microbatch):
            self._refuse(action, f"outside a pass of stage {stage} with microbatch {action.microbatch}")
        elif around.kind not in wanted:
            self._refuse(action, f"inside {around}; expected inside {' or '.join(k.value for k in wanted)}")

    def _complete(self) -> None:
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


# Registry ----------------------------------------------------------------------------------------------------------


def _registered(name: str, ranks: RankClass, plan: Plan, slices: Slices) -> None:
    """Buffers lie as the tensors in them are registered."""
    for unit, stage in zip(ranks.units, ranks.unit_stages, strict=True):
        for place, bucket in enumerate(unit.buckets):
            rows = ranks.buffers.get((unit.index, place), ())
            if bucket.shards != plan.mesh.dp_shard or not rows:
                raise PlanError(
                    f"plan: bucket {place} of Unit {unit.title} on {name} ranks is laid out for {bucket.shards} ranks "
                    f"in {len(rows)} buffers; the mesh has dp_shard {plan.mesh.dp_shard}"
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
    for row in rows:
        if row.kind in ("weight", "grad", "master"):
            kept = registry.get(_KIND_OF[row.kind], slot.name)
        else:
            kept = registry.get("moment", slot.name, row.kind)
        for axis, placement in row.placement.items():
            if kept.on(axis) != placement:
                raise PlanError(
                    f"{where}: its {row.kind} is registered {kept.on(axis)} on {axis}, but its buffer is {placement}"
                )
    if bucket.key.trained:
        _check_gradient(where, registry.get("gradient", slot.name), info, rows[0].placement, slices.mesh)


_KIND_OF: Mapping[str, RegisteredKind] = {"weight": "parameter", "grad": "gradient", "master": "master"}


def _check_gradient(
    where: str, gradient: TensorInfo, info: TensorInfo, data_axes: Iterable[str], mesh: Mesh
) -> None:
    """Every rank of a data-parallel axis brings an addend; on other axes gradients are cut as their weights are."""
    if gradient.grad_placement != info.grad_placement:
        raise PlanError(f"{where}: parameter and gradient are registered with different gradient placements")
    for axis in data_axes:
        if mesh.size(axis) > 1 and not isinstance(info.gradient_on(axis), Partial):
            raise PlanError(
                f"{where}: its gradient is registered {info.gradient_on(axis)} on {axis}, where each rank has samples "
                "of its own; expected P, an addend"
            )
    for axis in mesh.model_axes:
        if isinstance(info.on(axis), Shard) and info.gradient_on(axis) != info.on(axis):
            raise PlanError(
                f"{where}: it is cut {info.on(axis)} on {axis}, but its gradient is {info.gradient_on(axis)}"
            )
        if gradient.on(axis) != info.on(axis):
            raise PlanError(
                f"{where}: it lies {info.on(axis)} on {axis}, but its gradient's buffer {gradient.on(axis)}"
            )


def _everywhere(plan: Plan) -> None:
    """Every parameter is in one bucket of each stage that holds it, every table in one Unit of its stage."""
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
    """A table that no Unit has would be fetched, delivered and updated by nobody; a Unit without a table moves no row.

    Tables are registered when they have places, which a Plan is made before: one of no table says nothing of Units.
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
