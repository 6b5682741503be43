"""Exchanges: the collectives and messages of one Action, as the Plan foresees them and ``Traffic`` counts them."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from shardwise.comm.trace import Traffic, TrafficCount
from shardwise.plan.exchange_calls import ExchangeCall, Operation, Purpose, elements_sent_by

__all__ = ["ExchangeCall", "ExchangeRecord", "message", "rows_of", "totals", "united"]


class ExchangeRecord(Traffic):
    """A counter of what is sent that also keeps the size of each call."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[ExchangeCall] = Counter()

    def add(
        self,
        operation: Operation,
        purpose: Purpose,
        elements: int,
        itemsize: int,
        ranks: int,
        what: str = "",
        axis: str = "dp",
    ) -> None:
        """Count one collective, as ``Traffic.add`` does."""
        super().add(operation, purpose, elements, itemsize, ranks, what, axis)
        sent = elements_sent_by(operation, elements, ranks)
        self._calls[ExchangeCall(operation, purpose, axis, sent, itemsize)] += 1

    def mark(self) -> Counter[ExchangeCall]:
        """Return the calls so far, for ``since``."""
        return self._calls.copy()

    def since(self, mark: Counter[ExchangeCall]) -> tuple[ExchangeCall, ...]:
        """Return the calls since ``mark``."""
        return united(call._replace(calls=times) for call, times in (self._calls - mark).items())


def message(purpose: Purpose, tensors: Iterable[Tensor]) -> tuple[ExchangeCall, ...]:
    """Return the calls of one message between stages: one for all tensors of one element size."""
    elements: Counter[int] = Counter()
    for tensor in tensors:
        elements[tensor.itemsize] += tensor.numel()
    return tuple(ExchangeCall("send", purpose, "pp", number, size) for size, number in elements.items())


def united(calls: Iterable[ExchangeCall]) -> tuple[ExchangeCall, ...]:
    """Return ``calls`` with equal ones added up, in the order in which they first came."""
    times: Counter[ExchangeCall] = Counter()
    for call in calls:
        times[call._replace(calls=1)] += call.calls
    return tuple(call._replace(calls=number) for call, number in times.items())


def rows_of(calls: Iterable[ExchangeCall]) -> list[dict[str, str | int]]:
    """Return the sums of ``calls`` by operation, purpose and axis, each a row of the JSON's ``sent``."""
    return [
        {"operation": operation, "purpose": purpose, "axis": axis, **count._asdict()}
        for (operation, purpose, axis), count in sorted(totals(calls).items())
    ]


def totals(calls: Iterable[ExchangeCall]) -> dict[tuple[Operation, Purpose, str], TrafficCount]:
    """Return the sums of ``calls`` by operation, purpose and axis, as ``Traffic.counts`` has them."""
    found: dict[tuple[Operation, Purpose, str], TrafficCount] = {}
    for call in calls:
        key = call.operation, call.purpose, call.axis
        old = found.get(key, TrafficCount())
        found[key] = TrafficCount(
            old.calls + call.calls, old.elements + call.calls * call.elements, old.bytes + call.bytes
        )
    return found
