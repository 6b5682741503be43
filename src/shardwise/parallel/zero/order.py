"""The order in which the Units of a stage run: the agreed order, and the order of each forward pass.

The lists that follow an order are made in compose/lists.py.

The agreed order starts as the order of registration. Every forward pass records its own order. When all ranks have
recorded the same order (its hash travels with the gradient norm), the step's list is built again from that order. The
backward pass of a microbatch mirrors its forward passes, divergences included.
"""

import hashlib
from collections.abc import Mapping, Sequence

from shardwise.plan.lists import UnitBoundary, registration_boundaries, with_absent
from shardwise.plan.unit import Unit


class UnitOrder:
    """The agreed order of a stage's Units, and the orders of its forward passes.

    Args:
        units: The Units of the stage, the root first.
    """

    def __init__(self, units: Sequence[Unit]):
        self.agreed: tuple[UnitBoundary, ...] = tuple(registration_boundaries([unit.name for unit in units]))
        """The order that the step's list follows."""
        self.has_departed = False
        """True if the running forward pass departed from the agreed order."""
        self._running: list[UnitBoundary] = []
        """The order of the running forward pass, as far as it has come."""
        self._seen: list[UnitBoundary] = []
        """The order of the last completed forward pass."""
        self._passes: dict[int, list[tuple[UnitBoundary, ...]]] = {}
        """The orders of the forward passes that still await their backward pass, by microbatch."""
        self._fetches: Mapping[int, int] = {}

    # A forward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to record a forward pass."""
        self._running, self.has_departed = [], False

    def saw(self, enters: bool, unit: int) -> None:
        """Record that a Unit's forward began or ended.

        Args:
            enters: True if the forward began, False if it ended.
            unit: Index of the Unit in the stage.
        """
        self._running.append(UnitBoundary(enters, unit))

    @property
    def last_opened(self) -> int:
        """The Unit whose forward began last in the running pass, or the root if none has begun."""
        return next((boundary.unit for boundary in reversed(self._running) if boundary.enters), 0)

    def end(self, microbatch: int | None) -> None:
        """End the recording of a forward pass.

        Args:
            microbatch: The microbatch whose backward pass will follow, or None if no backward pass will.
        """
        self._seen = self._running
        if microbatch is None:
            return
        order = with_absent(self._seen, self.agreed) if self.has_departed else self.agreed
        self._passes.setdefault(microbatch, []).append(order)

    # Its backward pass -----------------------------------------------------------------------------------------

    def of_passes(self, microbatch: int) -> tuple[UnitBoundary, ...]:
        """Return the order of the microbatch's forward passes, or the agreed order if none is recorded."""
        passes = self._passes.get(microbatch, [])
        return tuple(boundary for boundaries in passes for boundary in boundaries) or self.agreed

    def done(self, microbatch: int) -> None:
        """Forget the forward passes of a microbatch whose backward pass is over."""
        self._passes.pop(microbatch, None)

    def forget(self) -> None:
        """Forget all recorded forward passes, because no backward pass will follow."""
        self._passes.clear()

    # Tables ----------------------------------------------------------------------------------------------------

    @property
    def fetches(self) -> Mapping[int, int]:
        """The Unit behind whose F each collection of embedding tables is fetched, in the order of FETCHes.

        Keys are numbers of collections on the rank, values are numbers of Units on the rank.
        """
        return self._fetches

    def follow_fetches(self, fetches: Mapping[int, int]) -> None:
        """Use these places of FETCHes in all further lists."""
        self._fetches = dict(fetches)

    # All ranks -------------------------------------------------------------------------------------------------

    @property
    def hash(self) -> int:
        """A 32-bit hash of the order that the last forward pass followed."""
        text = repr([tuple(boundary) for boundary in self._seen]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4])

    def adopt(self) -> bool:
        """Follow the last recorded order from now on, after all ranks have recorded the same order.

        Returns:
            True if the agreed order has changed.
        """
        if not self._seen:
            return False
        # Units that did not run are included: a later step may use them on some ranks, and every Unit is reduced.
        order = with_absent(self._seen, self.agreed)
        if order == self.agreed:
            return False
        self.agreed = order
        return True
