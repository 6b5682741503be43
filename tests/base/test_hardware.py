"""Rates of hardware: the share of the peak that an operation reaches, and the seconds that follow from it."""

import math
from dataclasses import replace

import pytest

from shardwise.base.hardware import ASSUMED_HARDWARE, Hardware, Link, Neighbours, Product, even_hardware

TABLE = ((1e6, 0.1), (1e8, 0.5), (1e10, 0.8))


def hardware(**kinds: tuple[tuple[float, float], ...]) -> Hardware:
    return replace(
        ASSUMED_HARDWARE, peaks={"fp32": 1e12, "bf16": 4e12}, efficiency={"product": TABLE, **kinds}
    )


def test_the_share_is_interpolated_over_the_logarithm_of_the_flops() -> None:
    found = hardware()
    shares = [
        found.share_of_peak(Product("product", "fp32", int(10**power))) for power in (0, 6, 7, 8, 9, 10, 14)
    ]
    assert shares == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.65, 0.8, 0.8])
    assert found.share_of_peak(Product("product", "fp32", 0)) == 0.1
    middle = found.share_of_peak(Product("product", "fp32", 30_000_000))
    assert middle == pytest.approx(0.1 + 0.4 * math.log(30) / math.log(100))


def test_seconds_of_operations() -> None:
    """Larger operations of one dtype take longer, and reach at least the rate of smaller ones."""
    found = hardware()
    assert found.product_s(Product("product", "fp32", 10**8), calls=3) == pytest.approx(3 * 1e8 / 0.5e12)
    sizes = [int(10 ** (power / 4)) for power in range(20, 50)]
    seconds = [found.product_s(Product("product", "bf16", size)) for size in sizes]
    assert seconds == sorted(seconds)
    rates = [size / each for size, each in zip(sizes, seconds, strict=True)]
    assert all(later >= before * (1 - 1e-12) for before, later in zip(rates, rates[1:], strict=False))
    with pytest.raises(KeyError):
        found.product_s(Product("product", "fp8", 1))
    assert found.touched_s(12e9) == 2.0 and found.touched_s(1e9, "disk") == 1.0


def test_a_dtype_may_have_shares_of_its_own() -> None:
    found = hardware(**{"product bf16": ((1.0, 0.25),)})
    assert found.share_of_peak(Product("product", "bf16", 10**9)) == 0.25
    assert found.share_of_peak(Product("product", "fp32", 10**9)) == pytest.approx(0.65)
    assert (found.flops_s("bf16"), found.flops_s("fp32")) == (1e12, 0.8e12)


def test_even_hardware_reaches_one_rate() -> None:
    found = even_hardware(
        "even",
        2e9,
        host_bytes_s=3,
        device_bytes_s=4,
        link_bytes_s=5,
        disk_bytes_s=6,
        exchange_bytes_s=7,
        message_s=8,
    )
    assert found.product_s(Product("attention", "bf16", 2)) == 1e-9
    assert found.memory_bytes_s == {"device": 4, "host": 3, "disk": 6} and found.links["device"] == Link(5, 0)
    assert found.links["host"] == found.links["cluster"] == Link(7, 8)


def test_operations_have_rates_by_class_and_size() -> None:
    given = replace(
        ASSUMED_HARDWARE, operations={"function": ((1e6, 4e9), (1e8, 1e9)), "update": ((1.0, 5e10),)}
    )
    assert given.operation_bytes_s("function", 1e7) == pytest.approx(2e9), (
        "between two sizes, over the logarithms"
    )
    assert (
        given.operation_bytes_s("function", 1.0) == 4e9 and given.operation_bytes_s("function", 1e12) == 1e9
    )
    assert given.operation_bytes_s("copy", 1e7, "disk") == 1e9, (
        "a class without rates is priced by the memory"
    )
    assert given.best_bytes_s("host") == 6e9, "updates are no part of a pass"
    faster = replace(given, operations={"copy": ((1e6, 9e9), (1e7, 8e9))})
    assert faster.best_bytes_s("host") == 9e9


def test_ranks_wait_for_the_last_of_them() -> None:
    given = replace(ASSUMED_HARDWARE, neighbours=Neighbours(((1e-3, 0.1), (1e-1, 0.025))))
    assert given.late_s(1e-3, 2) == pytest.approx(1e-4) and given.late_s(1e-2, 2) == pytest.approx(
        1e-2 * 0.05
    )
    waits = [given.late_s(1e-2, ranks) for ranks in (1, 2, 4, 8, 64)]
    assert waits[0] == 0.0 and waits == sorted(set(waits))
    # Expected largest of two and of eight normal numbers: 0.564 and 1.424 of their deviation.
    assert waits[3] / waits[1] == pytest.approx(1.424 / 0.564, rel=0.06)
    assert given.late_s(0.0, 2) == 0.0 and ASSUMED_HARDWARE.late_s(1.0, 64) == 0.0


def test_batches_of_small_products_may_have_shares_of_their_own() -> None:
    batched = Product("batched", "fp32", 10**8)
    assert hardware().share_of_peak(batched) == 0.5, "those of products, if there are no others"
    own = hardware(**{"product bf16": ((1.0, 0.25),)})
    assert own.share_of_peak(batched._replace(dtype="bf16")) == 0.25
    assert hardware(batched=((1.0, 0.2),)).share_of_peak(batched) == 0.2
