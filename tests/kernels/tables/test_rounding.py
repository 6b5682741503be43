"""Rows of 16 bits: widened exactly, rounded by random numbers of the row, the column and the step."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.tables import pooling, rounding
from shardwise.kernels.tables.keys import mix
from shardwise.kernels.tables.pooling import Pooling, gather, plain_pool, pool
from shardwise.kernels.tables.rounding import narrow, plain_narrow, row_ids, widen, word_of

KINDS: list[tuple[Pooling, bool]] = [("sum", False), ("mean", False), ("max", False), ("sum", True)]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e-39, 3.0e38, 1 / 3]


def rounded(x: Tensor, ids: Tensor, word: int = 7, column: int = 0) -> Tensor:
    """``x`` [U, D] rounded into memory in another order than that of its rows."""
    into = torch.zeros(len(x), x.shape[1], dtype=torch.bfloat16)
    places = torch.arange(len(x)).flip(0)
    narrow(x, 0, into, places, ids, word, column)
    return into[places]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize(("kind", "weighted"), KINDS)
def test_vectors_are_those_of_the_rows_in_fp32(kind: Pooling, weighted: bool) -> None:
    rows, index = torch.randn(9, 5).bfloat16(), torch.randint(0, 9, (40,))
    offsets, weights = torch.tensor([0, 3, 3, 11, 40]), torch.rand(40) if weighted else None
    wide = pool(rows.float(), index, offsets, kind, weights)
    for found in (pool(rows, index, offsets, kind, weights), plain_pool(rows, index, offsets, kind, weights)):
        assert found.values.dtype == torch.float32 and torch.equal(found.values, wide.values)
        assert kind != "max" or torch.equal(found.places, wide.places)


def test_rows_are_widened_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, index = torch.tensor([SPECIAL, [-x for x in SPECIAL]]).bfloat16(), torch.tensor([1, 0, 1])
    lines = torch.zeros(3, 2 + rows.shape[1])
    for is_compiled in (True, False):
        if not is_compiled:
            for module in (pooling, rounding):
                monkeypatch.setattr(module, "runs_compiled", lambda *tensors: False)
        torch.testing.assert_close(gather(rows, index), rows[index].float(), rtol=0, atol=0, equal_nan=True)
        widen(rows, index, lines, 2)
        torch.testing.assert_close(lines[:, 2:], rows[index].float(), rtol=0, atol=0, equal_nan=True)
    widen(rows.float(), index, lines, 2)
    torch.testing.assert_close(lines[:, 2:], rows[index].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("column", [0, 3])
def test_the_loop_has_the_references_bits(column: int) -> None:
    x = torch.cat([torch.randn(30, 9) * 10.0 ** torch.randint(-30, 30, (30, 1)), torch.tensor([SPECIAL])])
    ids = mix(torch.arange(31) - 15)
    assert torch.equal(bits(rounded(x, ids, column=column)), bits(plain_narrow(x, ids, 7, column)))
    kept = rounded(torch.tensor([SPECIAL]), ids[:1])[0]
    assert torch.equal(kept[2:4].float(), torch.tensor(SPECIAL[2:4])) and bool(kept[4].isnan())


def test_the_mean_is_exact() -> None:
    """A number between two of 16 bits becomes one of them, the upper one as often as the number is near to it."""
    for number in (1.001, -0.3337, 1.3 * 2.0**-130):
        x = torch.full((20_000, 4), number)
        low, high = (
            float(f(x[:1, 0].view(torch.int32) >> 16 << 16).view(torch.float32)) for f in (_same, _next)
        )
        found = rounded(x, mix(torch.arange(20_000))).float()
        assert {*found.unique().tolist()} == {low, high}
        share = (number - low) / (high - low)
        bound = 4.5 * (share * (1 - share) / found.numel()) ** 0.5
        assert float((found == high).double().mean()) == pytest.approx(share, abs=bound)


def _same(word: Tensor) -> Tensor:
    return word


def _next(word: Tensor) -> Tensor:
    return word + (1 << 16)


def test_numbers_of_16_bits_stay() -> None:
    x = torch.randn(50, 7).bfloat16().float()
    assert torch.equal(rounded(x, mix(torch.arange(50))).float(), x)


def test_each_row_column_and_step_has_its_own_draw() -> None:
    """With a key or a step left out, rows or steps would be rounded alike, and errors would add up."""
    x = torch.full((64, 8), 1.004)
    keys = torch.arange(64)
    ids = row_ids(5, keys)
    first = rounded(x, ids, word_of(1))
    assert len({tuple(row) for row in first.float().tolist()}) > 32, "rows differ"
    assert len({tuple(column) for column in first.float().t().tolist()}) == 8, "columns differ"
    assert not torch.equal(first, rounded(x, ids, word_of(2))), "steps differ"
    assert not torch.equal(first, rounded(x, row_ids(6, keys), word_of(1))), "tables differ"
    both = row_ids([5, 6], torch.cat([keys, keys]), torch.tensor([0, 1]).repeat_interleave(64))
    assert torch.equal(both, torch.cat([ids, row_ids(6, keys)]))


def test_a_draw_depends_on_nothing_else() -> None:
    x, ids = torch.randn(64, 8), row_ids(5, torch.arange(64))
    whole, order = rounded(x, ids), torch.randperm(64)
    assert torch.equal(rounded(x[order], ids[order]), whole[order])
    assert torch.equal(torch.cat([rounded(x[:, :3], ids), rounded(x[:, 3:], ids, column=3)], 1), whole)


def test_words_depend_on_each_number_and_their_order() -> None:
    words = [word_of(*numbers) for numbers in ((1,), (2,), (1, 2), (2, 1), (1, 2, 0), (-1,), (1 << 63,))]
    assert len({*words}) == len(words) and all(-(1 << 63) <= word < 1 << 63 for word in words)
