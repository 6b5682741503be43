"""Counts of what was sent: the ring's bound for each operation, and the hash by which ranks compare their calls."""

import pytest

from shardwise.comm.trace import Traffic, TrafficCount
from shardwise.plan.exchange_calls import Operation


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all_gather", 9),
        ("reduce_scatter", 9),
        ("all_reduce", 18),
        ("broadcast", 9),
        ("barrier", 0),
        ("send", 12),
        ("all_to_all", 12),
    ],
)
def test_elements_of_a_rank_among_four(operation: Operation, sent: int) -> None:
    traffic = Traffic()
    traffic.add(operation, "weights", 12, 2, ranks=4)
    assert traffic.counts == {(operation, "weights", "dp"): TrafficCount(1, sent, 2 * sent)}
    assert traffic.bytes == 2 * sent


def test_totals_by_purpose() -> None:
    traffic = Traffic()
    traffic.add("send", "activations", 3, 4, ranks=2)
    traffic.add("send", "activations", 5, 4, ranks=2)
    traffic.add("send", "gradients", 7, 8, ranks=2)
    assert traffic.total("activations") == TrafficCount(2, 8, 32)
    assert traffic.total("activations", "gradients") == traffic.total() == TrafficCount(3, 15, 88)
    assert traffic.total("keys") == TrafficCount()
    traffic.clear()
    assert traffic.total() == TrafficCount() and traffic.bytes == 88


def hashed(*calls: tuple[Operation, str, int, str]) -> int:
    traffic = Traffic()
    for operation, what, elements, axis in calls:
        traffic.add(operation, "weights", elements, 4, 2, what, axis)
    return traffic.sequence


def test_the_hash_tells_other_calls_and_another_order() -> None:
    one, other = ("all_gather", "a", 8, "dp"), ("all_reduce", "b", 8, "dp")
    assert hashed(one, other) == hashed(one, other)
    assert (
        len({hashed(one, other), hashed(other, one), hashed(one), hashed(("all_gather", "c", 8, "dp"))}) == 4
    )
    assert hashed(("all_gather", "a", 9, "dp")) != hashed(one)


def test_the_hash_leaves_out_what_may_differ_between_ranks() -> None:
    assert hashed(("all_reduce", "a", 8, "tp")) == 0
    assert hashed(("all_to_all", "a", 8, "dp")) == hashed(("all_to_all", "a", 9, "dp")) != 0


def test_counts_tell_axes_apart() -> None:
    traffic = Traffic()
    for axis in ("dp", "tp", "tp"):
        traffic.add("all_reduce", "control", 4, 8, ranks=2, axis=axis)
    assert traffic.counts == {
        ("all_reduce", "control", "dp"): TrafficCount(1, 4, 32),
        ("all_reduce", "control", "tp"): TrafficCount(2, 8, 64),
    }
    assert traffic.total("control") == TrafficCount(3, 12, 96)
