"""Lines of rows: written, read, updated, and moved as bytes."""

import pytest
import torch

from shardwise.kernels.tables.rounding import plain_narrow, word_of
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_replay import StepHistory
from shardwise.kernels.tables.row_rules import Adam, RowOptimizer, RowwiseAdagrad, Sgd
from shardwise.parallel.embedding.rows import row_lines
from shardwise.parallel.embedding.rows.row_lines import Rounding, RowLines
from shardwise.parallel.embedding.rules import RowDtypes

PLACES = torch.tensor([4, 0, 2])


FP32, BF16 = torch.float32, torch.bfloat16


def lines_of(
    optimizer: RowOptimizer, weights: torch.dtype = FP32, state: torch.dtype = FP32, dtype: torch.dtype = FP32
) -> RowLines:
    lines = RowLines(5, range(3), 3, optimizer, dtype, RowDtypes(weights, state), torch.device("cpu"))
    lines.write(slice(0, 5), torch.arange(5 * lines.columns, dtype=dtype).view(5, -1) + 1)
    return lines


@pytest.mark.parametrize(("weights", "state"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP32, BF16)])
@pytest.mark.parametrize("optimizer", [Sgd(), RowwiseAdagrad(), Adam(exact=True)], ids=str)
def test_lines_move_as_bytes(optimizer: RowOptimizer, weights: torch.dtype, state: torch.dtype) -> None:
    lines, other = (lines_of(optimizer, weights, state) for _ in range(2))
    moved = lines.to_bytes(PLACES)
    assert moved.dtype == torch.uint8 and moved.shape == (3, lines.line_bytes)
    other.write(slice(0, 5), torch.zeros(5, lines.columns))
    other.from_bytes(torch.tensor([1, 3, 0]), moved)
    assert torch.equal(other.weights(torch.tensor([1, 3, 0])), lines.weights(PLACES))
    ours, theirs = lines.stored(PLACES)[1], other.stored(torch.tensor([1, 3, 0]))[1]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not other.weights(torch.tensor([2, 4])).any(), "other places are untouched"
    other.write(slice(0, 5), torch.zeros(5, lines.columns))
    for place, line in enumerate(moved.split(1)):
        other.from_bytes(torch.tensor([place]), line)
    assert torch.equal(other.to_bytes(torch.arange(3)), moved), "one line begins at any byte"
    kept = torch.empty_like(moved)
    assert lines.to_bytes(PLACES, kept) is kept and torch.equal(kept, moved)


def test_an_update_is_that_of_the_kernel() -> None:
    lines, grads = lines_of(RowwiseAdagrad()), torch.randn(3, 3)
    expected = lines.memory.clone()
    update(RowwiseAdagrad(), expected, PLACES, grads, lr=0.1, step=1, scale=0.5)
    lines.update(PLACES, grads, lr=0.1, step=1, scale=0.5, mean_squares=None)
    assert torch.equal(lines.memory, expected)
    weights, state = lines.stored(PLACES)
    assert torch.equal(weights, expected[PLACES, :3]) and torch.equal(state["row_sum"], expected[PLACES, 3:])


def test_bytes_of_lines() -> None:
    assert lines_of(Adam()).line_bytes == 9 * 4 and lines_of(Sgd()).nbytes == 5 * 3 * 4
    assert lines_of(Sgd(), torch.float64, torch.float64, torch.float64).line_bytes == 3 * 8
    assert (
        lines_of(Adam(), BF16).line_bytes == 3 * 2 + 6 * 4
        and lines_of(Adam(), BF16, BF16).line_bytes == 9 * 2
    )
    assert lines_of(Sgd(), BF16).nbytes == lines_of(Sgd()).nbytes / 2
    for each in (lines_of(Adam(), BF16), lines_of(Adam(), BF16, BF16), lines_of(Adam(), FP32, BF16)):
        assert sum(tensor.nbytes for tensor in each.tensors) == each.nbytes


@pytest.mark.parametrize("optimizer", [Sgd(), RowwiseAdagrad(), Adam()], ids=str)
def test_lines_of_16_bits_are_updated_in_fp32_and_rounded(
    optimizer: RowOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and state are those of an update in fp32, rounded by the numbers of their columns, in any pieces."""
    for piece_bytes in (1 << 18, 1):
        monkeypatch.setattr(row_lines, "_WIDENED_BYTES", piece_bytes)
        lines, grads = lines_of(optimizer, BF16, BF16), torch.randn(3, 3) * 0.01
        wide = torch.cat([tensor[PLACES].float() for tensor in lines.tensors], 1)
        update(optimizer, wide, torch.arange(3), grads, lr=0.1, step=1, scale=0.5)
        ids, word = torch.tensor([11, -5, 7]), word_of(1)
        untouched = lines.to_bytes(torch.tensor([1, 3]))
        lines.update(
            PLACES, grads, lr=0.1, step=1, scale=0.5, mean_squares=None, rounding=Rounding(ids, word)
        )
        assert torch.equal(lines.memory[PLACES], plain_narrow(wide[:, :3], ids, word, 0))
        assert torch.equal(lines.to_bytes(torch.tensor([1, 3])), untouched)
        if lines.state is not None:
            assert torch.equal(lines.state[PLACES], plain_narrow(wide[:, 3:], ids, word, 3))


def test_state_in_fp32_is_not_rounded() -> None:
    lines, grads = lines_of(RowwiseAdagrad(), BF16), torch.randn(3, 3)
    expected = lines_of(RowwiseAdagrad())
    expected.memory[:, :3] = lines.memory.float()
    expected.update(PLACES, grads, lr=0.1, step=1, scale=1.0, mean_squares=None)
    rounding = Rounding(torch.arange(3), 1)
    lines.update(PLACES, grads, lr=0.1, step=1, scale=1.0, mean_squares=None, rounding=rounding)
    assert torch.equal(lines.stored(PLACES)[1]["row_sum"], expected.stored(PLACES)[1]["row_sum"])
    torch.testing.assert_close(lines.weights(PLACES), expected.weights(PLACES), rtol=2**-7, atol=0)


def test_columns_of_a_row_on_several_ranks_have_one_step() -> None:
    """A row is saved with one step; columns on each rank would rest from different steps on."""
    optimizer, device = Adam(exact=True), torch.device("cpu")
    history, grads = StepHistory(optimizer), torch.tensor([[1.0, 1e-9, 1e3, 1e-3]])
    parts = [range(4), range(2), range(2, 4)]
    held = [RowLines(2, columns, 4, optimizer, FP32, RowDtypes(FP32, FP32), device) for columns in parts]
    row = torch.tensor([1])
    for columns, lines in zip(parts, held, strict=True):
        mine = slice(columns.start, columns.stop)
        lines.update(row, grads[:, mine].contiguous(), lr=0.1, step=1, scale=1.0, mean_squares=None)
    for _ in range(1000):
        history.append(0.1)
    for lines in held:
        lines.catch_up(history, row, None)
    whole, first, second = held
    assert torch.equal(torch.cat([first.weights(row), second.weights(row)], 1), whole.weights(row))
    steps = [float(lines.stored(row)[1]["step"]) for lines in held]
    assert steps[0] < 500 and steps[1:] == [1000, 1000]
    for lines in held:
        lines.catch_up(history, row, None, for_update=True)
    found = [lines.stored(row)[1]["exp_avg_sq"] for lines in held]
    torch.testing.assert_close(torch.cat(found[1:], 1), found[0], rtol=1e-4, atol=0)
    assert float(whole.stored(row)[1]["step"]) == 1000
