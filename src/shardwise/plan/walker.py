"""The walker: a rank's list of Actions, a cursor, and one table from Kind to handler.

    F(0,0) | UNSHARD(u0) F(u0) ... RESHARD(u0) | B(0,0) | UNSHARD(u0) B(u0) ... REDUCE(u0) | SUM NORM STEP(u0) ...
             ---------------------------------            --------------------------------
             a pass: what Units do in it                  a pass

Three callers move the cursor, all with the same handlers:

    a schedule's loop        ``run``             one Action after another
    a user's own loop        ``enter``           its next pass begins: the module's hooks found out
    hooks on the Units       ``run_to(F, u)``    everything in front of F(u), which the model computes now

A pass F(stage, i) or B(stage, i) is followed by what its Units do in it, up to the next Action without a Unit. Its
handler computes the stage (or is the user's own Python); the hooks that this sets off walk the pass, and what they
leave is done at its end.

Passes that are no part of a step (an evaluation, a second forward pass, another engine's loss) walk a list of their
own, ``aside``, with a trace of its own, and the step's cursor waits. What departs from a list goes into its trace.

Cost: one look at each Action.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardwise.plan.action import Action, Kind
from shardwise.plan.trace import Trace

Handler = Callable[[Action], None]
"""Does one Action. That of a pass is also told of a Unit's pass that nobody announced: the data skipped it."""


class _Interrupted(NamedTuple):
    """Where a list stands."""

    actions: Sequence[Action]
    cursor: int
    stop: int
    point: int
    is_aside: bool
    trace: Trace


class Walker:
    """See the module's docstring."""

    def __init__(self, handlers: Mapping[Kind, Handler], trace: Trace):
        self.handlers = dict(handlers)
        self.trace = trace
        """Of the list under way."""
        self.last = trace
        """Of the step before."""
        self.last_aside = trace.begin()
        """Of the last list that was no part of a step."""
        self._actions: Sequence[Action] = ()
        self._cursor = 0
        self._stop = 0
        """Where the running pass ends."""
        self._point = 0
        """The Action without a Unit that is under way."""
        self._is_aside = False
        self._before_pass: tuple[int, int] | None = None
        """Actions and divergences of the trace when the user's Python began the pass under way; None where another list
        came in between."""
        self._outer: list[_Interrupted] = []
        self.target: Action | None = None
        """The Unit's pass that the cursor is on its way to."""

    # Lists -----------------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action]) -> None:
        """A step's list, from its start."""
        self._outer.clear()
        self._before_pass = None
        self._actions, self._cursor, self._stop, self._point, self._is_aside = actions, 0, 0, 0, False
        self.trace = self.trace.begin()

    def follow(self, actions: Sequence[Action]) -> None:
        """The step is that of ``actions``, which has more passes than the list under way, or fewer: from the next pass
        on. Between two passes alone."""
        assert not self._is_aside, "the step's own list goes on"
        kept = max(self._cursor, self._stop)
        done = self._actions[:kept]
        passes = [place for place, action in enumerate(actions) if action.unit < 0 and action.kind.computes]
        count = sum(action.unit < 0 and action.kind.computes for action in done)
        if count > len(passes):
            self.diverge(f"{self._actions[self._point]} has no backward pass")
        rest = passes[count] if count < len(passes) else _end_of_pass(actions, passes[-1] + 1)
        self._actions = (*done, *actions[rest:])

    def insert(self, actions: Sequence[Action], why: str) -> None:
        """Between two passes: ``actions`` come first now, which the list had elsewhere."""
        self.diverge(f"{actions[0]} comes late: {why}")
        self._actions = (*self._actions[: self._cursor], *actions, *self._actions[self._cursor :])

    def close(self) -> None:
        """The step is over: its trace is that of the last one."""
        self.last = self.trace

    @contextmanager
    def aside(self, actions: Sequence[Action]) -> Iterator[None]:
        """Walk another list meanwhile."""
        self.turn_aside(actions)
        try:
            yield
        finally:
            self.turn_back()

    def turn_aside(self, actions: Sequence[Action]) -> None:
        """Begin another list; the one under way waits. It is one pass until ``enter`` or ``run`` find more in it."""
        place = (self._actions, self._cursor, self._stop, self._point, self._is_aside, self.trace)
        self._outer.append(_Interrupted(*place))
        self._before_pass = None
        self._actions, self._cursor, self._stop, self._point = actions, 0, len(actions), 0
        self._is_aside = True
        self.trace = self.last_aside = self.trace.begin()

    def turn_back(self) -> None:
        """Go on with the list that waits; a step that has begun meanwhile has forgotten it."""
        if not self._outer:
            return
        place = self._outer.pop()
        self._actions, self._cursor, self._stop, self._point, self._is_aside, self.trace = place

    @property
    def is_aside(self) -> bool:
        """Whether the list under way is no part of the step."""
        return self._is_aside

    @property
    def has_begun(self) -> bool:
        """Whether anything of the step's list has been done."""
        return self._cursor > 0 and not self._is_aside

    @property
    def left(self) -> Sequence[Action]:
        """What is left of the list, from the Action without a Unit that is under way."""
        return self._actions[self._point :]

    @property
    def under_way(self) -> Action | None:
        """The Action that was begun last; None before the first one of a list."""
        return self._actions[self._cursor - 1] if self._cursor else None

    # A schedule's loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[Action], bool] | None = None) -> None:
        """Do one Action after another, to the end or up to the first one that ``until`` is true of."""
        while self._cursor < len(self._actions):
            self._point = self._cursor
            action = self._actions[self._cursor]
            if until is not None and until(action):
                return
            self._cursor += 1
            if action.unit < 0 and action.kind.computes:
                self._stop = _end_of_pass(self._actions, self._cursor)
                self._do(action)
                self.finish_pass()
            else:
                self._do(action)
        self._point = self._cursor

    def skip_rest(self) -> None:
        """What is left of the list is not done: all ranks have decided so."""
        self._cursor = self._stop = len(self._actions)

    # A user's own loop -----------------------------------------------------------------------------------------

    def enter(self, kind: Kind, stage: int) -> bool:
        """The user's Python begins a pass of ``stage``; False where the list has another Action next.

        A pass that an exception ended begins again. A forward pass whose loss was not taken from the model is passed
        over: its backward pass comes.
        """
        place = self._cursor
        if place < self._stop:
            place = self._point
            self.diverge(f"{self._actions[place]} did not come to its end")
        if kind is Kind.B and self._is_next(place, Kind.F, stage):
            self.diverge(f"{self._actions[place]} did not run before its backward pass")
            place = _end_of_pass(self._actions, place + 1)
        if not self._is_next(place, kind, stage):
            return False
        self._point, self._cursor = place, place + 1
        self._stop = _end_of_pass(self._actions, self._cursor)
        if not self._is_aside:
            self._before_pass = (len(self.trace.actions), self.trace.diverged)
            self.trace.passed(self._actions[place])
        return True

    def withdraw(self) -> None:
        """The pass that ``enter`` began was no part of the step after all: it is next again, and leaves no trace."""
        if self._before_pass is not None:
            self._cursor = self._stop = self._point
            self.trace.cut(*self._before_pass)
            self._before_pass = None

    def _is_next(self, place: int, kind: Kind, stage: int) -> bool:
        return place < len(self._actions) and self._actions[place][:2] == (kind, -1)

    # Inside a pass ---------------------------------------------------------------------------------------------

    def run_to(self, kind: Kind, unit: int) -> bool:
        """Do what stands in front of the pass ``kind`` of ``unit``, and put the cursor behind it. False, and nothing
        done, where it does not come any more."""
        actions = self._actions
        for place in range(self._cursor, self._stop):
            if actions[place][1] == unit and actions[place][0] is kind:
                break
        else:
            return False
        self.target = actions[place]
        self._serve(place)
        self._cursor = place + 1
        self.trace.passed(self.target)
        return True

    def finish_pass(self) -> None:
        """Do what is left of the pass."""
        self.target = None
        self._serve(self._stop)
        if self._before_pass is not None:
            self.trace.passed_at(self._before_pass[0])

    def _serve(self, place: int) -> None:
        while self._cursor < place:
            action = self._actions[self._cursor]
            self._cursor += 1
            if action[0].is_announced:
                self.handlers[action[0]](action)
            else:
                self._do(action)

    def next_in_pass(self) -> Action | None:
        """The Action at the cursor, None at the end of the pass."""
        return self._actions[self._cursor] if self._cursor < self._stop else None

    def run_next(self) -> None:
        """Do the Action at the cursor."""
        self._serve(self._cursor + 1)

    def run_while(self, may: Callable[[Action], bool]) -> None:
        """Do what comes next as long as ``may`` is true of it; the passes of Units in between go by."""
        self.target = None
        place = self._cursor
        while place < self._stop:
            action = self._actions[place]
            place += 1
            if action[0].computes:
                continue
            if not may(action):
                return
            self._serve(place)

    def rest_of_pass(self) -> Sequence[Action]:
        """What the pass has left."""
        return self._actions[self._cursor : self._stop]

    def replan(self, actions: Sequence[Action], why: str) -> None:
        """The rest of the pass is ``actions``."""
        point = self._actions[self._point]
        self.diverge(f"{point} was planned anew: {why}")
        actions = [action._replace(microbatch=point.microbatch) for action in actions]
        self._actions = (*self._actions[: self._cursor], *actions, *self._actions[self._stop :])
        self._stop = self._cursor + len(actions)

    # Trace -----------------------------------------------------------------------------------------------------

    def passed(self, action: Action) -> None:
        """A Unit's pass ran without a word of its own."""
        self.trace.passed(action)

    def diverge(self, text: str) -> None:
        """Something was done otherwise than the list had it."""
        self.trace.diverge(text)

    def _do(self, action: Action) -> None:
        trace = self.trace
        place = trace.start(action)
        self.handlers[action[0]](action)
        trace.stop(place)


def _end_of_pass(actions: Sequence[Action], place: int) -> int:
    """Where the pass ends that ``place`` lies in."""
    while place < len(actions) and actions[place][1] >= 0 and not actions[place][0].ends_step:
        place += 1
    return place
