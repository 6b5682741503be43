"""Action: one operation of a rank in a training step.

What each Kind of operation does, where it may stand and what it costs is one row of the table in ``kinds.py``:
F, B, I, W, SEND, RECV, LOAD_WEIGHT, UNSHARD, RESHARD, OFFLOAD, RELOAD, REDUCE, ARRIVE, INPUT_DIST, READ, FETCH,
DELIVER, SUM, NORM, DIRECTION, TRUST_RATIO, ALL_TO_ALL, BALANCE, SCALE, SWAP_WEIGHT, LOAD, STEP, STORE, WAIT.

A step is a list of Actions. Under a schedule a loop walks the list. In a user's own loop the user's Python decides the
order of Units, and the module hooks follow the same list with a cursor.

A stage's passes name the stage and a microbatch. An Action inside a pass names a Unit, written with a u:

    F(2,5)          forward of stage 2, microbatch 5                F(u1,5)          forward of Unit 1
    SEND(2,5,3)     stage 2 sends to 3: an activation, for 3 > 2    UNSHARD(u1,5)    for that pass
    RECV(2,5,3)     stage 2 receives from 3: a gradient             STEP(u1)         once per step

A rank has one SUM and one NORM, between its last REDUCE or DELIVER and its first STEP:

    ... REDUCE(u1,5) DELIVER(u3) SUM NORM STEP(u0) UNSHARD(u0) STEP(u1) UNSHARD(u1) ... STEP(u3)
    ... NORM DIRECTION(u0) DIRECTION(u1) ... TRUST_RATIO ALL_TO_ALL STEP(u0) ...      if updates need whole tensors

State on another tier than the device is updated while the next step begins. Its LOAD, STEP and STORE are only started
at their places in the list; a thread runs them in this order, and each user of the Unit's weights waits for its STEP:

    ... NORM STEP(u0) LOAD(u1) LOAD(u2) STEP(u1) STORE(u1) STEP(u2) STORE(u2) ...

With delayed updates the whole next step runs on the old weights, and SWAP_WEIGHT installs the new weights at its end:

    ... NORM SWAP_WEIGHT(u0) SWAP_WEIGHT(u1) SWAP_WEIGHT(u2) LOAD(u2) LOAD(u1) STEP(u2) STORE(u2) ...

INPUT_DIST is the half of FETCH that reads no weight. INPUT_DISTs have a list of their own, which a thread walks while
the steps before are computed (``plan.lists.keys_ahead``). A FETCH without an earlier INPUT_DIST does both halves.
READ follows the INPUT_DISTs in that list, for tables of which only some rows are in memory: it brings rows from a disk.
A FETCH looks again, and brings those that are still missing.
"""

from typing import NamedTuple

from shardwise.plan.kinds import Kind as Kind


class Action(NamedTuple):
    """One Action: its Kind, its Unit or stage, and its microbatch (-1: once per step)."""

    kind: Kind
    unit: int = -1
    """Index of a Unit; -1 for an Action of a whole stage, or of the rank."""
    microbatch: int = -1
    stage: int = -1
    """Pipeline stage; -1 without a pipeline."""
    other: int = -1
    """The stage at the other end of a SEND or RECV."""

    def __str__(self) -> str:
        """Return the Action as text: ``F(2,5)`` for stage 2, ``F(u2,5)`` for Unit 2."""
        where = [f"u{self.unit}"] if self.unit >= 0 else [str(self.stage)] if self.stage >= 0 else []
        where += [str(number) for number in (self.microbatch, self.other) if number >= 0]
        return f"{self.kind.name}({','.join(where)})" if where else self.kind.name

    @property
    def carries_gradient(self) -> bool:
        """True if this SEND or RECV carries a gradient, to an earlier stage; False if it carries an activation."""
        return (self.other < self.stage) == (self.kind is Kind.SEND)


def F(stage: int, microbatch: int) -> Action:
    """Return the forward Action of a stage for one microbatch."""
    return Action(Kind.F, -1, microbatch, stage)


def B(stage: int, microbatch: int) -> Action:
    """Return the backward Action of a stage for one microbatch: input and weight gradients."""
    return Action(Kind.B, -1, microbatch, stage)


def SEND(stage: int, microbatch: int, other: int) -> Action:
    """Return the Action with which ``stage`` sends to the stage ``other``."""
    return Action(Kind.SEND, -1, microbatch, stage, other)


def RECV(stage: int, microbatch: int, other: int) -> Action:
    """Return the Action with which ``stage`` receives from the stage ``other``."""
    return Action(Kind.RECV, -1, microbatch, stage, other)


SUM = Action(Kind.SUM)
"""The SUM of a rank, once per step."""
NORM = Action(Kind.NORM)
"""The NORM of a rank, once per step."""
TRUST_RATIO = Action(Kind.TRUST_RATIO)
"""The TRUST_RATIO of a rank, once per step."""
ALL_TO_ALL = Action(Kind.ALL_TO_ALL)
"""The ALL_TO_ALL of a rank, once per step."""
BALANCE = Action(Kind.BALANCE)
"""The BALANCE of a rank, once per step."""
SCALE = Action(Kind.SCALE)
"""The SCALE of a rank, once per step."""
