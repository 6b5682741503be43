"""An error of the disk is raised where it occurs, unless a caller tells the other ranks."""

import pytest

from shardwise.base.errors import TierError
from shardwise.parallel.embedding.rows.disk_faults import DiskFaults

FIRST, SECOND = TierError("first"), TierError("second")


def test_an_error_is_raised_where_nobody_tells_the_others() -> None:
    faults = DiskFaults()
    with pytest.raises(TierError, match="first"), faults.kept():
        raise FIRST
    assert not faults.is_pending


def test_the_first_error_is_kept_until_it_is_taken() -> None:
    faults = DiskFaults()
    with faults.deferred():
        with faults.deferred(), faults.kept():
            raise FIRST
        with faults.kept():
            raise SECOND
    assert faults.is_pending
    assert faults.take() is FIRST and faults.take() is None


def test_other_errors_are_raised() -> None:
    faults = DiskFaults()
    with pytest.raises(ValueError, match="no disk"), faults.deferred(), faults.kept():
        raise ValueError("no disk")


def test_an_error_behind_the_numbers_of_a_step_is_of_the_next() -> None:
    faults = DiskFaults()
    faults.note_for_next(FIRST)
    assert not faults.is_pending
    faults.begin_numbers()
    assert faults.take() is FIRST
    faults.begin_numbers()
    assert not faults.is_pending
