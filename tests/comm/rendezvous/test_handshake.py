"""How ranks meet: who is missing, who does not know the secret, what a stranger in the store can and cannot do."""

import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.base.errors import CommError, ConfigError, DeadlineError
from shardwise.comm.rendezvous import handshake
from shardwise.comm.rendezvous.handshake import HandshakeResult, RankIdentity, private_folder
from shardwise.comm.rendezvous.store import SealedStore

JOIN_S = 0.5


def meeting(
    base: dist.Store,
    size: int,
    secrets: Sequence[str | None] | str | None = "s",
    folder: Path | None = None,
    absent: int = -1,
    devices: Sequence[str] = (),
) -> list[Any]:
    """What each rank's ``meet`` returned or raised; ``absent`` does not come."""

    def one(rank: int) -> Any:
        if rank == absent:
            return None
        given = secrets if isinstance(secrets, str) or secrets is None else secrets[rank]
        me = RankIdentity("host", 100 + rank, devices[rank] if devices else "")
        try:
            return handshake.meet(base, rank, size, me, given, folder, JOIN_S if absent >= 0 else 20.0)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_all_know_who_is_here_and_share_a_key() -> None:
    met: list[HandshakeResult] = meeting(dist.HashStore(), 3)
    assert len({each.word for each in met}) == 1
    assert [each.pid for each in met[2].who] == [100, 101, 102]
    met[1].store.set("k", "v")
    assert met[2].store.get("k") == b"v"


def test_ranks_meet_again_and_again_on_one_store() -> None:
    """Each meeting has a word of its own, and with it every key that follows."""
    base = dist.HashStore()
    words = [meeting(base, 2)[0].word for _ in range(3)]
    assert len(set(words)) == 3


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_by_all(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_S", 1.0)
    found = meeting(dist.HashStore(), 3, absent=absent)
    errors = [each for rank, each in enumerate(found) if rank != absent]
    assert all(isinstance(each, DeadlineError) for each in errors)
    said = "rank 0 has not joined within" if absent == 0 else "rank 2 of 3 did not join within"
    assert all(said in str(each) and "comm.join_timeout_s" in str(each) for each in errors)


def test_another_secret_is_found_on_both_sides() -> None:
    host, guest = meeting(dist.HashStore(), 2, ["right", "wrong"])
    assert isinstance(host, CommError) and "SHARDWISE_SECRET" in str(host)
    assert isinstance(guest, CommError) and "does not know this job's secret" in str(guest)


def test_nobody_is_talked_into_doing_without_a_secret() -> None:
    """A rank that has one refuses a rank 0 that has none."""
    host, guest = meeting(dist.HashStore(), 2, [None, "mine"])
    assert isinstance(host, CommError) and isinstance(guest, CommError)


def test_ranks_of_one_host_share_a_secret_in_a_file(tmp_path: Path) -> None:
    folder = private_folder([tmp_path / "private"])
    assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
    met = meeting(dist.HashStore(), 3, None, folder)
    assert {each.secret_from for each in met} == {"file"}
    assert list(folder.iterdir()) == []
    met[0].store.set("k", "v")
    assert met[1].store.get("k") == b"v"


def test_a_folder_that_others_may_enter_keeps_no_secret(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    link = tmp_path / "link"
    (tmp_path / "target").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "target")
    assert private_folder([open_to_all, link]) is None
    assert private_folder([open_to_all, tmp_path / "mine"]) == tmp_path / "mine"


def test_ranks_that_took_one_device_are_named_by_all() -> None:
    for devices, said in {
        ("cuda:0", "cuda:1", "cuda:0"): "3 ranks on one host took 2 devices: cuda:0 is that of ranks 0, 2.",
        (
            "cuda:1",
            "cuda:1",
        ): "2 ranks on one host took 1 device: cuda:1 is that of ranks 0, 1. A number in comm.device",
    }.items():
        found = meeting(dist.HashStore(), len(devices), devices=devices)
        assert all(isinstance(each, ConfigError) and str(each).startswith(said) for each in found), found
    assert all(
        isinstance(each, HandshakeResult)
        for each in meeting(dist.HashStore(), 2, devices=["cuda:1", "cuda:0"])
    )


# What a stranger can do -----------------------------------------------------------------------------------------------


def forged(base: dist.Store, store: SealedStore) -> None:
    base.set("k", "said by a stranger")


def test_a_recorded_meeting_does_not_let_a_stranger_in() -> None:
    """Who replays what rank 0 said in an earlier job with the same secret does not know this rank's number."""
    first, second = dist.HashStore(), dist.HashStore()
    meeting(first, 2)
    second.set("shardwise/join/1/welcome/1", first.get("shardwise/join/1/welcome/1"))
    with pytest.raises(CommError, match="does not know this job's secret"):
        handshake.meet(second, 1, 2, RankIdentity("host", 1, ""), "s", None, JOIN_S)


def test_a_word_that_is_no_word_is_not_made_a_path(tmp_path: Path) -> None:
    base = dist.HashStore()
    base.set("shardwise/join/1/welcome/1", '{"error": "", "word": "../../secret", "seal": ""}')
    with pytest.raises(CommError, match="where a word of 32 digits belongs"):
        handshake.meet(base, 1, 2, RankIdentity("host", 1, ""), None, tmp_path, JOIN_S)


@pytest.mark.parametrize(
    "forged",
    [
        b"\xff\xfe garbage",
        b"[" * 5_000_000,
        b"[" * 30_000,
        b"{}",
        b'["nonce", "host", "pid", ""]',
        b'["nonce", "host", 1, ""], "more": [1',
        b'["\\ud800", "host", 1, ""]',
        b"[1e999]",
        b"",
    ],
    ids=lambda forged: str(forged[:20]),
)
def test_a_hello_that_no_rank_wrote_is_refused_by_all(forged: bytes) -> None:
    """Rank 0 ended in an error of the parser, and the others in one of the network."""

    class Overwritten(SealedStore):
        def __init__(self, base: dist.Store):
            dist.Store.__init__(self)
            self._base = base

        def set(self, key: str, value: Any) -> None:
            self._base.set(key, forged if key.endswith("hello/1") else value)

        def get(self, key: str) -> bytes:
            return bytes(self._base.get(key))

    host, guest = meeting(Overwritten(dist.HashStore()), 2)
    for said in (host, guest):
        assert isinstance(said, CommError) and "the hello of rank 1" in str(said), said


def test_a_store_that_ends_during_the_meeting_is_said_to_have_ended() -> None:
    class Ended(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(CommError, match="rank 0, which serves it, has ended"):
        handshake.meet(Ended(), 1, 2, RankIdentity("host", 101, ""), "s", None, 1.0)
