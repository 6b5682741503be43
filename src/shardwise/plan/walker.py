"""The walker: a rank's list of Actions, a cursor, and one table from Kind to handler.

    F(0,0) | UNSHARD(u0) F(u0) ... RESHARD(u0) | B(0,0) | UNSHARD(u0) B(u0) ... REDUCE(u0) | SUM NORM STEP(u0) ...
             ---------------------------------            --------------------------------
             a pass: what Units do in it                  a pass

Three callers move the cursor, all with the same handlers:

    a schedule's loop        ``run``             one Action after another
    a user's own loop        ``enter``           the module's hooks found that its next pass begins
    hooks on the Units       ``run_to(F, u)``    everything in front of F(u), which the model computes now

A pass of a stage (F, B, I or W) is followed by the Actions of its Units, up to the next Action without a Unit. Its
handler computes the stage (or is the user's own Python). The hooks that run meanwhile walk the pass, and what the
hooks leave is done at the end of the pass. In W no user's Python runs, and the walker does all Actions in turn.

Passes that are not part of a step (an evaluation, a second forward pass, another engine's loss) walk a list of their
own, ``aside``, with a trace of its own, and the step's cursor waits. Departures from a list are recorded in its trace.

Cost: one look at each Action, and one record of it where a rank keeps records.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardwise.base.errors import PlanError
from shardwise.plan.action import Action, Kind
from shardwise.plan.trace import Trace

Handler = Callable[[Action], None]
"""Function that does one Action.

The handler of a pass is also called for a Unit's pass that no hook announced, because the data skipped the Unit.
"""


class _Handlers(dict[Kind, Handler]):
    """The handler of each Kind; a Kind without a handler is an error with the Kind's name."""

    def __missing__(self, kind: Kind) -> Handler:
        raise PlanError(
            f"plan: the list has {kind.name}, but no handler does it; expected one in the table of "
            "engine/construction/handlers.py"
        )


class _InterruptedList(NamedTuple):
    """State of a list that waits while another list runs."""

    actions: Sequence[Action]
    cursor: int
    stop: int
    point: int
    is_aside: bool
    trace: Trace


class Walker:
    """Runs a rank's list of Actions and stores the position in it.

    Args:
        handlers: Function that does an Action, by Kind.
        trace: Trace of the first step.
    """

    def __init__(self, handlers: Mapping[Kind, Handler], trace: Trace):
        self.handlers = _Handlers(handlers)
        self.trace = trace
        """Trace of the list that is running."""
        self.last = trace
        """Trace of the step before."""
        self.last_aside = trace.begin()
        """Trace of the last list that was not part of a step."""
        self._actions: Sequence[Action] = ()
        self._cursor = 0
        self._stop = 0
        """End of the running pass."""
        self._point = 0
        """Position of the Action without a Unit that is running."""
        self._is_aside = False
        self._before_pass: tuple[int, int] | None = None
        """Actions and divergences of the trace when the user's Python began the running pass.

        None if another list ran in between.
        """
        self._outer: list[_InterruptedList] = []
        self.target: Action | None = None
        """The Unit's pass that the cursor is moving to."""
        self.note: Callable[[Action], None] | None = None
        """Function that records each Action that the cursor comes to; None: nobody records."""

    # Lists -----------------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action]) -> None:
        """Start a step with its list of Actions."""
        self._outer.clear()
        self._before_pass = None
        self._actions, self._cursor, self._stop, self._point, self._is_aside = actions, 0, 0, 0, False
        self.trace = self.trace.begin()

    def follow(self, actions: Sequence[Action]) -> None:
        """Continue the step from the next pass on with ``actions``, which have more or fewer passes.

        May be called only between two passes.
        """
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
        """Put ``actions`` in front of the cursor; the list had these Actions at another place. Only between two passes.

        Args:
            actions: Actions to run next.
            why: Reason, for the divergence.
        """
        self.diverge(f"{actions[0]} comes late: {why}")
        self._actions = (*self._actions[: self._cursor], *actions, *self._actions[self._cursor :])

    def close(self) -> None:
        """End the step, and keep its trace as that of the last step."""
        self.last = self.trace

    @contextmanager
    def aside(self, actions: Sequence[Action]) -> Iterator[None]:
        """Walk another list inside the ``with`` block, then continue the interrupted list."""
        self.turn_aside(actions)
        try:
            yield
        finally:
            self.turn_back()

    def turn_aside(self, actions: Sequence[Action]) -> None:
        """Interrupt the running list and begin another list.

        The new list is one pass until ``enter`` or ``run`` find more passes in it.
        """
        place = (self._actions, self._cursor, self._stop, self._point, self._is_aside, self.trace)
        self._outer.append(_InterruptedList(*place))
        self._before_pass = None
        self._actions, self._cursor, self._stop, self._point = actions, 0, len(actions), 0
        self._is_aside = True
        self.trace = self.last_aside = self.trace.begin()

    def turn_back(self) -> None:
        """Continue the interrupted list; do nothing if a step that began meanwhile has dropped it."""
        if not self._outer:
            return
        self.trace.finish()
        place = self._outer.pop()
        self._actions, self._cursor, self._stop, self._point, self._is_aside, self.trace = place
        self.trace.resume()

    @property
    def is_aside(self) -> bool:
        """True if the running list is not part of the step."""
        return self._is_aside

    @property
    def has_begun(self) -> bool:
        """True if any Action of the step's list has run."""
        return self._cursor > 0 and not self._is_aside

    @property
    def left(self) -> Sequence[Action]:
        """Rest of the list, from the Action without a Unit that is running."""
        return self._actions[self._point :]

    @property
    def running_pass(self) -> Action:
        """The Action without a Unit that is running."""
        return self._actions[self._point]

    @property
    def under_way(self) -> Action | None:
        """The Action that was begun last; None before the first Action of a list."""
        return self._actions[self._cursor - 1] if self._cursor else None

    # A schedule's loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[Action], bool] | None = None) -> None:
        """Run one Action after another, to the end of the list or to the first for which ``until`` is True."""
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

    def end_with(self, actions: Sequence[Action]) -> None:
        """Replace the rest of the step's list by ``actions``, as all ranks have decided, and run them."""
        self._actions = (*self._actions[: self._cursor], *actions)
        self._stop = self._cursor
        self.run()

    # A user's own loop -----------------------------------------------------------------------------------------

    def enter(self, kind: Kind, stage: int) -> bool:
        """Begin a pass of ``stage`` in the user's own loop.

        A pass that an exception ended begins again. A forward pass without a loss is passed over if its backward pass
        comes.

        Returns:
            False if the list has another Action next.
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
        if self.note is not None:
            self.note(self._actions[place])
        if not self._is_aside:
            self._before_pass = (len(self.trace.actions), self.trace.diverged)
            self.trace.passed(self._actions[place])
        return True

    def withdraw(self) -> None:
        """Undo the last ``enter``, whose pass was not part of the step: the pass is next again and leaves no trace."""
        if self._before_pass is not None:
            self._cursor = self._stop = self._point
            self.trace.cut(*self._before_pass)
            self._before_pass = None

    def _is_next(self, place: int, kind: Kind, stage: int) -> bool:
        return place < len(self._actions) and self._actions[place][:2] == (kind, -1)

    # Inside a pass ---------------------------------------------------------------------------------------------

    def run_to(self, kind: Kind, unit: int) -> bool:
        """Run the Actions in front of the pass ``kind`` of ``unit`` and move the cursor behind it.

        Returns:
            False, with nothing done, if the pass has no such Action left.
        """
        actions = self._actions
        for place in range(self._cursor, self._stop):
            if actions[place][1] == unit and actions[place][0] is kind:
                break
        else:
            return False
        self.target = actions[place]
        point = actions[self._point]
        if point[1] < 0 and point[2] != self.target[2] and not self._is_aside:
            self.diverge(f"{self.target} stands in the list of {point}, which is of another microbatch")
        self._serve(place)
        self._cursor = place + 1
        if self.note is not None:
            self.note(self.target)
        self.trace.passed(self.target)
        return True

    def finish_pass(self) -> None:
        """Run the Actions that are left of the pass."""
        self.target = None
        self._serve(self._stop)
        if self._before_pass is not None:
            self.trace.passed_at(self._before_pass[0])

    def _serve(self, place: int) -> None:
        while self._cursor < place:
            action = self._actions[self._cursor]
            self._cursor += 1
            self._do(action)

    def next_in_pass(self) -> Action | None:
        """Return the Action at the cursor, or None at the end of the pass."""
        return self._actions[self._cursor] if self._cursor < self._stop else None

    def run_next(self) -> None:
        """Run the Action at the cursor."""
        self._serve(self._cursor + 1)

    def run_while(self, may: Callable[[Action], bool]) -> None:
        """Run the next Actions of the pass as long as ``may`` returns True for them.

        The passes of Units in between are skipped if ``may`` returns True for them too.
        """
        self.target = None
        place = self._cursor
        while place < self._stop:
            action = self._actions[place]
            place += 1
            if not may(action):
                return
            if not action[0].computes:
                self._serve(place)

    def rest_of_pass(self) -> Sequence[Action]:
        """Return the Actions that are left of the pass."""
        return self._actions[self._cursor : self._stop]

    def replan(self, actions: Sequence[Action], why: str) -> None:
        """Replace the rest of the pass by ``actions``.

        Args:
            actions: Actions of the rest of the pass; their microbatch is set to the pass's.
            why: Reason, for the divergence.
        """
        point = self._actions[self._point]
        self.diverge(f"{point} was planned anew: {why}")
        actions = [action._replace(microbatch=point.microbatch) for action in actions]
        self._actions = (*self._actions[: self._cursor], *actions, *self._actions[self._stop :])
        self._stop = self._cursor + len(actions)

    # Trace -----------------------------------------------------------------------------------------------------

    def passed(self, action: Action) -> None:
        """Record in the trace that a Unit's pass ran which no hook announced."""
        self.trace.passed(action)

    def diverge(self, text: str) -> None:
        """Record a departure from the list, described by ``text``."""
        self.trace.diverge(text)

    def _do(self, action: Action) -> None:
        """Call the handler of an Action, which writes the Action's row; report an Action that nobody has done."""
        if self.note is not None:
            self.note(action)
        trace = self.trace
        rows, diverged = len(trace.actions), trace.diverged
        self.handlers[action[0]](action)
        if len(trace.actions) == rows and trace.diverged == diverged:
            trace.diverge(f"{action} was not done: its handler wrote no row")


def _end_of_pass(actions: Sequence[Action], place: int) -> int:
    """Return the end of the pass that contains position ``place``."""
    for end in range(place, len(actions)):
        action = actions[end]
        if action[1] < 0 or action[0].ends_step:
            return end
    return max(place, len(actions))
