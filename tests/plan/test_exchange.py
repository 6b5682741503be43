"""The way in which ranks sum a gradient: bytes by brute force, and what ``auto`` takes."""

import itertools

import pytest

from shardwise.plan.exchange import Asked, GradientExchange, Way, Widths

BF16_SUMMED_IN_FP32 = Widths(2, 4, 4)
BF16_ON_EVERY_WIRE = Widths(2, 2, 4)
FP32 = Widths(4, 4, 4)


def crossing_by_messages(way: Way, hosts: int, per_host: int, elements: int, widths: Widths) -> int:
    """Bytes that leave host 0 if every message of the ranks is looked at."""
    ranks = range(hosts * per_host)
    piece = elements // len(ranks)
    found = 0
    for source, target in itertools.product(ranks, ranks):
        if source // per_host == target // per_host or source // per_host:
            continue
        if way == "all_to_all":
            found += piece * widths.wire
        elif source % per_host == target % per_host:
            found += piece * widths.between
    return found


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 8), (4, 4), (8, 8)])
@pytest.mark.parametrize("widths", [BF16_SUMMED_IN_FP32, BF16_ON_EVERY_WIRE, FP32])
@pytest.mark.parametrize("way", ["all_to_all", "two_level"])
def test_bytes_on_the_link_are_those_of_the_messages(
    hosts: int, per_host: int, widths: Widths, way: Way
) -> None:
    elements = 64 * hosts * per_host
    exchange = GradientExchange(way, hosts * per_host, hosts)
    told = exchange.crossing_bytes(elements, widths)
    assert told == crossing_by_messages(way, hosts, per_host, elements, widths)
    if widths.between == widths.wire:
        n = hosts * per_host
        assert exchange.sent_bytes(elements, widths) == elements * (n - 1) // n * widths.wire


@pytest.mark.parametrize(
    ("exchange", "widths", "way"),
    [
        (GradientExchange("auto", 8), BF16_SUMMED_IN_FP32, "all_to_all"),
        (GradientExchange("auto", 8), FP32, "sum"),
        (GradientExchange("auto", 8, is_native=True), FP32, "sum"),
        (GradientExchange("auto", 64, 8, is_native=True), FP32, "sum"),
        (GradientExchange("auto", 64, 8, is_native=True), BF16_SUMMED_IN_FP32, "two_level"),
        (GradientExchange("auto", 64, 8, is_native=True), BF16_ON_EVERY_WIRE, "two_level"),
        (GradientExchange("auto", 64, 8, False, is_native=True), BF16_SUMMED_IN_FP32, "sum"),
        (GradientExchange("auto", 8, 8, False, is_native=True), BF16_SUMMED_IN_FP32, "all_to_all"),
        (GradientExchange("auto", 64, 8), FP32, "two_level"),
        (GradientExchange("auto", 12, 5, False), BF16_SUMMED_IN_FP32, "all_to_all"),
        (GradientExchange("sum", 8), BF16_SUMMED_IN_FP32, "sum"),
        (GradientExchange("sum", 8), Widths(4, 4, 2), "all_to_all"),
        (GradientExchange("two_level", 8), BF16_SUMMED_IN_FP32, "all_to_all"),
        (GradientExchange("all_to_all", 64, 8, is_native=True), BF16_SUMMED_IN_FP32, "all_to_all"),
    ],
)
def test_the_way(exchange: GradientExchange, widths: Widths, way: Way) -> None:
    assert exchange.way(widths) == way


@pytest.mark.parametrize("asked", ["sum", "all_to_all", "two_level"])
@pytest.mark.parametrize("widths", [BF16_SUMMED_IN_FP32, BF16_ON_EVERY_WIRE, FP32])
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 8), (8, 8), (16, 8)])
@pytest.mark.parametrize("is_native", [True, False])
def test_auto_sends_no_more_than_any_way(
    asked: Asked, widths: Widths, hosts: int, per_host: int, is_native: bool
) -> None:
    """A backend's own sum of equal widths is the exception: it enters each host once on its own."""
    if is_native and widths.wire == widths.total:
        pytest.skip("the backend's own sum")
    elements = 64 * hosts * per_host
    auto, other = (
        GradientExchange(each, hosts * per_host, hosts, True, is_native) for each in ("auto", asked)
    )
    assert auto.crossing_bytes(elements, widths) <= other.crossing_bytes(elements, widths)


def test_legs_add_up_to_what_is_sent() -> None:
    exchange = GradientExchange("two_level", 8, 2)
    assert exchange.legs(1024, BF16_SUMMED_IN_FP32) == [(1024, 2, 4), (256, 4, 2)]
    assert exchange.sent_bytes(1024, BF16_SUMMED_IN_FP32) == 768 * 2 + 128 * 4
