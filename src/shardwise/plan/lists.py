"""The Actions of Units: the order in which a rank gathers, computes, releases, reduces and updates each Unit.

The moves are those of ``placement.py`` and follow from the placements of a Unit's buffers: weight S -> R before use is
UNSHARD; gradient P -> the master's placement is REDUCE; after STEP a weight that is R while its master is S is gathered
once.

A microbatch runs a list. In the forward pass Units open and close like brackets; the backward pass is the mirror image:

    forward    UNSHARD(u) F(u) ... RESHARD(u)
    backward   UNSHARD(u) B(u) ... RESHARD(u) REDUCE(u)
    in halves  UNSHARD(u) I(u) ... RESHARD(u)    and later    W(u) REDUCE(u)

so gathers come in the reverse order of closing and reductions in the reverse order of opening. The order is the same on
every rank, whatever order the gradients arrive in. Gathers go ahead of their use in this order, limited by bytes
(``PrefetchLimits``); if a shard lies on another tier, LOAD_WEIGHT(u) goes as far ahead of its gather. Tensors that a
Unit's forward saves on another tier leave the device while the next Unit computes: F(u1) F(u2) OFFLOAD(u1) F(u3)
OFFLOAD(u2). They are brought back one such Unit ahead of the Unit's backward: RELOAD(u2) B(u3) RELOAD(u1) B(u2) ...
B(u1). The sums of gradients travel beside the computation: ARRIVE(u) waits for the oldest as soon as more than a given
number are under way, and NORM waits for the rest. Vectors of embedding tables are fetched where the model calls the
tables: FETCH(t) behind some F(u). Their keys may go ahead of the step, in a list of their own: INPUT_DIST(t), and
READ(t) for tables that are larger than memory (``keys_ahead``).

[Note: gathers behind updates]
If STEP(u) runs beside the next forward pass, UNSHARD(u) waits for it. In front of F(u-1) the gather would delay F(u-1)
as well, and STEP(u) would have no computation to hide behind. So the first few such gathers of a step stay behind the F
in front of them; a little later, updates are done before their gathers go ahead:

    not held    STEP(1) STEP(2) | F(1)    F(2)            two updates are waited for
    held        STEP(1) | F(1)    | F(2)    F(3)          one is, and the gathers of Units 2 and 3
                        | STEP(2)   STEP(3)

A device computes F(u-1) while its host waits for STEP(u), and the gather still runs beside it; ranks that share memory
copy at the gather's use in any case. The computation waits for a held gather only if hosts compute themselves and
gather over a network (benchmarks/offload: 1 % of it), which is why only few gathers are held.

Cost: one look at each Action; for a gather, one look at each Action that it goes ahead of.
"""

from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from shardwise.plan.action import Action, Kind
from shardwise.plan.strategy import Strategy

_HELD = 4
"""Number of gathers that stay behind their updates, including the step's first.

With this number an update may take three quarters of its Unit's forward pass and more.
"""


class PrefetchLimits(NamedTuple):
    """Limits on how far gathers go ahead of their use: many small Units at once, or one large Unit."""

    limit_bytes: int = 0
    """Bytes of gathered weights that may wait while other Units compute; 0: none wait.

    The next Unit may exceed the limit if no other waits beside it.
    """
    unit_bytes: Sequence[int] = ()
    """Bytes of the whole weights, by Unit."""
    held: Collection[int] = ()
    """Units whose gathers move ahead of no computation. [Note: gathers behind updates]"""

    def has_room(self, waiting_bytes: int, unit: int) -> bool:
        """Return whether ``unit`` may wait beside ``waiting_bytes`` of other Units."""
        return not waiting_bytes or waiting_bytes + self.unit_bytes[unit] <= self.limit_bytes

    def behind_updates(
        self, boundaries: Sequence["UnitBoundary"], strategies: Sequence[Strategy], trained: Sequence[bool]
    ) -> "PrefetchLimits":
        """Return the prefetch of a step's first forward pass, with held gathers: [Note: gathers behind updates].

        Args:
            boundaries: Boundaries of the forward pass.
            strategies: Strategy of each Unit.
            trained: True for each Unit with a trained parameter.
        """
        entered = dict.fromkeys(boundary.unit for boundary in boundaries)
        beside = [unit for unit in entered if trained[unit] and strategies[unit].gathers_behind_update]
        return self._replace(held=beside[:_HELD])


NO_PREFETCH = PrefetchLimits()


class UnitBoundary(NamedTuple):
    """The point at which a forward pass enters or leaves a Unit."""

    enters: bool
    unit: int


def forward_actions(
    boundaries: Sequence[UnitBoundary],
    strategies: Sequence[Strategy],
    prefetch: PrefetchLimits = NO_PREFETCH,
    saves: bool = True,
    first: bool = True,
) -> list[Action]:
    """Return the Actions of the forward pass of one microbatch.

    What a Unit has saved on another tier leaves the device behind the next Unit that the pass enters and leaves, so
    that the copy has the time of that Unit. What the last such Unit of a pass has saved leaves in the next pass.

    Args:
        boundaries: Order in which the pass enters and leaves the Units.
        strategies: Strategy of each Unit.
        prefetch: How far gathers go ahead of their use.
        saves: False for a pass that saves nothing, because no backward pass follows.
        first: True for the stage's first forward pass of a step, before which nothing was saved.
    """
    offloaded = _offloads(boundaries, strategies, first) if saves else {}
    actions: list[Action] = []
    for i, ((enters, unit), is_outermost) in enumerate(zip(boundaries, _outermost(boundaries), strict=True)):
        moves = strategies[unit].has_windows and is_outermost
        if enters:
            actions += [Action(Kind.UNSHARD, unit)] * moves + [Action(Kind.F, unit)]
        elif moves:
            actions.append(Action(Kind.RESHARD, unit))
        actions += [Action(Kind.OFFLOAD, each) for each in offloaded.get(i, ())]
    return _moved_ahead(_without_pauses(actions), strategies, prefetch)


def _offloads(
    boundaries: Sequence[UnitBoundary], strategies: Sequence[Strategy], first: bool
) -> dict[int, list[int]]:
    """Return the Units whose saved tensors leave the device behind a boundary, by position of the boundary.

    Args:
        boundaries: Order in which a forward pass enters and leaves the Units.
        strategies: Strategy of each Unit.
        first: True if no pass of the step has come before; else the pass before was in the same order.
    """
    found: dict[int, list[int]] = {}
    waiting: list[tuple[int, int]] = []
    """Units that a pass has left, with the position behind which another must be entered."""
    for _ in range(1 if first else 2):
        waiting = [(-1, unit) for _, unit in waiting]
        entered: dict[int, int] = {}
        for i, (enters, unit) in enumerate(boundaries):
            if enters:
                entered[unit] = i
                continue
            found[i] = [each for place, each in waiting if entered[unit] > place]
            waiting = [(place, each) for place, each in waiting if entered[unit] <= place]
            if strategies[unit].saved_tier != "device":
                waiting.append((i, unit))
    return found


def backward_actions(
    boundaries: Sequence[UnitBoundary],
    strategies: Sequence[Strategy],
    trained: Sequence[bool],
    last: bool,
    prefetch: PrefetchLimits = NO_PREFETCH,
    under_way: int = 0,
    first: bool = True,
    later: Collection[int] | None = None,
) -> list[Action]:
    """Return the Actions of the backward pass of one microbatch: the mirror image of ``boundaries``.

    A Unit that ran twice opens twice, as in the forward pass, so that the memory is free for what ran in between. The
    Unit is reduced once, after its last window, when autograd delivers the sum of both gradients.

    Args:
        boundaries: Order in which the forward pass enters and leaves the Units.
        strategies: Strategy of each Unit.
        trained: True for each Unit with a trained parameter.
        last: True for the last microbatch: gradients that stay whole between microbatches are reduced now.
        prefetch: How far gathers go ahead of their use.
        under_way: Number of Units whose reductions may still run while the pass goes on.
        first: True for the first microbatch; later ones also wait for the last reductions of the pass before.
        later: None for a whole backward pass, B. For I, the Units whose gradients are complete behind W
            (``weight_actions``); the others are reduced here, and every reduction has arrived at the end of the pass.
    """
    mirror = [UnitBoundary(not boundary.enters, boundary.unit) for boundary in reversed(boundaries)]
    last_close = _last_closes(mirror)
    kind = Kind.B if later is None else Kind.I
    trained = [each and unit not in (later or ()) for unit, each in enumerate(trained)]
    recalled = _recalls(mirror, strategies)
    actions: list[Action] = []
    for i, ((enters, unit), is_outermost) in enumerate(zip(mirror, _outermost(mirror), strict=True)):
        moves = strategies[unit].has_windows and is_outermost
        if enters:
            actions += [Action(Kind.UNSHARD, unit)] * moves
            actions += [Action(Kind.RELOAD, each) for each in recalled.get(i, ())] + [Action(kind, unit)]
            continue
        actions += [Action(Kind.RESHARD, unit)] * moves
        if trained[unit] and (last or strategies[unit].reduces_each) and i == last_close[unit]:
            actions.append(Action(Kind.REDUCE, unit))
    before = [] if first or later is not None else [each.unit for each in actions if each.kind is Kind.REDUCE]
    before = [unit for unit in before if strategies[unit].reduces_each]
    travelling = deque(before[len(before) - min(under_way, len(before)) :])
    made = _moved_ahead(_without_pauses(actions), strategies, prefetch)
    return _with_arrivals(made, travelling, under_way, drains=later is not None)


def weight_actions(
    boundaries: Sequence[UnitBoundary],
    strategies: Sequence[Strategy],
    trained: Sequence[bool],
    last: bool,
    later: Set[int],
    under_way: int = 0,
) -> list[Action]:
    """Return the Actions of W of one microbatch: W(u) REDUCE(u) of each Unit, in the order of the backward pass.

    W reads no weight, so nothing is gathered.

    Args:
        boundaries: Order in which the forward pass enters and leaves the Units.
        strategies: Strategy of each Unit.
        trained: True for each Unit with a trained parameter.
        last: True for the last microbatch: gradients that stay whole between microbatches are reduced now.
        later: Units whose gradients are complete behind W.
        under_way: Number of Units whose reductions may still run while the pass goes on.
    """
    mirror = [UnitBoundary(not boundary.enters, boundary.unit) for boundary in reversed(boundaries)]
    closes = _last_closes(mirror)
    actions: list[Action] = []
    for unit in sorted(later & closes.keys(), key=closes.__getitem__):
        actions.append(Action(Kind.W, unit))
        if trained[unit] and (last or strategies[unit].reduces_each):
            actions.append(Action(Kind.REDUCE, unit))
    return _with_arrivals(actions, deque(), under_way, drains=True)


def _last_closes(mirror: Sequence[UnitBoundary]) -> dict[int, int]:
    """Return the position of the last boundary of a backward pass at which each Unit closes."""
    return {boundary.unit: i for i, boundary in enumerate(mirror) if not boundary.enters}


def _with_arrivals(
    actions: Sequence[Action], travelling: deque[int], under_way: int, drains: bool = False
) -> list[Action]:
    """Return ``actions`` with an ARRIVE of the oldest reduction wherever more than ``under_way`` would run at once.

    Args:
        actions: Actions of a backward pass.
        travelling: Units whose reductions run when the pass begins, the oldest first.
        under_way: Number of Units whose reductions may run while the pass goes on.
        drains: True to wait for all reductions at the end of the pass, because another kind of pass may follow.
    """
    made: list[Action] = []
    for action in actions:
        made.append(action)
        if action.kind is Kind.REDUCE:
            travelling.append(action.unit)
            if len(travelling) > under_way:
                made.append(Action(Kind.ARRIVE, travelling.popleft()))
    return made + [Action(Kind.ARRIVE, unit) for unit in travelling if drains]


def _recalls(mirror: Sequence[UnitBoundary], strategies: Sequence[Strategy]) -> dict[int, list[int]]:
    """Return the Units whose saved tensors are recalled before a boundary, by position of the boundary.

    Each is recalled before the Unit that saves on another tier and opens before it; the first of all before the Unit
    that opens and closes directly before it.
    """
    opened = [
        (i, boundary.unit)
        for i, boundary in enumerate(mirror)
        if boundary.enters and strategies[boundary.unit].saved_tier != "device"
    ]
    found = {place: [following] for (place, _), (_, following) in pairwise(opened)}
    if opened:
        place, unit = opened[0]
        if place and not mirror[place - 1].enters:
            place = max(i for i in range(place) if mirror[i] == UnitBoundary(True, mirror[place - 1].unit))
        found[place] = [unit, *found.get(place, ())]
    return found


def _outermost(boundaries: Sequence[UnitBoundary]) -> list[bool]:
    """Return for each boundary whether its Unit is not open already.

    A Unit that calls itself is gathered by its outer call.
    """
    depth: dict[int, int] = {}
    found = []
    for enters, unit in boundaries:
        depth[unit] = depth.get(unit, 0) + (1 if enters else -1)
        found.append(depth[unit] == (1 if enters else 0))
    return found


def _without_pauses(actions: list[Action]) -> list[Action]:
    """Keep a Unit gathered that would be released and gathered again with nothing in between."""
    kept: list[Action] = []
    for action in actions:
        if (
            action.kind is Kind.UNSHARD
            and kept
            and kept[-1] == Action(Kind.RESHARD, action.unit, action.microbatch)
        ):
            kept.pop()
        else:
            kept.append(action)
    return kept


def _moved_ahead(
    actions: list[Action], strategies: Sequence[Strategy], prefetch: PrefetchLimits
) -> list[Action]:
    """Move gathers ahead of their use, and each LOAD_WEIGHT as far ahead of its gather.

    Without prefetching, a LOAD_WEIGHT stands directly in front of its gather.
    """
    if prefetch.limit_bytes:
        actions = _ahead(Kind.UNSHARD, actions, prefetch)
    brought: list[Action] = []
    for action in actions:
        if action.kind is Kind.UNSHARD and strategies[action.unit].brings_shard:
            brought.append(action._replace(kind=Kind.LOAD_WEIGHT))
        brought.append(action)
    return _ahead(Kind.LOAD_WEIGHT, brought, prefetch) if prefetch.limit_bytes else brought


def _ahead(kind: Kind, actions: Sequence[Action], prefetch: PrefetchLimits) -> list[Action]:
    """Move every UNSHARD or LOAD_WEIGHT (``kind``) before the compute Actions in front, as far as there is room.

    A LOAD_WEIGHT also moves before the gathers there, because it runs while other Units compute. No Action overtakes
    another of its kind, nor the RESHARD of its own Unit.
    """
    moved: list[Action] = []
    waiting: list[int] = []
    """Bytes, by Action of ``moved``, that were gathered before the Action for later Actions."""
    for action in actions:
        place = len(moved)
        if action.kind is kind:
            for i in reversed(range(len(moved))):
                before = moved[i]
                if before.kind is kind or before[:2] == (Kind.RESHARD, action.unit):
                    break
                if before.kind.computes and not prefetch.has_room(waiting[i], action.unit):
                    break
                if before.kind.computes and kind is Kind.UNSHARD and action.unit in prefetch.held:
                    break
                if before.kind.computes or before.kind is Kind.UNSHARD:
                    place = i
            for i in range(place, len(moved)):
                waiting[i] += prefetch.unit_bytes[action.unit]
        moved.insert(place, action)
        waiting.insert(place, 0)
    return moved


def with_fetches(actions: Sequence[Action], behind: Mapping[int, int]) -> list[Action]:
    """Return ``actions`` with a FETCH of each collection of embedding tables behind the first F of a Unit.

    Args:
        actions: Actions of a forward pass.
        behind: Number of the Unit, by number of the collection. Collections behind one Unit are fetched in this order.
    """
    made: list[Action] = []
    left = dict(behind)
    for action in actions:
        made.append(action)
        if action.kind is Kind.F:
            asked = [table for table, unit in left.items() if unit == action.unit]
            made += [Action(Kind.FETCH, table) for table in asked]
            left = {table: unit for table, unit in left.items() if table not in asked}
    return made


def keys_ahead(actions: Sequence[Action], tiered: Container[int] = ()) -> list[Action]:
    """Return the Actions of ``actions`` that may run while the steps before are computed.

    These are the halves of the FETCHes that read no weights, as INPUT_DISTs, in the order of the FETCHes. READs follow
    for tables with tiers: behind all INPUT_DISTs, because other ranks wait for keys and for no rank's disk.

    Args:
        actions: Actions of a step.
        tiered: Numbers of the collections of which only some rows are in memory.
    """
    fetches = [action for action in actions if action.kind is Kind.FETCH]
    reads = [action._replace(kind=Kind.READ) for action in fetches if action.unit in tiered]
    return [action._replace(kind=Kind.INPUT_DIST) for action in fetches] + reads


def update_actions(
    trained: Sequence[bool],
    strategies: Sequence[Strategy],
    directed: Sequence[int] = (),
    between: Sequence[Action] = (),
    loads_ahead: int = 1,
) -> list[Action]:
    """Return the end of the step: update the state that a rank owns, gather the weights that it keeps whole.

    Args:
        trained: True for each Unit with a trained parameter.
        strategies: Strategy of each Unit.
        directed: Units with updates that need more than their own element.
        between: Actions between the two halves of those updates, which compute what the second half needs.
        loads_ahead: Number of Units whose state is read from a disk at once.
    """
    actions = [*(Action(Kind.DIRECTION, unit) for unit in directed), *between]
    is_delayed = any(strategy.is_delayed for strategy in strategies)
    units = [unit for unit, is_trained in enumerate(trained) if is_trained]
    away = [unit for unit in units if strategies[unit].tier != "device"]

    def gathered(unit: int) -> list[Action]:
        is_in_pieces = strategies[unit].cuts_master and not strategies[unit].cuts_weight
        return [Action(Kind.UNSHARD, unit)] * is_in_pieces

    if is_delayed:
        # The updates run beside the next step, whose backward pass writes gradients from the last Unit on. Each
        # gradient overwrites that of the step before, which must be used up by then, so the last Unit is updated first.
        actions += [each for unit in away for each in (Action(Kind.SWAP_WEIGHT, unit), *gathered(unit))]
        away.reverse()
    for unit in units:
        if unit not in away:
            actions += [Action(Kind.STEP, unit), *gathered(unit)]
    on_disk = [unit for unit in away if strategies[unit].tier == "disk"]
    loads = [Action(Kind.LOAD, unit) for unit in on_disk]
    actions += loads[:loads_ahead]
    left = loads[loads_ahead:]
    for unit in away:
        actions.append(Action(Kind.STEP, unit))
        if unit in on_disk:
            actions += [Action(Kind.STORE, unit), *left[:1]]
            left = left[1:]
    if not is_delayed:
        actions += [action for unit in away for action in gathered(unit)]
    # A gather of the updated weights has waited for the update.
    late = [unit for unit in away if strategies[unit].waits_at_end and not gathered(unit)]
    return actions + [Action(Kind.WAIT, unit) for unit in late]


def skipped_updates(actions: Sequence[Action]) -> list[Action]:
    """Return the Actions behind NORM of a step that is skipped, given the list of a step that is not.

    A skipped step leaves all state as it is. The result of the step before, which delayed updates install now, belongs
    to that step: its SWAP_WEIGHTs and their gathers stay.
    """
    made: list[Action] = []
    adopted: set[int] = set()
    for action in actions:
        if action.kind is Kind.SWAP_WEIGHT:
            adopted.add(action.unit)
            made.append(action)
        elif action.kind is Kind.UNSHARD and action.unit in adopted:
            made.append(action)
    return made


def registration_boundaries(names: Sequence[str]) -> list[UnitBoundary]:
    """Return boundaries in the order in which modules were registered.

    This order is used until the first step has shown its own.

    Args:
        names: Module names of the Units in order of registration. A Unit lies inside another if its name does.
    """
    boundaries: list[UnitBoundary] = []
    open_units: list[int] = []
    for unit, name in enumerate(names):
        while open_units and not is_inside(name, names[open_units[-1]]):
            boundaries.append(UnitBoundary(False, open_units.pop()))
        boundaries.append(UnitBoundary(True, unit))
        open_units.append(unit)
    return boundaries + [UnitBoundary(False, unit) for unit in reversed(open_units)]


def with_absent(seen: Sequence[UnitBoundary], before: Sequence[UnitBoundary]) -> tuple[UnitBoundary, ...]:
    """Return the order ``seen`` of a forward pass with the Units that did not run, each at its position in ``before``.

    A Unit that did not run is inserted behind its neighbour in ``before``. Data that skips different blocks in
    different batches therefore finds all Units in their positions. Both orders begin and end with the root's boundary.
    """
    order = list(seen)
    ran = {boundary.unit for boundary in seen}
    around: list[int] = []
    last_inside: dict[int, int] = {}
    """Last Unit that stood directly inside each Unit whose window is open in ``before``."""
    for enters, unit in before:
        if not enters:
            around.pop()
            continue
        if unit not in ran:
            parent = around[-1]
            neighbour = last_inside.get(parent)
            if neighbour is None:
                place = order.index(UnitBoundary(True, parent)) + 1
            else:  # behind the neighbour's last window
                place = len(order) - order[::-1].index(UnitBoundary(False, neighbour))
            order[place:place] = [UnitBoundary(True, unit), UnitBoundary(False, unit)]
            ran.add(unit)
        if around:
            last_inside[around[-1]] = unit
        around.append(unit)
    return tuple(order)


def is_inside(name: str, outer: str) -> bool:
    """Return True if the module ``outer`` contains the module ``name``, by their names."""
    return not outer or name.startswith(outer + ".")
