"""Action: one thing that a rank does in a training step.

    F  forward            B  backward (= I input gradient + W weight gradient)
    SEND, RECV            an activation or its gradient, between pipeline stages
    UNSHARD, RESHARD      gather a Unit's weights, give the memory back
    REDUCE                reduce a Unit's gradients over the data-parallel ranks
    STEP                  update a Unit's masters and moments where they live

A step is a list of Actions. Under a schedule a loop walks the list; in a user's own loop the order of Units belongs to
the user's Python, and the module hooks walk the same list with a cursor.
"""

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
