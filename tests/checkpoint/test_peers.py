"""All ranks go on or all raise the same."""

import pytest

from shardwise.checkpoint.peers import Conversation, Solo
from shardwise.plan.errors import CheckpointError, DamagedError, MismatchError

from .crew import Died, ThreadPeers, crew


def test_results_come_by_rank() -> None:
    def work(peers: ThreadPeers) -> list[str]:
        talk = Conversation(peers, "test", 20)
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

        Conversation(peers, "test", 20).gather("one", do)

    results = crew(3, work)
    assert [type(result) for result in results] == [seen] * 3
    assert len({str(result) for result in results}) == 1


def test_a_rank_that_is_gone_is_named() -> None:
    def work(peers: ThreadPeers) -> None:
        def do() -> None:
            if peers.rank == 1:
                raise Died

        Conversation(peers, "save of step 7", 1).gather("write", do)

    results = crew(3, work)
    for rank in (0, 2):
        with pytest.raises(
            CheckpointError, match=rf"save of step 7: rank {rank} waited 1 s in phase 'write'.*\[1\]"
        ):
            raise results[rank]


def test_solo_hears_itself() -> None:
    solo = Solo()
    for _ in range(3):
        assert Conversation(solo, "test", 1).gather("one", lambda: 5) == ["5"]
    with pytest.raises(CheckpointError, match="^full$"):
        Conversation(solo, "test", 1).gather("one", lambda: (_ for _ in ()).throw(OSError("full")))


def test_conversations_do_not_meet() -> None:
    """Many over one store, each with keys of its own, also after the peers object was replaced."""

    def work(peers: ThreadPeers) -> list[str]:
        return [
            text for n in range(5) for text in Conversation(peers, "test", 20).gather("one", lambda n=n: n)
        ]

    assert crew(2, work) == [[str(n) for n in range(5) for _ in range(2)]] * 2
