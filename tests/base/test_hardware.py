"""Rates of hardware: the share of the peak that an operation reaches, and the seconds that follow from it."""

import math
from dataclasses import replace

import pytest

from shardwise.base.hardware import ASSUMED_HARDWARE, Hardware, Link, Product, even_hardware

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
