"""Messages of rows in 16 and 8 bits: bytes, errors and means."""

import math

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables import wire as wire_module
from shardwise.kernels.tables.rounding import word_of
from shardwise.kernels.tables.wire import RowWire, WireName

SMALLER: list[WireName] = ["bf16", "fp16", "int8"]
UNIT = {"bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 1 / 127}
"""Distance of neighbours near a number, relative to the number; for int8, to the largest of the row."""


def wire_of(name: WireName) -> RowWire:
    return RowWire(name, torch.float32)


def sent(wire: RowWire, rows: Tensor, word: int | None = None) -> Tensor:
    return wire.unpacked(wire.packed(rows, word).view(-1), rows.shape[1])


@pytest.mark.parametrize(("name", "expected"), [("fp32", 24), ("bf16", 12), ("fp16", 12), ("int8", 10)])
def test_bytes_of_a_row(name: WireName, expected: int) -> None:
    wire, rows = wire_of(name), torch.randn(5, 6)
    assert wire.packed(rows).nbytes == wire.packed(rows, 3).nbytes == 5 * expected == 5 * wire.row_bytes(6)
    assert wire.packed(rows).shape == (5, wire.width(6)) and wire.packed(rows).itemsize == wire.itemsize
    for empty in (torch.empty(0, 6), torch.empty(4, 0)):
        assert (
            wire.packed(empty).numel()
            == wire.packed(empty, 3).numel()
            == len(empty) * wire.width(empty.shape[1])
        )
    assert sent(wire, torch.empty(0, 6)).shape == (0, 6)
    torch.testing.assert_close(sent(wire, rows[:1]), rows[:1], rtol=0, atol=0.05)


def test_fp32_is_not_touched() -> None:
    rows = torch.randn(3, 4, dtype=torch.float64)
    assert wire_of("fp32").packed(rows, 1) is rows
    assert torch.equal(sent(RowWire("fp32", torch.float64), rows), rows)


@pytest.mark.parametrize("name", SMALLER)
def test_vectors_go_to_the_nearest(name: WireName) -> None:
    rows = torch.randn(40, 6)
    found, unit = sent(wire_of(name), rows), UNIT[name]
    size = rows.abs().amax(1, keepdim=True) if name == "int8" else rows.abs()
    assert bool(((found - rows).abs() <= size * unit / 2 * 1.001).all())
    assert sent(RowWire(name, torch.float64), rows.double()).dtype == torch.float64


@pytest.mark.parametrize("name", SMALLER)
def test_gradients_are_exact_in_the_mean(name: WireName) -> None:
    """Each becomes one of its two neighbours. Numbers below the smallest of fp16 are not lost."""
    small = [0.002, -0.0003] if name == "int8" else [3e-6, -2e-8]
    rows = torch.tensor([[0.3337, -1.001, 0.0, *small]]).repeat(20_000, 1)
    found = sent(wire_of(name), rows, word_of(1, 2, 3))
    for column in range(rows.shape[1]):
        number, values = float(rows[0, column]), found[:, column].double()
        if number == 0 or (name == "int8" and column == 1):  # the largest of its row
            assert values.unique().numel() == 1 and float(values[0]) == pytest.approx(number, rel=1e-6)
            continue
        low, high = float(values.min()), float(values.max())
        assert low < number < high and values.unique().numel() == 2, (number, low, high)
        share = (number - low) / (high - low)
        bound = 4.5 * math.sqrt(share * (1 - share) / len(values)) + 2.0**-13
        assert float((values == high).double().mean()) == pytest.approx(share, abs=bound)


@pytest.mark.parametrize("name", SMALLER)
def test_messages_differ_by_their_word(name: WireName) -> None:
    rows, wire = torch.randn(20, 5), wire_of(name)
    first = wire.packed(rows, word_of(1))
    assert torch.equal(first, wire.packed(rows, word_of(1)))
    assert not torch.equal(first, wire.packed(rows, word_of(2)))


def test_the_loop_draws_what_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, word = torch.randn(20, 5), word_of(9)
    compiled = wire_module._shares(rows, word)
    monkeypatch.setattr(wire_module, "runs_compiled", lambda *tensors: False)
    assert torch.equal(compiled, wire_module._shares(rows, word))


@pytest.mark.parametrize("name", SMALLER)
@pytest.mark.parametrize("word", [None, 5])
def test_numbers_that_are_not_finite_arrive_as_such(name: WireName, word: int | None) -> None:
    rows = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [1.0, 2.0]])
    found = sent(wire_of(name), rows, word)
    assert [bool(row.isfinite().all()) for row in found] == [False, False, True]


def test_fp16_ends_at_65504() -> None:
    rows = torch.tensor([[65504.0, 1e5]])
    for word in (None, 1):
        assert sent(wire_of("fp16"), rows, word).tolist() == [[65504.0, float("inf")]]
