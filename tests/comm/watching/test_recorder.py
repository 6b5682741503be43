"""Records come back as they were written, from a file that nobody closed; a full disk does not stop the writer."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.comm.watching import recorder
from shardwise.comm.watching.recorder import (
    SLOTS,
    Event,
    Recorder,
    RingOwner,
    give_back,
    ranges_text,
    ring_path,
    shared_recorder,
)
from shardwise.comm.watching.rings import RankRing, parse_ring, read_ring
from shardwise.plan.action import Action, F, Kind

OWNER = RingOwner(1, 4, "host")


def in_memory(made: Recorder) -> RankRing:
    return parse_ring(made.data(), Path("memory"))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Recorder]:
    yield Recorder(ring_path(tmp_path, 1), OWNER)


def test_records_come_back_from_a_file_that_nobody_closed(made: Recorder) -> None:
    made.step = 7
    made.action(F(2, 5))
    made.action(Action(Kind.UNSHARD, 3, 5))
    group = made.group("ranks 0-3")
    place = made.start(group, "all_gather", torch.bfloat16, 1 << 40, "Unit blocks.3")
    made.wait("all_gather", "Unit blocks.3", place)
    made.waited()
    made.step_ended()
    assert made.path is not None
    ring = read_ring(made.path)
    assert (ring.rank, ring.ranks, ring.pid, ring.has_left) == (1, 4, os.getpid(), False)
    events = [record.event for record in ring.records]
    assert events == [Event.ACTION, Event.ACTION, Event.START, Event.WAIT, Event.WAITED, Event.STEP]
    assert [str(record.action) for record in ring.records[:2]] == ["F(2,5)", "UNSHARD(u3,5)"]
    call = ring.records[2].call
    assert call is not None and call.site.startswith(f"{__file__}:") and "nobody_closed" in call.site
    assert (call.group, call.number, call.operation, call.what) == (
        "ranks 0-3",
        1,
        "all_gather",
        "Unit blocks.3",
    )
    assert (call.dtype, call.elements) == ("bfloat16", 1 << 40)
    assert {record.step for record in ring.records} == {7} and made.step == 8


def test_the_oldest_records_are_overwritten(made: Recorder) -> None:
    for microbatch in range(SLOTS + 10):
        made.action(F(0, microbatch))
    found = in_memory(made).records
    assert [record.action and record.action.microbatch for record in found] == [*range(10, SLOTS + 10)]


def test_the_call_site_is_that_of_each_caller(made: Recorder) -> None:
    """The depth of the user's frame is kept for a caller; another stack above the same caller has another depth."""
    group = made.group("ranks 0,1")

    def exchange() -> None:
        made.start(group, "barrier", None, 0, "x")

    def deeper(count: int) -> None:
        exchange() if count == 0 else deeper(count - 1)

    code = exchange.__code__
    made._codes[id(code)] = code, recorder._PACKAGE
    for count in (0, 3, 1, 3):
        deeper(count)
    exchange()
    sites = [record.call.site for record in in_memory(made).records if record.call is not None]
    assert ["in deeper" in site for site in sites] == [True] * 4 + [False]


def test_a_second_group_of_one_name_has_a_number(made: Recorder) -> None:
    first, second = made.group("ranks 0,1"), made.group("ranks 0,1")
    assert made.name_of(made.start(first, "barrier", None, 0, "")) == "ranks 0,1"
    assert made.name_of(made.start(second, "barrier", None, 0, "")) == "ranks 0,1 (2)"


def test_names_without_room_are_left_out(made: Recorder) -> None:
    group = made.group("ranks 0,1")
    for number in range(2000):
        made.start(group, "barrier", None, 0, f"{number} " + "x" * 300)
    calls = [record.call for record in in_memory(made).records if record.call is not None]
    assert calls[0].what.startswith("0 xxx") and calls[-1].what == "" and calls[-1].number == 2000


def test_a_full_disk_leaves_the_records_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = Recorder(ring_path(tmp_path, 1), OWNER)
    made.action(F(0, 0))
    assert made.path is None and not list(tmp_path.iterdir())
    assert len(in_memory(made).records) == 1


def test_a_link_in_the_place_of_the_ring_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    ring_path(tmp_path, 1).symlink_to(precious)
    Recorder(ring_path(tmp_path, 1), OWNER).action(F(0, 0))
    assert precious.read_text() == "kept" and not ring_path(tmp_path, 1).is_symlink()


def test_worlds_of_one_process_share_a_ring_until_the_last_leaves(tmp_path: Path) -> None:
    path = ring_path(tmp_path / "flight", 1)
    first, second = shared_recorder(path, OWNER), shared_recorder(path, OWNER)
    assert first is second
    give_back(first, removes=True)
    assert not read_ring(path).has_left
    give_back(second, removes=False)
    assert read_ring(path).has_left
    last = shared_recorder(path, OWNER)
    assert last is not first and not read_ring(path).has_left
    give_back(last, removes=True)
    assert not path.parent.exists()


def test_ranks_as_a_short_text() -> None:
    assert [ranges_text(ranks) for ranks in ((3,), (0, 1), (0, 1, 2), (0, 4, 8), (0, 5, 7))] == [
        "3",
        "0,1",
        "0-2",
        "0-8/4",
        "0,5,7",
    ]
