"""Action: one thing that a rank does in a training step.

    F  forward            B  backward (= I input gradient + W weight gradient)
    SEND, RECV            an activation or its gradient, between pipeline stages
    BRING                 bring a rank's shard of a Unit's weights from the tier where it lies, ahead of its UNSHARD
    UNSHARD, RESHARD      gather a Unit's weights, give the memory back
    RECALL                bring back what a Unit's forward saved in host memory, from all ranks that keep a part of it
    REDUCE                reduce a Unit's gradients over the data-parallel ranks
    ASK                   tell the owners of rows the keys of a batch, ahead of its step
    FETCH, DELIVER        bring the rows that a batch asks of tables, take their gradients to their owners
    SUM                   add up the gradients that model-parallel ranks hold in common
    NORM                  the norm of all gradients, and what all ranks decide by it: scale, clip, or skip
    DIRECT                the first half of an update that looks beyond its own element: a Unit's moments and directions
    TRUST                 the norms of whole tensors, of weights and of directions
    DEAL                  whole matrices of directions to one rank each, and what it makes of them back
    ADOPT                 let a Unit's weights become those of the update before this one, where it counts one step late
    LOAD, STORE           bring a Unit's masters and moments from a disk into host memory, and back
    STEP                  update a Unit's masters and moments where they live

A step is a list of Actions. Under a schedule a loop walks the list; in a user's own loop the order of Units belongs to
the user's Python, and the module hooks walk the same list with a cursor.

A stage's passes name the stage and a microbatch; what happens inside one names a Unit, and is written with a u:

    F(2,5)          forward of stage 2, microbatch 5                F(u1,5)          forward of Unit 1
    SEND(2,5,3)     stage 2 sends to 3: an activation, for 3 > 2    UNSHARD(u1,5)    for that pass
    RECV(2,5,3)     stage 2 receives from 3: a gradient             STEP(u1)         once per step

A rank has one SUM and one NORM, between its last REDUCE or DELIVER and its first STEP:

    ... REDUCE(u1,5) DELIVER(u3) SUM NORM STEP(u0) UNSHARD(u0) STEP(u1) UNSHARD(u1) ... STEP(u3)
    ... NORM DIRECT(u0) DIRECT(u1) ... TRUST DEAL STEP(u0) UNSHARD(u0) ...      where updates look at whole tensors

What lies on another tier than the device is updated while the next step begins: its LOAD, STEP and STORE only begin
here, on a thread that does them in this order, and whoever uses the Unit's weights waits for its STEP:

    ... NORM STEP(u0) LOAD(u1) LOAD(u2) STEP(u1) STORE(u1) STEP(u2) STORE(u2) ...

or the whole of the next step runs on the weights before it, which become the new ones at that step's end:

    ... NORM ADOPT(u0) ADOPT(u1) ADOPT(u2) LOAD(u2) LOAD(u1) STEP(u2) STORE(u2) ...

ASK is the half of FETCH that reads no weight. It stands in a list of its own, which a thread walks while the steps
before are computed (``plan.lists.keys_ahead``); a FETCH whose keys nobody asked for does both halves.
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
    BRING = "BRING"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    RECALL = "RECALL"
    REDUCE = "REDUCE"
    ASK = "ASK"
    FETCH = "FETCH"
    DELIVER = "DELIVER"
    SUM = "SUM"
    NORM = "NORM"
    DIRECT = "DIRECT"
    TRUST = "TRUST"
    DEAL = "DEAL"
    ADOPT = "ADOPT"
    LOAD = "LOAD"
    STEP = "STEP"
    STORE = "STORE"

    @property
    def ends_step(self) -> bool:
        """True for what comes after all passes of a step."""
        return self in _ENDS_STEP

    @property
    def updates(self) -> bool:
        """True for what comes after NORM; where a step is skipped, ADOPT alone."""
        return self in _UPDATES

    @property
    def is_announced(self) -> bool:
        """True for what the user's model comes to by itself, inside a pass: the cursor is told of it."""
        return self.computes or self is Kind.FETCH

    @property
    def computes(self) -> bool:
        """True for the passes through a model, false for what serves them."""
        return self in _COMPUTES


_COMPUTES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_UPDATES = frozenset({Kind.ADOPT, Kind.DIRECT, Kind.TRUST, Kind.DEAL, Kind.LOAD, Kind.STEP, Kind.STORE})
_ENDS_STEP = frozenset({Kind.DELIVER, Kind.SUM, Kind.NORM, *_UPDATES})


class Action(NamedTuple):
    """One Action: what, on which Unit or stage, for which microbatch (-1: once per step)."""

    kind: Kind
    unit: int = -1
    """Index of a Unit; -1 for an Action of a whole stage, or of the rank."""
    microbatch: int = -1
    stage: int = -1
    """Pipeline stage; -1 where there is no pipeline."""
    other: int = -1
    """The stage at the other end of a SEND or RECV."""

    def __str__(self) -> str:
        """``F(2,5)`` of stage 2, ``F(u2,5)`` of Unit 2."""
        where = [f"u{self.unit}"] if self.unit >= 0 else [str(self.stage)] if self.stage >= 0 else []
        where += [str(number) for number in (self.microbatch, self.other) if number >= 0]
        return f"{self.kind.value}({','.join(where)})" if where else self.kind.value

    @property
    def carries_gradient(self) -> bool:
        """For SEND and RECV: whether a gradient travels, from a stage to the one before; else an activation."""
        return (self.other < self.stage) == (self.kind is Kind.SEND)


def F(stage: int, microbatch: int) -> Action:
    """Forward of a stage."""
    return Action(Kind.F, -1, microbatch, stage)


def B(stage: int, microbatch: int) -> Action:
    """Backward of a stage: input and weight gradients."""
    return Action(Kind.B, -1, microbatch, stage)


def SEND(stage: int, microbatch: int, other: int) -> Action:
    """Stage ``stage`` sends to ``other``."""
    return Action(Kind.SEND, -1, microbatch, stage, other)


def RECV(stage: int, microbatch: int, other: int) -> Action:
    """Stage ``stage`` receives from ``other``."""
    return Action(Kind.RECV, -1, microbatch, stage, other)


SUM = Action(Kind.SUM)
"""Of the whole rank, once per step."""
NORM = Action(Kind.NORM)
"""Of the whole rank, once per step."""
TRUST = Action(Kind.TRUST)
"""Of the whole rank, once per step."""
DEAL = Action(Kind.DEAL)
"""Of the whole rank, once per step."""
