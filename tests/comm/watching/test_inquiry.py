"""The doctor asks a running job by a file, and reads a dead one from its rings: real ranks that hang in drawn ways."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.base.errors import DamagedError, UsageError
from shardwise.comm.rendezvous.handshake import identity
from shardwise.comm.watching import inquiry
from shardwise.comm.watching.answers import RankAnswer
from shardwise.comm.watching.inquiry import OwnFailure, inquire, ring_folder
from shardwise.comm.watching.recorder import Recorder, RingOwner, ring_path
from shardwise.plan.action import F
from tests.comm.watching.hangs import CONFIGS, WAYS, is_right, trial
from tests.ranks import RankPool

HOST = identity("").host


def ring(folder: Path, rank: int, ranks: int = 2, host: str = HOST) -> Recorder:
    made = Recorder(ring_path(folder, rank), RingOwner(rank, ranks, host))
    made.step = 3
    made.action(F(0, rank))
    made.snapshot(RankAnswer(time_ns=time.monotonic_ns()).model_dump_json().encode())
    return made


@pytest.mark.parametrize(
    ("way", "layout", "who"), [("stopped", "shared", 0), ("reader", "pipeline", 1)], ids=str
)
def test_the_rank_that_hangs_is_named_alive_and_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, layout: str, who: int
) -> None:
    monkeypatch.setattr(inquiry, "_PATIENCE_S", 1.0)
    pool = RankPool(2)
    alive, dead = trial(pool, way, who, CONFIGS[layout], tmp_path / "flight", 4.5, silent_s=1.0)
    assert is_right(alive, way, who), alive
    assert is_right(dead, way, who), dead


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_95_of_100_drawn_hangs_are_named_alive_and_all_from_files(tmp_path: Path) -> None:
    rng = random.Random(29)
    alive, dead = [], []
    for number in range(100):
        way, size = WAYS[number % len(WAYS)], rng.choice([2, 2, 3])
        layout = rng.choice([name for name in CONFIGS if size == 2 or name != "pipeline"])
        who, after_s = rng.randrange(size), rng.choice([9.0, 11.0, 14.0])
        found = trial(RankPool(size), way, who, CONFIGS[layout], tmp_path / str(number), after_s)
        for verdict, missed in zip(found, (alive, dead), strict=True):
            missed += [] if is_right(verdict, way, who) else [(way, layout, who, verdict)]
    print(f"missed alive {len(alive)}, missed from files {len(dead)}", alive, dead, sep="\n")
    assert len(alive) <= 5, alive
    assert not dead, dead


def test_the_folder_of_the_rings_is_found(tmp_path: Path) -> None:
    assert ring_folder(tmp_path) is None
    ring(tmp_path / "flight", 0)
    assert ring_folder(tmp_path) == ring_folder(tmp_path / "flight") == tmp_path / "flight"
    with pytest.raises(UsageError, match="no rings"):
        inquire(tmp_path, HOST, {})


def test_a_rank_of_another_host_gives_no_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known is said; a rank without a ring here may be on another host."""
    monkeypatch.setattr(inquiry, "ANSWER_S", 0.2)
    ring(tmp_path, 0, 3)
    ring(tmp_path, 1, 3, host="elsewhere 1 2")
    found = inquire(tmp_path, HOST, {})
    assert found.state == "running" and "nothing is known of ranks 1, 2" in found.sentence


def test_a_failure_of_this_start_is_shown_and_an_older_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [ring(tmp_path, rank) for rank in range(2)]
    monkeypatch.setattr(inquiry, "_is_alive", lambda ring, host: False)
    late = OwnFailure(time.monotonic() + 1, "ValueError: no", is_of_peers=False)
    found = inquire(tmp_path, HOST, {1: late})
    assert (found.state, found.rank) == ("ended", 1) and "ValueError: no" in found.sentence
    assert inquire(tmp_path, HOST, {1: late._replace(time_s=0.0)}).rank is None
    for each in made:
        each.leave()
    assert "in order" in inquire(tmp_path, HOST, {}).sentence


def test_rings_of_an_earlier_start_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on with fewer ranks leaves the rings of the others behind."""
    monkeypatch.setattr(inquiry, "_is_alive", lambda ring, host: False)
    for rank in range(4):
        ring(tmp_path, rank, 4)
    for rank in range(2):
        ring(tmp_path, rank, 2).leave()
    assert "in order" in inquire(tmp_path, HOST, {}).sentence


def test_damage_is_named(tmp_path: Path) -> None:
    ring(tmp_path, 0)
    ring_path(tmp_path, 1).write_bytes(b"\x80\x04")
    with pytest.raises(DamagedError, match="rank_00001.ring"):
        inquire(tmp_path, HOST, {})


def test_a_process_that_does_not_write_the_ring_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Callable[[int], RankPool]
) -> None:
    """Whoever can write a ring can name any process in it: the ring must be mapped by that process."""
    path = ring_path(tmp_path, 0)
    held = ring(tmp_path, 0)
    own = inquiry.read_ring(path)
    assert inquiry._writes(own)
    assert not inquiry._writes(own._replace(pid=ranks(2).pids[0]))
    held.leave()
