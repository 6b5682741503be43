"""Rows of which only some are in memory: what a step needs is there before it, and an error is kept for all ranks."""

import logging

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import TierError
from shardwise.kernels.tables.row_rules import RowwiseAdagrad
from shardwise.parallel.embedding.rows.disk_faults import DiskFaults
from shardwise.parallel.embedding.rows.row_lines import RowLines
from shardwise.parallel.embedding.rows.rows_in_tiers import RowsInTiers
from shardwise.parallel.embedding.rules import RowDtypes
from shardwise.tiers.row_cache import LineMemory
from tests.tiers.shelf import Shelf

PLACES, FP32 = 6, torch.float32


def lines_of(places: int) -> RowLines:
    return RowLines(places, range(2), 2, RowwiseAdagrad(), FP32, RowDtypes(FP32, FP32), torch.device("cpu"))


def draw(memory: LineMemory, places: Tensor, rows: Tensor) -> None:
    """A start line is its row, three times."""
    memory.from_bytes(places, rows.float()[:, None].expand(-1, 3).contiguous().view(torch.uint8))


def made() -> tuple[RowsInTiers, RowLines, Shelf, DiskFaults]:
    lines, shelf, faults = lines_of(PLACES), Shelf(), DiskFaults()
    return RowsInTiers(lines, lines_of(4), shelf, draw, lambda rows: rows, faults), lines, shelf, faults


def fail(rows: Tensor) -> None:
    raise TierError("the disk fails")


def test_what_a_step_needs_is_brought_before_it() -> None:
    tiers, lines, shelf, faults = made()
    rows = torch.tensor([9, 2, 5])
    tiers.bring(rows)
    shelf.before_read = shelf.before_write = fail
    places = tiers.places_of_step(rows)
    assert torch.equal(lines.weights(places)[:, 0], rows.float()) and not faults.is_pending
    assert torch.equal(tiers.places_of_step(rows.clone()), places), "other tensors are looked up"


def test_more_rows_than_places_are_left_to_the_refusal_of_the_step() -> None:
    tiers, _, _, faults = made()
    tiers.bring(torch.arange(PLACES + 1))
    assert not faults.is_pending and tiers.take_figures().misses == 0


def test_an_error_of_what_a_step_needs_is_kept() -> None:
    tiers, lines, shelf, faults = made()
    lines.memory[tiers.lend(torch.arange(PLACES), changes=True)] = 1.0
    shelf.before_write = fail
    tiers.bring(torch.tensor([7]))
    assert str(faults.take()) == "the disk fails"
    shelf.before_write = lambda rows: None
    tiers.bring(torch.tensor([7]))
    assert not faults.is_pending and tiers.take_figures().misses == PLACES + 1


def test_rows_go_in_and_out_through_the_window() -> None:
    tiers, lines, shelf, faults = made()
    lines.memory[tiers.lend(torch.tensor([3, 1]), changes=True)] = 8.0
    put = torch.arange(30).view(10, 3).float()
    tiers.put(torch.arange(10, 20), put)
    weights, state = tiers.stored(torch.tensor([1, 10, 4, 19, 3, 11]), None, False)
    assert weights[:, 0].tolist() == [8.0, 0.0, 4.0, 27.0, 8.0, 3.0]
    assert state["row_sum"][:, 0].tolist() == [8.0, 2.0, 4.0, 29.0, 8.0, 5.0]
    (read,) = tiers.begin_save(None, [], []).read(torch.tensor([12, 3, 13, 14, 15]))
    assert read[:, 0].tolist() == [6.0, 8.0, 9.0, 12.0, 15.0]
    shelf.before_read = fail
    with pytest.raises(TierError):
        tiers.stored(torch.tensor([10]), None, True)
    with faults.deferred():
        weights, _ = tiers.stored(torch.tensor([10, 12]), None, True)
    assert len(weights) == 2 and faults.is_pending


def test_compaction_that_fails_is_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers, lines, shelf, faults = made()
    lines.memory[tiers.lend(torch.arange(PLACES), changes=True)] = 1.0
    tiers.lend(torch.tensor([7, 8]))
    monkeypatch.setattr(shelf, "compact", fail)
    with caplog.at_level(logging.WARNING):
        tiers.end_step()
    assert "the disk fails; the next step is refused" in caplog.text and not faults.is_pending
    faults.begin_numbers()
    assert faults.is_pending
