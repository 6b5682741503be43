"""The order in which Units run: agreed, seen, and mirrored by the backward pass."""

from types import SimpleNamespace
from typing import Any

from shardwise.parallel.zero.order import UnitOrder
from shardwise.plan.lists import UnitBoundary


def order_of(names: tuple[str, ...] = ("", "a", "b")) -> UnitOrder:
    """The order of a root with Units inside."""
    units: Any = [SimpleNamespace(name=name) for name in names]
    return UnitOrder(units)


def row(*units: int) -> list[UnitBoundary]:
    inner = [boundary for unit in units for boundary in (UnitBoundary(True, unit), UnitBoundary(False, unit))]
    return [UnitBoundary(True, 0), *inner, UnitBoundary(False, 0)]


def run(order: UnitOrder, *units: int, microbatch: int | None = 0, departs: bool = False) -> None:
    order.begin()
    order.has_departed = departs
    for boundary in row(*units):
        order.saw(*boundary)
    order.end(microbatch)


def test_registration_is_agreed_until_another_order_was_seen_and_adopted() -> None:
    order = order_of()
    assert order.agreed == tuple(row(1, 2)) and not order.adopt()
    run(order, 1, 2)
    assert not order.adopt()
    run(order, 2, 1)
    assert order.agreed == tuple(row(1, 2)) and order.adopt()
    assert order.agreed == tuple(row(2, 1)) and not order.adopt()


def test_a_unit_that_did_not_run_keeps_its_place() -> None:
    order = order_of()
    run(order, 2)
    assert not order.adopt() and order.agreed == tuple(row(1, 2))


def test_the_hash_is_that_of_the_order_seen() -> None:
    one, other = order_of(), order_of()
    run(one, 1, 2)
    run(other, 2, 1)
    assert one.hash != other.hash < 1 << 32
    run(other, 1, 2)
    assert one.hash == other.hash


def test_a_backward_pass_mirrors_its_forward_passes() -> None:
    order = order_of()
    assert order.of_passes(0) == order.agreed
    run(order, 1, 2)
    run(order, 2, 1, departs=True)
    run(order, 2, 1, microbatch=None)
    assert order.of_passes(0) == (*row(1, 2), *row(2, 1)) and order.of_passes(1) == order.agreed
    order.done(0)
    assert order.of_passes(0) == order.agreed
    run(order, 2, 1, microbatch=1, departs=True)
    order.forget()
    assert order.of_passes(1) == order.agreed


def test_the_unit_that_began_last() -> None:
    order = order_of()
    order.begin()
    assert order.last_opened == 0
    for boundary in (UnitBoundary(True, 0), UnitBoundary(True, 2), UnitBoundary(False, 2)):
        order.saw(*boundary)
    assert order.last_opened == 2


def test_places_of_fetches_are_kept_in_their_order() -> None:
    order, fetches = order_of(), {9: 1, 3: 0}
    assert not order.fetches
    order.follow_fetches(fetches)
    fetches.clear()
    assert [*order.fetches.items()] == [(9, 1), (3, 0)]
