"""The clocks of one rank: when each of its Actions begins and ends, on each lane of the rank.

    compute      F and B, updates on the device
    exchange     exchanges between ranks; on CPU ranks, which copy themselves, the computation stands meanwhile
    update       of state on other tiers: one thread, in the order of the list (tiers/tier.py)
    disk         reads and writes, one after another
    down, up     gradients to the host and weights to the device, if they are two, and what blocks save both ways
    data         the reader of batches, one step ahead
    wait         the computation waits for another lane, or for other ranks

An Action begins when its list has reached it, its clock is free, and its inputs are there. Which results it waits for,
and what it does on which lane, is in the row of its Kind (plan/kinds.py). The computing clock goes on while an Action
runs on another lane, and waits where the result is used: F(u) for the gather and the update of u, ARRIVE(u) and NORM
for reductions, RECV for its SEND.

Python takes ``action_s`` for each Action, or ``ending_action_s``. On CPU ranks the computation stands meanwhile; on a
device Python runs ahead, until the host reads the norm.

CPU ranks that do the same work do not end it at the same time, so where they exchange, a rank waits for the last one:
``Hardware.late_s`` of the seconds since they last met.

Cost: some microseconds per Action.
"""

from collections import deque
from typing import Protocol

from shardwise.plan.action import Action, Kind
from shardwise.plan.kinds import Lane, Move
from shardwise.plan.timeline import Span
from shardwise.simulate.prices import ActionPrices
from shardwise.simulate.quantities import Quantities

_MET = ("met", -1)
"""Key of the time at which a rank last met other ranks."""


class StepClocks(Protocol):
    """The clocks of one rank, as ``simulate.price.walk`` moves them."""

    sent_s: float
    """Time at which the last message has arrived."""

    def run(self, action: Action, arrived_s: float) -> None:
        """Do one Action; ``arrived_s`` is the time at which a RECV's message arrived."""

    def reach_norm(self, action: Action) -> float:
        """Do what NORM does before it meets other ranks, and return the time at which it meets them."""

    def norm(self, action: Action, together_s: float) -> None:
        """Do the rest of NORM; ``together_s`` is the time at which the last rank reaches it."""


class RankClocks:
    """The clocks of one rank, in seconds since the first step.

    Args:
        rank: Number of the rank.
        job: Bytes and operations of its Actions.
        prices: Seconds of them.
        leaving: Most gradients that move to a disk at once.
        data_s: Seconds in which the batches of one step are read.
    """

    def __init__(self, rank: int, job: Quantities, prices: ActionPrices, leaving: int, data_s: float = 0.0):
        self._rank = rank
        self._job = job
        self._prices = prices
        self.spans: list[Span] = []
        self.begun_s = 0.0
        """Time at which the running step began."""
        self.sent_s = 0.0
        self.now = 0.0
        """Time of the computation."""
        self._host = 0.0
        """Time of Python, where it runs ahead of a device."""
        self._free: dict[str, float] = dict.fromkeys(
            ("exchange", "messages", "update", "disk", "down", "up", "data"), 0.0
        )
        self._there: dict[tuple[str, int], float] = {}
        """Time at which a result of a Unit is available, by the result's name in the table of Kinds, and the time at
        which the rank last met other ranks, as ``_MET``."""
        self._limit = leaving
        self._leaving: deque[float] = deque()
        self._pass: tuple[Action, float] | None = None
        """The running pass of a stage, and its start."""
        self._data_s = data_s
        self._taken = 0.0
        """Share of the device that the last exchange takes from the computation beside it."""

    def begin_step(self, first: Action) -> None:
        """Begin a step, with batches that were read during the step before; ``first`` is its first Action."""
        self.begun_s = self.now
        if self._data_s:
            self._wait(self._free["data"], first, "data")
            self._beside("data", self._data_s, first)
        for call in self._job.before_passes:
            self._do(self._prices.exchange_s(call), first, "exchange", call.axis)

    def end_step(self) -> tuple[float, float]:
        """Return the start and the stop of the step that ends now."""
        self._end_pass()
        return self.begun_s, self.now

    # Clocks ----------------------------------------------------------------------------------------------------

    def _do(self, seconds: float, action: Action, lane: Lane = "compute", axis: str = "") -> None:
        if seconds > 0:
            is_exposed = lane in ("exchange", "wait")
            self.spans.append(Span(self._rank, action, self.now, self.now + seconds, lane, axis, is_exposed))
            self.now += seconds

    def _wait(self, until_s: float, action: Action, axis: str = "") -> None:
        self._do(until_s - self.now, action, "wait", axis)

    def _beside(
        self, lane: Lane, seconds: float, action: Action, after_s: float = 0.0, axis: str = ""
    ) -> float:
        """Return the end of work on another lane that starts now; work of no time does not wait for the lane."""
        begin = max(self.now, after_s)
        if not seconds:
            return begin
        # Messages have communicators of their own (comm/links.py), so no reduction stands in front of them.
        queue = "messages" if action.kind is Kind.SEND else lane
        start = max(self._free[queue], begin)
        self._free[queue] = start + seconds
        self.spans.append(Span(self._rank, action, start, start + seconds, lane, axis))
        return self._free[queue]

    def _exchange(self, action: Action, after_s: float, control: bool = False) -> float:
        """Return the time at which what an Action sends, available from ``after_s`` on, has reached the other ranks.

        Args:
            action: The Action.
            after_s: Time from which on its bytes are available.
            control: True for the numbers of NORM, for which all ranks wait; False for everything else.
        """
        stands = self._prices.is_cpu or action.kind.computes or action.kind is Kind.ARRIVE
        for call in self._prices.sent(action):
            if (action.kind is Kind.NORM and call.purpose == "control") is not control:
                continue
            seconds = self._prices.exchange_s(call)
            if not stands:
                after_s = self._beside("exchange", seconds, action, after_s, call.axis)
                self._taken = self._prices.taken(call.axis)
            else:
                if call.operation != "send":
                    self._meet(action, call.axis)
                self._wait(after_s, action, call.axis)
                self._do(seconds, action, "exchange", call.axis)
                after_s = self._there[_MET] = self.now
        return max(self.now, after_s)

    def _meet(self, action: Action, axis: str) -> None:
        """Wait for ranks of an axis that are late."""
        worked_s = self.now - self._there.get(_MET, 0.0)
        self._do(self._prices.late_s(worked_s, axis), action, "wait", axis)
        self._there[_MET] = self.now

    def _move(self, action: Action, move: Move, after_s: float) -> float:
        """Return the time at which a move of an Action, whose bytes are available from ``after_s`` on, has ended."""
        if move.lane == "exchange":
            return self._exchange(action, after_s)
        seconds = self._prices.seconds(action, move)
        if action.kind.computes and move.lane == "compute":
            seconds = self._slowed(seconds)
        if move.lane == "compute" or (self._prices.is_cpu and move.lane in ("down", "up")):
            self._do(seconds, action)
            return max(self.now, after_s)
        if not move.is_limited:
            return self._beside(move.lane, seconds, action, after_s)
        if seconds:
            self._leaving.append(self._beside(move.lane, seconds, action, after_s))
            while len(self._leaving) > self._limit:
                self._wait(self._leaving.popleft(), action)
        return after_s

    def _slowed(self, seconds: float) -> float:
        """Return the seconds of computation beside the exchanges that run now, which take a share of the device."""
        beside_s = self._free["exchange"] - self.now
        if not self._taken or beside_s <= 0:
            return seconds
        return min(seconds / (1 - self._taken), seconds + beside_s * self._taken)

    def _python(self, kind: Kind) -> None:
        """Let Python reach the next Action, which is of a Kind."""
        seconds = self._prices.python_s(kind)
        if self._prices.is_cpu:
            self.now += seconds
        elif seconds:
            self._host += seconds
            self.now = max(self.now, self._host)

    # Actions ---------------------------------------------------------------------------------------------------

    def run(self, action: Action, arrived_s: float) -> None:
        """Do one Action by the row of its Kind; ``arrived_s`` is the time at which a RECV's message arrived."""
        self._python(action.kind)
        row, unit = action.kind.row, action.unit
        if unit < 0:
            self._end_pass()
            if action.kind.computes:
                self._pass = action, self.now
                return
        if row.of == "message":
            self._message(action, arrived_s)
            return
        for held in row.holds:
            self._wait(self._ready(held, unit), action, self._axis_of(held, unit))
        there = max((self._ready(each, unit) for each in row.waits_for), default=0.0)
        for move in row.moves or ():
            moved = self._move(action, move, there)
            there = there if move.is_aside else moved
        if row.gives:
            self._there[row.gives, unit] = there

    def _end_pass(self) -> None:
        if self._pass is not None:
            action, start_s = self._pass
            self.spans.append(Span(self._rank, action, start_s, self.now))
            self._pass = None

    def _ready(self, result: str, unit: int) -> float:
        """Return the time at which a result of a Unit is there: 0.0 if nothing gives it.

        Weights are "updated" when their "update" has ended; updates that count one step late are not waited for.
        """
        if result == "updated":
            return 0.0 if self._job.strategies[unit].is_delayed else self._there.get(("update", unit), 0.0)
        return self._there.get((result, unit), 0.0)

    def _axis_of(self, result: str, unit: int) -> str:
        """Return the axis of the ranks for which the computation waits in a result; empty for another tier."""
        strategy = self._job.strategies[unit]
        if result == "reduced" and not strategy.cuts_master:
            return "dp"
        is_sent = result == "reduced" or (result == "gathered" and strategy.weight_tier == "device")
        return strategy.axes[1] if is_sent else ""

    def _message(self, action: Action, arrived_s: float) -> None:
        if action.kind is Kind.RECV:
            if self._prices.is_cpu:
                self._meet(action, "pp")
            self._wait(arrived_s, action, "pp")
        if action.kind is Kind.SEND:
            self.sent_s = self._exchange(action, 0.0)
        elif self._prices.is_cpu:
            self._exchange(action._replace(kind=Kind.SEND, stage=action.other, other=action.stage), 0.0)

    def reach_norm(self, action: Action) -> float:
        """Do what NORM does before it meets other ranks, and return the time at which it meets them."""
        self._python(action.kind)
        self._end_pass()
        reduced_s = self._exchange(action, max(self.now, self._free["exchange"]))
        self._wait(reduced_s, action, "dp")
        for move in action.kind.row.moves or ():
            if move.lane != "exchange":
                self._move(action, move, 0.0)
        return self.now

    def norm(self, action: Action, together_s: float) -> None:
        """Do the rest of NORM; ``together_s`` is the time at which the last rank reaches it."""
        self._wait(together_s, action, "model")
        self._wait(self._exchange(action, self.now, control=True), action, "dp")
        self._host = max(self._host, self.now)
