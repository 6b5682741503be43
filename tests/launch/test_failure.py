import os
import signal
from pathlib import Path

import pytest

from shardwise.base import errors
from shardwise.launch import failure
from shardwise.launch.failure import RankFailure, first


def at(rank: int, time_s: float, is_of_peers: bool = False) -> RankFailure:
    return RankFailure(rank, time_s, 1, f"rank {rank}", is_of_peers=is_of_peers)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([at(0, 5.0), at(1, 4.9), at(2, 5.1)], 1),
        ([at(0, 4.0, is_of_peers=True), at(1, 4.9)], 1),
        ([at(0, 4.0, is_of_peers=True), at(1, 9.0)], 0),
        ([at(0, 4.0, is_of_peers=True), at(1, 3.9, is_of_peers=True)], 1),
    ],
    ids=[
        "the earliest",
        "the cause close after its effect",
        "far apart they are two stories",
        "none but peers",
    ],
)
def test_which_failure_is_shown(failures: list[RankFailure], rank: int) -> None:
    assert first(failures).rank == rank


def raised(error: BaseException) -> RankFailure:
    try:
        raise error
    except BaseException as caught:
        return failure.of_exception(2, caught)


@pytest.mark.parametrize(
    ("error", "code", "headline", "is_of_peers", "is_answer"),
    [
        (ValueError("bad"), 1, "ValueError: bad", False, False),
        (KeyError(), 1, "KeyError", False, False),
        (errors.ConfigError("a key"), 2, "a key", False, True),
        (errors.MeshError("axes"), 2, "axes", False, True),
        (errors.DataError("empty"), 1, "empty", False, True),
        (errors.DeadlineError("rank 3 is late"), 1, "rank 3 is late", True, True),
        (
            RuntimeError("[x/gloo/pair.cc:1] closed"),
            1,
            "RuntimeError: [x/gloo/pair.cc:1] closed",
            True,
            False,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_rank_says_of_its_exception(
    error: BaseException, code: int, headline: str, is_of_peers: bool, is_answer: bool
) -> None:
    told = raised(error)
    assert (told.rank, told.code, told.headline) == (2, code, headline)
    assert (told.is_of_peers, told.is_answer) == (is_of_peers, is_answer)
    assert "Traceback (most recent call last)" in told.traceback and "in raised" in told.traceback


def test_a_cause_is_part_of_the_traceback() -> None:
    try:
        try:
            raise OSError("disk")
        except OSError as cause:
            raise ValueError("above it") from cause
    except ValueError as error:
        told = failure.of_exception(0, error)
    assert told.traceback.index("disk") < told.traceback.index("above it")


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_signal_is_named_and_counts_as_in_a_shell(status: int) -> None:
    told = failure.of_exit(1, 0.0, status)
    assert told.code == 128 - status
    assert signal.Signals(-status).name in told.headline


def test_a_record_is_read_back_whole(tmp_path: Path) -> None:
    told = raised(ValueError("ünïcödé and \udcff"))
    failure.write(told, tmp_path / "rank_00002.json")
    assert failure.read(tmp_path / "rank_00002.json", told.rank, 0.0) == told
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00002.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"7", b"[" * 100_000, b"\xff", b"{}", b'{"rank": 1}',
        b'{"rank":' + b"9" * 6000 + b"}",
        b'{"rank": 1, "time_s": NaN, "code": 1, "headline": "x"}',
        b'{"rank": 1, "time_s": 1.0, "code": 1, "headline": 7}',
        b'{"rank": 1, "time_s": 1.0, "code": 1e300, "headline": "x"}',
        b'{"rank": 1, "time_s": 1.0, "code": 1, "more": 1}',
        b'{"rank": 1, "time_s": 1.0, "code": ' + b"9" * 30 + b', "headline": "x"}',
    ],
)  # fmt: skip
def test_a_record_of_nonsense_is_a_failure_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank_00001.json"
    path.write_bytes(content)
    found = failure.read(path, 1, 5.0)
    assert (found.rank, found.time_s, found.code) == (1, 5.0, 1)
    assert "its record of the failure cannot be read (" in found.headline and len(found.headline) < 400


def test_a_record_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link", "."):
        assert "cannot be read" in failure.read(tmp_path / name, 1, 5.0).headline
