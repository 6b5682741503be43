"""Exchanges: the collectives and messages of one Action, as the Plan foresees them and ``Traffic`` counts them."""

from typing import NamedTuple

from shardwise.comm.trace import Operation, Purpose


class ExchangeCall(NamedTuple):
    """Equal calls of one collective or message, of one rank."""

    operation: Operation
    purpose: Purpose
    axis: str
    """Axis of the group, with its level if the exchange has two levels."""
    elements: int
    """Elements that one call sends, by the ring algorithm's lower bound (comm/trace.py)."""
    itemsize: int
    """Bytes of an element."""
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that all calls send."""
        return self.calls * self.elements * self.itemsize
