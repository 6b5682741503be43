"""The lists of Units: in which order a rank gathers, computes, releases, reduces and updates them.

The moves are those of ``placement.py``, read off where a Unit's buffers lie: weight S -> R before use is UNSHARD;
gradient P -> the master's placement is REDUCE; after STEP a weight that is R while its master is S is gathered once.

A microbatch runs a list. In the forward pass Units open and close like brackets; the backward pass is the mirror image:

    forward    UNSHARD(u) F(u) ... RESHARD(u)
    backward   UNSHARD(u) B(u) ... RESHARD(u) REDUCE(u)

so gathers come in the reverse order of closing and reductions in the reverse order of opening, on every rank alike,
whatever order the gradients arrive in. Gathers go ahead of their use by bytes, in this order (``Prefetch``); where a
shard lies on another tier, BRING(u) goes as far ahead of its gather. What a Unit's forward has saved on another tier
comes one such Unit ahead of its backward: RECALL(u3) RECALL(u2) B(u3) ... RECALL(u1) B(u2) ... B(u1). Vectors of
embedding tables come where the model asks for them: FETCH(t) behind some F(u). Their keys may go ahead of the step, in
a list of their own: ASK(t) (``keys_ahead``).

[Note: gathers behind updates]
Where STEP(u) runs beside the next forward pass, UNSHARD(u) waits for it. In front of F(u-1) it would hold up F(u-1) as
well, and with it all that STEP(u) could hide behind. So the first few such gathers of a step stay behind the F in front
of them; a little later updates are done before their gathers go ahead:

    not held    STEP(1) STEP(2) | F(1)    F(2)            two updates are waited for
    held        STEP(1) | F(1)    | F(2)    F(3)          one is, and the gathers of Units 2 and 3
                        | STEP(2)   STEP(3)

A device computes F(u-1) while its host waits for STEP(u), and the gather still runs beside it; ranks that share memory
copy at the gather's use in any case. Only where hosts compute themselves and gather over a network does the computation
wait for a held gather (benchmarks/offload: 1 % of it), which is why they are few.

Cost: one look at each Action; for a gather one at each that it goes ahead of.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardwise.plan.action import Action, Kind
from shardwise.plan.mesh import DENSE, StateAxes
from shardwise.plan.placement import Placement, Shard, Tier

_HELD = 4
"""Gathers that stay behind their updates, the step's first one among them: with so many an update may take three
quarters of its Unit's forward pass and more."""


@dataclass(frozen=True)
class Strategy:
    """Placements on two axes, the outer and the inner one; whether gradients travel with every microbatch."""

    weight: tuple[Placement, Placement]
    grad: tuple[Placement, Placement]
    master: tuple[Placement, Placement]
    windows: bool = False
    """Whether weights that are not cut have windows too."""
    tier: Tier = "device"
    """Where master and moments lie, and are updated."""
    weight_tier: Tier = "device"
    """Where the weight lies between its windows."""
    is_delayed: bool = False
    """Whether an update counts one step late: ADOPT, in the next step's end."""
    grad_tier: Tier = "device"
    """Where the gradient lies from a reduction to the next one of the step, or to the update."""
    leaves_each: bool = False
    """Whether it goes there after every microbatch though nothing cuts it: one rank has the sum."""
    saved_tier: Tier = "device"
    """Where what its forward saves waits for its backward."""
    axes: StateAxes = DENSE
    """The axes, whose ranks together sum the gradient: other ones for other Units (experts, say)."""

    def __post_init__(self) -> None:
        # The UNSHARD behind STEP, which gathers what was updated in pieces, would be taken for that of a window.
        assert not self.has_windows or self.cuts_weight or not self.cuts_master, (
            "windows on updates in pieces"
        )
        assert self.weight_tier in ("device", self.tier), (
            "weights lie where their masters lie, or on the device"
        )

    @property
    def has_windows(self) -> bool:
        """True where a weight is whole on the device inside its Unit's windows alone: one that is cut, or lies on
        another tier, and any where the caller wants so."""
        return self.windows or self.cuts_weight or self.weight_tier != "device"

    @property
    def brings_shard(self) -> bool:
        """True where a rank's shard of the weights comes from another tier before it is gathered."""
        return self.cuts_weight and self.weight_tier != "device"

    @property
    def gathers_behind_update(self) -> bool:
        """True where the weight is gathered from what an update beside the forward pass leaves."""
        return self.cuts_weight and self.tier != "device" and not self.is_delayed

    @property
    def cuts_weight(self) -> bool:
        """True where a rank keeps its shard of the weights alone."""
        return self.weight[1] == Shard()

    @property
    def cuts_grad(self) -> bool:
        """True where a rank keeps its shard of the gradients alone."""
        return self.grad[1] == Shard()

    @property
    def reduces_each(self) -> bool:
        """True where gradients are reduced with every microbatch."""
        return self.cuts_grad or self.leaves_each

    @property
    def cuts_master(self) -> bool:
        """True where a rank updates its shard alone."""
        return self.master[1] == Shard()


class Prefetch(NamedTuple):
    """How far gathers go ahead of their use: small Units many at once, a larger one alone."""

    limit_bytes: int = 0
    """Of weights that wait while others compute; the next Unit may exceed it, where none waits beside it. 0: none
    wait."""
    unit_bytes: Sequence[int] = ()
    """By Unit, its whole weights'."""
    held: Collection[int] = ()
    """Units whose gathers go ahead of no compute. [Note: gathers behind updates]"""

    def has_room(self, waiting_bytes: int, unit: int) -> bool:
        """Whether ``unit`` may wait beside ``waiting_bytes`` of others."""
        return not waiting_bytes or waiting_bytes + self.unit_bytes[unit] <= self.limit_bytes

    def behind_updates(
        self, boundaries: Sequence["Boundary"], strategies: Sequence[Strategy], trained: Sequence[bool]
    ) -> "Prefetch":
        """That of the first forward pass of a step. [Note: gathers behind updates]"""
        entered = dict.fromkeys(boundary.unit for boundary in boundaries)
        beside = [unit for unit in entered if trained[unit] and strategies[unit].gathers_behind_update]
        return self._replace(held=beside[:_HELD])


NO_PREFETCH = Prefetch()


class Boundary(NamedTuple):
    """A forward pass enters or leaves a Unit."""

    enters: bool
    unit: int


def forward_actions(
    boundaries: Sequence[Boundary], strategies: Sequence[Strategy], prefetch: Prefetch = NO_PREFETCH
) -> list[Action]:
    """The forward pass of one microbatch. ``strategies``: by Unit."""
    actions: list[Action] = []
    for (enters, unit), is_outermost in zip(boundaries, _outermost(boundaries), strict=True):
        moves = strategies[unit].has_windows and is_outermost
        if enters:
            actions += [Action(Kind.UNSHARD, unit)] * moves + [Action(Kind.F, unit)]
        elif moves:
            actions.append(Action(Kind.RESHARD, unit))
    return _moved_ahead(_without_pauses(actions), strategies, prefetch)


def backward_actions(
    boundaries: Sequence[Boundary],
    strategies: Sequence[Strategy],
    trained: Sequence[bool],
    last: bool,
    prefetch: Prefetch = NO_PREFETCH,
) -> list[Action]:
    """The backward pass of one microbatch: the mirror image of ``boundaries``.

    A Unit that ran twice opens twice, as in the forward pass, so that what ran in between may stand in its memory. It
    is reduced once, after its last window: autograd delivers the sum of both gradients then. ``last``: gradients that
    stay whole between microbatches are reduced now.
    """
    mirror = [Boundary(not boundary.enters, boundary.unit) for boundary in reversed(boundaries)]
    last_close = {boundary.unit: i for i, boundary in enumerate(mirror) if not boundary.enters}
    recalled = _recalls(mirror, strategies)
    actions: list[Action] = []
    for i, ((enters, unit), is_outermost) in enumerate(zip(mirror, _outermost(mirror), strict=True)):
        moves = strategies[unit].has_windows and is_outermost
        if enters:
            actions += [Action(Kind.UNSHARD, unit)] * moves
            actions += [Action(Kind.RECALL, each) for each in recalled.get(i, ())] + [Action(Kind.B, unit)]
            continue
        actions += [Action(Kind.RESHARD, unit)] * moves
        if trained[unit] and (last or strategies[unit].reduces_each) and i == last_close[unit]:
            actions.append(Action(Kind.REDUCE, unit))
    return _moved_ahead(_without_pauses(actions), strategies, prefetch)


def _recalls(mirror: Sequence[Boundary], strategies: Sequence[Strategy]) -> dict[int, list[int]]:
    """By place of a boundary the Units whose saved tensors are recalled before it."""
    opened = [
        (i, boundary.unit)
        for i, boundary in enumerate(mirror)
        if boundary.enters and strategies[boundary.unit].saved_tier != "device"
    ]
    found = {place: [following] for (place, _), (_, following) in pairwise(opened)}
    if opened:
        place, unit = opened[0]
        found[place] = [unit, *found.get(place, ())]
    return found


def _outermost(boundaries: Sequence[Boundary]) -> list[bool]:
    """For each whether its Unit is not open already: a Unit that calls itself is gathered by its outer call."""
    depth: dict[int, int] = {}
    found = []
    for enters, unit in boundaries:
        depth[unit] = depth.get(unit, 0) + (1 if enters else -1)
        found.append(depth[unit] == (1 if enters else 0))
    return found


def _without_pauses(actions: list[Action]) -> list[Action]:
    """A Unit that would be released and gathered again with nothing in between stays."""
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


def _moved_ahead(actions: list[Action], strategies: Sequence[Strategy], prefetch: Prefetch) -> list[Action]:
    """Gathers go ahead of their use, and what they send goes as far ahead of them."""
    if not prefetch.limit_bytes:
        return actions
    brought: list[Action] = []
    for action in _ahead(Kind.UNSHARD, actions, prefetch):
        if action.kind is Kind.UNSHARD and strategies[action.unit].brings_shard:
            brought.append(action._replace(kind=Kind.BRING))
        brought.append(action)
    return _ahead(Kind.BRING, brought, prefetch)


def _ahead(kind: Kind, actions: Sequence[Action], prefetch: Prefetch) -> list[Action]:
    """Move every Action of ``kind``, UNSHARD or BRING, before the compute Actions in front of it, as far as there is
    room, and a BRING before the gathers there: it runs while others compute. None overtakes another of its kind, nor
    the RESHARD of its own Unit."""
    moved: list[Action] = []
    waiting: list[int] = []
    """By Action of ``moved``: bytes that were gathered before it for what comes behind it."""
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
    """The forward pass ``actions`` with a FETCH of each collection of embedding tables behind the first F of a Unit.

    ``behind``: by a collection's number that of the Unit; those behind one Unit come in the order given here.
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


def keys_ahead(actions: Sequence[Action]) -> list[Action]:
    """What of the list ``actions`` may be done while the steps before it are computed: of each FETCH the half that
    reads no weights, in the order of FETCHes."""
    return [action._replace(kind=Kind.ASK) for action in actions if action.kind is Kind.FETCH]


def update_actions(
    trained: Sequence[bool],
    strategies: Sequence[Strategy],
    directed: Sequence[int] = (),
    between: Sequence[Action] = (),
    loads_ahead: int = 1,
) -> list[Action]:
    """The end of the step: update what is owned, gather what is kept whole.

    ``directed``: Units with updates that look beyond their own element; what they look at is found ``between`` the two
    halves of the update. ``loads_ahead``: of how many Units the state is under way from a disk at once.
    """
    actions = [*(Action(Kind.DIRECT, unit) for unit in directed), *between]
    is_delayed = any(strategy.is_delayed for strategy in strategies)
    units = [unit for unit, is_trained in enumerate(trained) if is_trained]
    away = [unit for unit in units if strategies[unit].tier != "device"]

    def gathered(unit: int) -> list[Action]:
        is_in_pieces = strategies[unit].cuts_master and not strategies[unit].cuts_weight
        return [Action(Kind.UNSHARD, unit)] * is_in_pieces

    if is_delayed:
        # Beside the next step, whose gradients come from the last Unit on, each where the one before it has to be gone.
        actions += [each for unit in away for each in (Action(Kind.ADOPT, unit), *gathered(unit))]
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
    return actions if is_delayed else actions + [action for unit in away for action in gathered(unit)]


def registration_boundaries(names: Sequence[str]) -> list[Boundary]:
    """Brackets in the order in which the modules were registered: the order until the first step has shown its own.

    ``names``: module names of the Units in order of registration; a Unit lies inside another where its name does.
    """
    boundaries: list[Boundary] = []
    open_units: list[int] = []
    for unit, name in enumerate(names):
        while open_units and not is_inside(name, names[open_units[-1]]):
            boundaries.append(Boundary(False, open_units.pop()))
        boundaries.append(Boundary(True, unit))
        open_units.append(unit)
    return boundaries + [Boundary(False, unit) for unit in reversed(open_units)]


def with_absent(seen: Sequence[Boundary], before: Sequence[Boundary]) -> tuple[Boundary, ...]:
    """The order ``seen`` of a forward pass with the Units that did not run, each where it stood in the order
    ``before``: behind the neighbour in front of it. So data that skips blocks, now these and now those, finds them in
    their places.

    Both begin and end with the root's boundary.
    """
    order = list(seen)
    ran = {boundary.unit for boundary in seen}
    around: list[int] = []
    last_inside: dict[int, int] = {}
    """Of each Unit whose window is open in ``before``: the last Unit that stood directly in it."""
    for enters, unit in before:
        if not enters:
            around.pop()
            continue
        if unit not in ran:
            parent = around[-1]
            neighbour = last_inside.get(parent)
            if neighbour is None:
                place = order.index(Boundary(True, parent)) + 1
            else:  # behind its last window
                place = len(order) - order[::-1].index(Boundary(False, neighbour))
            order[place:place] = [Boundary(True, unit), Boundary(False, unit)]
            ran.add(unit)
        if around:
            last_inside[around[-1]] = unit
        around.append(unit)
    return tuple(order)


def is_inside(name: str, outer: str) -> bool:
    """True where the module ``outer`` contains the module ``name``, by their names."""
    return not outer or name.startswith(outer + ".")
