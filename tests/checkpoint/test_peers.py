"""All ranks go on or all raise the same."""

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError, DamagedError, MismatchError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints
from shardwise.checkpoint.peers import CheckpointCoordinator, SingleRank

from .crew import TINY, Died, ThreadPeers, crew, items_of, make_state

POLICY = CheckpointPolicy(asynchronous=False, timeout_s=20)


def test_results_come_by_rank() -> None:
    def work(peers: ThreadPeers) -> list[str]:
        talk = CheckpointCoordinator(peers, "test", 20)
        return talk.gather("one", lambda: [peers.rank]) + talk.gather("two", lambda: "x" * peers.rank)

    assert crew(3, work) == [["[0]", "[1]", "[2]", '""', '"x"', '"xx"']] * 3


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        ([None, DamagedError("d"), None], DamagedError),
        ([DamagedError("d"), None, MismatchError("m")], MismatchError),
        ([DamagedError("d"), MismatchError("m"), OSError("o")], CheckpointError),
    ],
)
def test_every_rank_raises_the_same(raised: list[Exception | None], seen: type[Exception]) -> None:
    """Decided by what cannot be cured, so that no rank falls back to an older step while another gives up."""

    def work(peers: ThreadPeers) -> None:
        def do() -> None:
            error = raised[peers.rank]
            if error is not None:
                raise error

        CheckpointCoordinator(peers, "test", 20).gather("one", do)

    results = crew(3, work)
    assert [type(result) for result in results] == [seen] * 3
    assert len({str(result) for result in results}) == 1


def test_a_rank_that_is_gone_is_named() -> None:
    def work(peers: ThreadPeers) -> None:
        def do() -> None:
            if peers.rank == 1:
                raise Died

        CheckpointCoordinator(peers, "save of step 7", 1).gather("write", do)

    results = crew(3, work)
    for rank in (0, 2):
        with pytest.raises(
            CheckpointError, match=rf"save of step 7: rank {rank} waited in phase 'write'.*\[1\]"
        ):
            raise results[rank]


def test_the_first_rank_ends_last() -> None:
    """The store lived in its process: a script that ended right after a save failed on the other ranks."""
    heard = []

    def work(peers: ThreadPeers) -> list[int]:
        talk = CheckpointCoordinator(peers, "test", 20)
        talk.gather("one", lambda: None)
        if peers.rank:
            time.sleep(0.05)
            heard.append(peers.rank)
        talk.end()
        return sorted(heard)

    assert crew(3, work)[0] == [1, 2]


def test_nothing_is_left_in_the_store_after_the_end() -> None:
    """A run of many saves filled it: with the last phase of each, and with a key for every phase and rank."""

    def work(peers: ThreadPeers) -> list[str]:
        for n in range(3):
            talk = CheckpointCoordinator(peers, "test", 20)
            for phase in ("one", "two"):
                talk.gather(phase, lambda n=n: n)
            talk.end()
        return peers.held()

    assert crew(3, work)[0] == []


def test_solo_hears_itself() -> None:
    solo = SingleRank()
    for _ in range(3):
        assert CheckpointCoordinator(solo, "test", 1).gather("one", lambda: 5) == ["5"]
    with pytest.raises(CheckpointError, match="^full$"):
        CheckpointCoordinator(solo, "test", 1).gather("one", lambda: (_ for _ in ()).throw(OSError("full")))


def test_conversations_do_not_meet() -> None:
    """Many over one store, each with keys of its own, also after the peers object was replaced."""

    def work(peers: ThreadPeers) -> list[str]:
        return [
            text
            for n in range(5)
            for text in CheckpointCoordinator(peers, "test", 20).gather("one", lambda n=n: n)
        ]

    assert crew(2, work) == [[str(n) for n in range(5) for _ in range(2)]] * 2


class Forging:
    """A store in which somebody else than rank 0 answers one question."""

    def __init__(self, peers: ThreadPeers, phase: str, lie: str) -> None:
        self.rank, self.size, self._peers, self._phase, self._lie = peers.rank, peers.size, peers, phase, lie

    def barrier(self) -> None:
        self._peers.barrier()

    def post(self, key: str, text: str) -> None:
        self._peers.post(key, text)

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        answers = self._peers.collect(key, timeout_s)
        lies = self.rank == 1 and key.endswith(self._phase)
        return [self._lie, *answers[1:]] if lies else answers

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        return self._peers.at_work(key, what)

    def joining(self, thread: int) -> AbstractContextManager[None]:
        return self._peers.joining(thread)

    def forget(self, key: str) -> None:
        self._peers.forget(key)


@pytest.mark.parametrize(
    "name", ["{outside}", "../outside", "step_00000001", "step_00000002.tmp-0-12", "a\nb"]
)
def test_a_directory_that_no_rank_makes_is_not_written(tmp_path: Path, name: str) -> None:
    """Names came over the store and were joined to the folder as they were: an absolute one was written over."""
    outside = tmp_path / "outside"
    (outside / "weights").mkdir(parents=True)
    (outside / "weights" / "model-00001.safetensors").write_bytes(b"precious")
    lie = "+" + json.dumps(name.format(outside=outside))

    def work(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(tmp_path / "run", Forging(peers, "directory", lie), POLICY, sizes=TINY)
        checkpoints.save(1, items_of(make_state(1), peers.rank, 2), {})

    results = crew(2, work)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert all("which no rank makes" in str(result) for result in results)
    assert (outside / "weights" / "model-00001.safetensors").read_bytes() == b"precious"


def test_a_step_outside_the_folder_is_not_loaded(tmp_path: Path) -> None:
    """A forged list of steps made a rank load another run's weights."""

    def save(peers: ThreadPeers, root: Path, step: int) -> None:
        Checkpoints(root, peers, POLICY, sizes=TINY).save(step, items_of(make_state(step), peers.rank, 2), {})

    for root, step in ((tmp_path / "run", 1), (tmp_path / "other", 2)):
        assert crew(2, lambda peers, root=root, step=step: save(peers, root, step)) == [None, None]  # type: ignore[misc]
    lie = "+" + json.dumps([str(tmp_path / "other" / "step_00000002")])

    def load(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(tmp_path / "run", Forging(peers, "candidates", lie), POLICY, sizes=TINY)
        checkpoints.load(items_of(make_state(0), peers.rank, 2))

    results = crew(2, load)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert all("which no rank makes" in str(result) for result in results)
