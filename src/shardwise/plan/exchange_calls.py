"""Calls of collectives and messages as numbers: what one rank sends, by operation, purpose and axis.

    all-gather, reduce-scatter   P (N-1)/N      all-reduce  2P (N-1)/N      broadcast  P (N-1)/N
    send  P      all-to-all  what goes to other ranks

The count is the ring algorithms' lower bound of one rank. The Plan foresees calls of this form, and the counter of what
was really sent (comm/trace.py) counts by the same rule.

Shapes: P elements of the full tensor, N ranks.
"""

from typing import Literal, NamedTuple

Operation = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "send", "all_to_all"
]
Purpose = Literal["weights", "gradients", "activations", "keys", "control"]
"""Kind of traffic.

A collective between cut layers is for "activations" in both directions, because its cost is known for a forward and a
backward pass together. Messages between stages are for either "activations" or "gradients".
"""

LEVELS = ("across hosts", "within a host")
"""Names of the two levels of an axis whose ranks lie on several hosts."""
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "barrier": 0}


def elements_sent_by(operation: Operation, elements: int, ranks: int) -> int:
    """Return the elements that one rank sends in a collective, by the ring algorithm's lower bound.

    Args:
        operation: Operation.
        elements: Elements of the full tensor; for a send and an all-to-all, the elements that leave this rank.
        ranks: Ranks of the group.
    """
    if operation in ("send", "all_to_all"):
        return elements
    return _SENT[operation] * elements * (ranks - 1) // ranks


def crossing_bytes(operation: Operation, elements: int, itemsize: int, hosts: int) -> int:
    """Return the bytes that leave one host in a collective of ranks on several hosts that goes in two levels.

    Ranks that exchange in one step send as many from each of them, and a ring as many as ``elements_sent_by`` says.

    Args:
        operation: Operation; not an all-to-all or a send, which cross as they are.
        elements: Elements of the full tensor.
        itemsize: Bytes of an element.
        hosts: Hosts on which the ranks lie.
    """
    return elements_sent_by(operation, elements, hosts) * itemsize


class ExchangeCall(NamedTuple):
    """Equal calls of one collective or message, of one rank."""

    operation: Operation
    purpose: Purpose
    axis: str
    """Axis of the group, with its level if the exchange has two levels."""
    elements: int
    """Elements that one call sends, by the ring algorithm's lower bound (``elements_sent_by``)."""
    itemsize: int
    """Bytes of an element."""
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that all calls send."""
        return self.calls * self.elements * self.itemsize


def collective(
    operation: Operation, purpose: Purpose, axis: str, elements: int, itemsize: int, ranks: int
) -> tuple[ExchangeCall, ...]:
    """Return one call of a collective as ``Traffic`` counts it; nothing for a group of one rank.

    Args:
        operation: Operation.
        purpose: Kind of traffic.
        axis: Axis of the group.
        elements: Elements of the full tensor; for a send and an all-to-all, the elements that leave this rank.
        itemsize: Bytes of an element.
        ranks: Ranks of the group.
    """
    if ranks == 1:
        return ()
    return (ExchangeCall(operation, purpose, axis, elements_sent_by(operation, elements, ranks), itemsize),)
