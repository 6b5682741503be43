"""The order in which the Units of a stage run: the agreed one, and what each forward pass shows.

The order starts as the order of registration. Every forward pass writes down its own; when all ranks have seen the same
one (their hashes travel with the gradient norm) the step's list is made anew from it. The backward pass of a microbatch
mirrors what its forward passes did, departures included.
"""

import hashlib
from collections.abc import Mapping, Sequence

from shardwise.plan.action import Action
from shardwise.plan.lists import (
    Boundary,
    Prefetch,
    Strategy,
    backward_actions,
    forward_actions,
    registration_boundaries,
    with_absent,
    with_fetches,
)
from shardwise.plan.unit import Unit


class Order:
    """See the module's docstring. ``strategies``: by Unit; ``first``: number of the first Unit in the
    rank's list."""

    def __init__(
        self, units: Sequence[Unit], strategies: Sequence[Strategy], prefetch_bytes: int, first: int
    ):
        self.agreed: tuple[Boundary, ...] = tuple(registration_boundaries([unit.name for unit in units]))
        """What the list follows."""
        self.has_departed = False
        """Whether the running forward pass took another way."""
        self._prefetch = Prefetch(prefetch_bytes, [unit.weight_bytes for unit in units])
        self._strategies = strategies
        self._first = first
        self._trained = [any(bucket.key.trained for bucket in unit.buckets) for unit in units]
        self._running: list[Boundary] = []
        """The forward pass that is under way."""
        self._seen: list[Boundary] = []
        """The last one that came to its end."""
        self._passes: dict[int, list[tuple[Boundary, ...]]] = {}
        """By microbatch the order of each forward pass whose backward pass has not been."""
        self._lists: dict[tuple[tuple[Boundary, ...], str], list[Action]] = {}
        self._fetches: Mapping[int, int] = {}

    # A forward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward pass begins."""
        self._running, self.has_departed = [], False

    def saw(self, enters: bool, unit: int) -> None:
        """A Unit's window opened or closed."""
        self._running.append(Boundary(enters, unit))

    @property
    def last_opened(self) -> int:
        """The Unit whose forward began last in the running pass; the root where none has."""
        return next((boundary.unit for boundary in reversed(self._running) if boundary.enters), 0)

    def end(self, microbatch: int | None) -> None:
        """The pass is over. ``microbatch``: whose backward pass will come; None where none will."""
        self._seen = self._running
        if microbatch is None:
            return
        order = with_absent(self._seen, self.agreed) if self.has_departed else self.agreed
        self._passes.setdefault(microbatch, []).append(order)

    # Its backward pass -----------------------------------------------------------------------------------------

    def of_passes(self, microbatch: int) -> tuple[Boundary, ...]:
        """That of the forward passes whose backward pass comes now."""
        passes = self._passes.get(microbatch, [])
        return tuple(boundary for boundaries in passes for boundary in boundaries) or self.agreed

    def done(self, microbatch: int) -> None:
        """The backward pass is over."""
        self._passes.pop(microbatch, None)

    def forget(self) -> None:
        """No backward pass will come."""
        self._passes.clear()

    # Tables ----------------------------------------------------------------------------------------------------

    @property
    def fetches(self) -> Mapping[int, int]:
        """By collection of embedding tables the Unit behind whose F it is fetched, in the order of FETCHes: both by
        their numbers on the rank."""
        return self._fetches

    def follow_fetches(self, fetches: Mapping[int, int]) -> None:
        """Fetch so from now on."""
        self._fetches = dict(fetches)
        self._lists.clear()

    # All ranks -------------------------------------------------------------------------------------------------

    @property
    def hash(self) -> int:
        """A 32-bit number of the order that the last forward pass followed."""
        text = repr([tuple(boundary) for boundary in self._seen]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4])

    def adopt(self) -> bool:
        """All ranks have seen the same order: follow it from now on. True where it is a new one."""
        if not self._seen:
            return False
        # With the Units that did not run: a later step may use them on some ranks, and all are reduced.
        order = with_absent(self._seen, self.agreed)
        if order == self.agreed:
            return False
        self.agreed = order
        self._lists.clear()
        return True

    # Lists -----------------------------------------------------------------------------------------------------

    def forward(self) -> list[Action]:
        """One forward pass."""
        return self._list(self.agreed, "forward")

    def backward(self, order: tuple[Boundary, ...], last: bool) -> list[Action]:
        """The backward pass of ``order``; ``last``: of the step's last microbatch."""
        return self._list(order, "last" if last else "one of several")

    def foreign(self, order: tuple[Boundary, ...]) -> list[Action]:
        """A backward pass in which nothing lands."""
        return self._list(order, "foreign")

    def _list(self, order: tuple[Boundary, ...], what: str) -> list[Action]:
        if (order, what) not in self._lists:
            if len(self._lists) > 8:
                self._lists.clear()
            if what == "forward":
                made = forward_actions(order, self._strategies, self._prefetch)
            else:
                trained = [False] * len(self._trained) if what == "foreign" else self._trained
                made = backward_actions(order, self._strategies, trained, what == "last", self._prefetch)
            made = [action._replace(unit=action.unit + self._first) for action in made]
            self._lists[order, what] = with_fetches(made, self._fetches) if what == "forward" else made
        return self._lists[order, what]
