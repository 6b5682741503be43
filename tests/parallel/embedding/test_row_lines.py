"""Lines of rows: written, read, updated, and moved as bytes."""

import pytest
import torch

from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_rules import Adam, RowOptimizer, RowwiseAdagrad, Sgd
from shardwise.parallel.embedding.row_lines import RowLines

PLACES = torch.tensor([4, 0, 2])


def lines_of(optimizer: RowOptimizer, width: int = 3, dtype: torch.dtype = torch.float32) -> RowLines:
    lines = RowLines(5, width, optimizer, dtype, torch.device("cpu"))
    lines.write(slice(0, 5), torch.arange(5 * lines.columns, dtype=dtype).view(5, -1) + 1)
    return lines


@pytest.mark.parametrize("optimizer", [Sgd(), RowwiseAdagrad(), Adam(exact=True)], ids=str)
def test_lines_move_as_bytes(optimizer: RowOptimizer) -> None:
    lines, other = lines_of(optimizer), lines_of(optimizer)
    moved = lines.to_bytes(PLACES)
    assert moved.dtype == torch.uint8 and moved.shape == (3, lines.line_bytes)
    other.write(slice(0, 5), torch.zeros(5, lines.columns))
    other.from_bytes(torch.tensor([1, 3, 0]), moved)
    assert torch.equal(other.weights(torch.tensor([1, 3, 0])), lines.weights(PLACES))
    ours, theirs = lines.stored(PLACES)[1], other.stored(torch.tensor([1, 3, 0]))[1]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not other.weights(torch.tensor([2, 4])).any(), "other places are untouched"
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
    assert lines_of(Sgd(), dtype=torch.float64).line_bytes == 3 * 8
