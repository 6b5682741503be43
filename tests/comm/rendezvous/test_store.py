"""A store whose values carry a seal: what no rank of the job wrote is refused by name."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.base.errors import CommError
from shardwise.comm.rendezvous import handshake
from shardwise.comm.rendezvous.handshake import RankIdentity
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


def test_a_store_over_the_one_of_a_group_that_we_made_forgets() -> None:
    """The second engine of a job has such a store; torch's part of it refused, and with it every second save."""
    base = dist.HashStore()
    first = SealedStore(base, b"a")
    second = SealedStore(dist.PrefixStore("torch", first), b"b")
    second.set("k", "v" * 1000)
    assert second.get("k") == b"v" * 1000
    assert second.delete_key("k")
    with pytest.raises(CommError):
        second.get("k")
    assert len(base.get("torch/k")) < 100


def forged(base: dist.Store, store: SealedStore) -> None:
    base.set("k", "said by a stranger")


def moved(base: dist.Store, store: SealedStore) -> None:
    """What a rank said elsewhere."""
    store.set("other", "v")
    base.set("k", base.get("other"))


def of_another_job(base: dist.Store, store: SealedStore) -> None:
    SealedStore(base, b"another key").set("k", "v")


def cut(base: dist.Store, store: SealedStore) -> None:
    store.set("k", "vv")
    base.set("k", base.get("k")[:-1])


@pytest.mark.parametrize("attack", [forged, moved, of_another_job, cut])
def test_a_value_that_no_rank_wrote_is_refused_by_name(attack: Callable[..., None]) -> None:
    base = dist.HashStore()
    store = meeting(base, 2)[0].store
    attack(base, store)
    with pytest.raises(CommError, match="the value under 'k' is not signed with this job's secret"):
        store.get("k")
