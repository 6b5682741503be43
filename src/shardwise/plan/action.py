"""Action: one thing that a rank does in a training step.

    F  forward            B  backward (= I input gradient + W weight gradient)
    SEND, RECV            an activation or its gradient, between pipeline stages
    UNSHARD, RESHARD      gather a Unit's weights, give the memory back
    REDUCE                reduce a Unit's gradients over the data-parallel ranks
    STEP                  update a Unit's masters and moments where they live

A step is a list of Actions. ``Program`` is the same list as the module hooks need it: what to do before and after the
forward or backward of a Unit, because in a user's own loop the order of Units belongs to the user's Python.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an Action does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter for the input gradient
    W = "W"
    SEND = "SEND"
    RECV = "RECV"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    STEP = "STEP"

    @property
    def computes(self) -> bool:
        """True for the passes through a model, false for what serves them."""
        return self in _COMPUTES


_COMPUTES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_AFTERWARDS = frozenset({Kind.RESHARD, Kind.REDUCE, Kind.SEND})


class Action(NamedTuple):
    """One Action: what, on which Unit (its index), for which microbatch (-1: once per step)."""

    kind: Kind
    unit: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.kind.value}({self.unit}{f',{self.microbatch}' if self.microbatch >= 0 else ''})"


class Around(NamedTuple):
    """What surrounds one compute Action."""

    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()


class Program:
    """A list of Actions, indexed by the compute Action that each of the others serves.

    A RESHARD, REDUCE or SEND of the Unit that computed last comes after it; everything else waits for the next compute
    Action. What follows the last compute Action belongs to the end of the step.
    """

    def __init__(self, actions: Sequence[Action]):
        self._around: dict[tuple[Kind, int, int], Around] = {}
        waiting: list[Action] = []
        last: Action | None = None
        after: list[Action] = []
        for action in actions:
            if action.kind.computes:
                self._close(last, after)
                self._around[action] = Around(tuple(waiting))
                waiting, after, last = [], [], action
            elif last is not None and action.kind in _AFTERWARDS and action.unit == last.unit and not waiting:
                after.append(action)
            else:
                waiting.append(action)
        self._close(last, after)
        self.at_end: tuple[Action, ...] = tuple(waiting)

    def _close(self, action: Action | None, after: Iterable[Action]) -> None:
        if action is not None:
            self._around[action] = self._around[action]._replace(after=tuple(after))

    def around(self, kind: Kind, unit: int, microbatch: int) -> Around:
        """What to do before and after ``kind`` of ``unit`` in ``microbatch``; nothing where the list has no such Action."""
        return self._around.get((kind, unit, microbatch), _NOTHING)


_NOTHING = Around()
