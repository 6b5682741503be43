"""The doctor asks a running job by a file, and reads a dead one from its rings: real ranks that hang in drawn ways."""

import importlib.util
import operator
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwise.base.errors import DamagedError, UsageError
from shardwise.comm.rendezvous.handshake import identity
from shardwise.comm.watching import inquiry
from shardwise.comm.watching.answers import RankAnswer
from shardwise.comm.watching.inquiry import OwnFailure, _told_of, inquire, ring_folder
from shardwise.comm.watching.recorder import Recorder, RingOwner, ring_path
from shardwise.comm.watching.verdict import JobVerdict
from shardwise.plan.action import F
from tests.comm.watching.hangs import (
    CONFIGS,
    CONFIGS_OF_HOSTS,
    WAYS,
    is_right,
    trial,
    trial_by,
    trial_on_hosts,
)
from tests.namespaces import namespaces
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
    alive, dead = trial(pool, way, who, CONFIGS[layout], tmp_path / "flight", 4.2, silent_s=1.0)
    assert is_right(alive, way, who), alive
    assert is_right(dead, way, who), dead


class DrawnHang(NamedTuple):
    """One drawn way to hang."""

    way: str
    layout: str
    who: int
    ranks: int
    after_s: float


def drawn_hangs(count: int, ranks: Sequence[int], layouts: Collection[str]) -> Iterator[DrawnHang]:
    """Draw hangs of every way in turn; a pipeline takes an even number of ranks."""
    rng = random.Random(29)
    for number in range(count):
        size = rng.choice(ranks)
        layout = rng.choice([name for name in layouts if size % 2 == 0 or name != "pipeline"])
        way, who = WAYS[number % len(WAYS)], rng.randrange(size)
        yield DrawnHang(way, layout, who, size, rng.choice([7.0, 9.0, 12.0]))


def campaign(
    drawn: Iterable[DrawnHang],
    run: Callable[[int, DrawnHang], tuple[JobVerdict, JobVerdict]],
    at_once: int = 3,
) -> None:
    """Check that the doctor names 95 of 100 ranks that hang, and all of them from the files of killed jobs.

    Args:
        drawn: The hangs.
        run: Function that lets one happen, given its number, and returns the verdicts on the job alive and dead.
        at_once: Jobs that hang side by side: most of their time they wait.
    """
    hangs = list(drawn)
    alive: list[tuple[DrawnHang, JobVerdict]] = []
    dead: list[tuple[DrawnHang, JobVerdict]] = []
    with ThreadPoolExecutor(at_once) as pool:
        for number, (hang, found) in enumerate(
            zip(hangs, pool.map(run, range(len(hangs)), hangs), strict=True)
        ):
            for verdict, missed in zip(found, (alive, dead), strict=True):
                if not is_right(verdict, hang.way, hang.who):
                    missed.append((hang, verdict))
                    print(f"missed {'dead' if missed is dead else 'alive'}: {hang}: {verdict}", flush=True)
            print(f"{number + 1}: {hang}", flush=True)
    print(f"of {len(hangs)}: missed alive {len(alive)}, missed from files {len(dead)}")
    assert len(alive) <= 0.05 * len(hangs), alive
    assert not dead, dead


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_95_of_100_drawn_hangs_are_named_alive_and_all_from_files(tmp_path: Path) -> None:
    def run(number: int, hang: DrawnHang) -> tuple[JobVerdict, JobVerdict]:
        config, folder = CONFIGS[hang.layout], tmp_path / str(number)
        return trial(RankPool(hang.ranks), hang.way, hang.who, config, folder, hang.after_s)

    campaign(drawn_hangs(100, [2, 2, 3], CONFIGS), run)


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_hangs_on_two_hosts_are_named_from_either_and_from_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts are network namespaces, which share processes: the doctor may look at those of its own host alone."""
    monkeypatch.setattr(inquiry, "_shares_processes", operator.eq)
    monkeypatch.setattr("tests.namespaces._PATIENCE_S", 300.0)
    with namespaces() as hosts:

        def run(number: int, hang: DrawnHang) -> tuple[JobVerdict, JobVerdict]:
            config, folder = CONFIGS_OF_HOSTS[hang.layout], tmp_path / str(number)
            port = 29500 + number
            return trial_on_hosts(
                hosts, hang.way, hang.who, config, folder, hang.after_s, asked_on=number % 3, port=port
            )

        campaign(drawn_hangs(100, [4], CONFIGS_OF_HOSTS), run)


OTHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus=2", "--master_port={port}"],
}
"""Modules and arguments of other launchers."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", OTHERS)
def test_hangs_of_ranks_that_another_launcher_started_are_named(tmp_path: Path, launcher: str) -> None:
    """The records lie in the user's runtime folder, because nobody has named a folder."""
    module, *arguments = OTHERS[launcher]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip("needs DeepSpeed: pip install deepspeed")

    def run(number: int, hang: DrawnHang) -> tuple[JobVerdict, JobVerdict]:
        given = [each.format(port=29500 + number) for each in arguments]
        command = [sys.executable, "-m", module, *given]
        config, runtime = CONFIGS[hang.layout], tmp_path / str(number)
        return trial_by(command, hang.way, hang.who, config, runtime, hang.after_s)

    campaign(drawn_hangs(24, [2], CONFIGS), run)


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


def test_a_job_of_another_host_that_gives_no_sign_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor cannot see processes of other hosts: rings that do not beat are those of a job that was killed."""
    monkeypatch.setattr(inquiry, "ANSWER_S", 0.3)
    held = [ring(tmp_path, rank, 2, host=f"elsewhere 1 {rank}") for rank in range(2)]
    assert inquire(tmp_path, HOST, {}).state == "ended"
    beats = threading.Event()

    def beat() -> None:
        while not beats.wait(0.05):
            held[1].beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert inquire(tmp_path, HOST, {}).state == "running"
    finally:
        beats.set()
        thread.join()


def test_what_a_rank_of_the_same_host_has_found_comes_first() -> None:
    """Ranks of other hosts only know that nothing is heard."""
    far = "rank 2 does not answer: nothing is heard from its host"
    near = (
        'rank 2 does not answer: its process 7 sleeps (state S). Its main thread is at\n  File "x.py", line 1'
    )
    assert _told_of(2, [far, near]) == ("its process 7 sleeps (state S)", '  File "x.py", line 1')
    assert _told_of(2, [far]) == ("nothing is heard from its host", "")
    assert _told_of(1, [far, near]) == ("", "")


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
