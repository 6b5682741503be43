"""The store of a job: short texts under keys, each sealed with the job's secret.

torch's TCPStore lets every program in that reaches its port, also one of another user on this host. So every value that
Shardwise writes is HMAC-SHA256(key of the job, name of the value + value) followed by the value, and one whose seal
does not fit is refused by name: a stranger can still end a job, as whoever floods its port can, but not tell it a
directory, a neighbour's memory or an error that no rank wrote. torch's own meeting (the addresses of gloo) goes through
the same class.

Cost: 32 bytes a value, and about 5 us to seal or to check it.
"""

import contextlib
import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.plan.errors import CommError

_SEAL_BYTES = 32


def seal(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each with its length, so that none can lend bytes to its neighbour."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big") + part)
    return code.digest()


class SealedStore(dist.Store):
    """``base`` with every value sealed. Counters (``add``) are the server's sums and carry no seal."""

    def __init__(self, base: dist.Store, key: bytes):
        super().__init__()
        self._base = base
        self._key = key

    def set(self, key: str, value: Any) -> None:
        """Seal and write."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._base.set(key, seal(self._key, key.encode(), data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Read; waits for a value that is not there yet. Errors: CommError where the seal does not fit."""
        found = bytes(self._base.get(key))
        mark, data = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        if not hmac.compare_digest(mark, seal(self._key, key.encode(), data)):
            raise CommError(
                f"store: the value under {key!r} is not signed with this job's secret: another program than its ranks "
                "wrote it, or a rank was started with another SHARDWISE_SECRET"
            )
        return data

    def add(self, key: str, amount: int) -> int:
        """A counter of the server's."""
        return self._base.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return self._base.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:  # noqa: B008
        """Return when all of them are there."""
        self._base.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove one; whether it was there."""
        try:
            return self._base.delete_key(key)
        except RuntimeError:
            # Over a group that we made lies a SealedStore again, and torch hands no deletion on to a store in Python.
            self._base.set(key, "")
            return True

    def num_keys(self) -> int:
        """Keys in the whole store."""
        return self._base.num_keys()

    def again(self) -> "SealedStore":
        """The same over a connection of its own, where the base has such: a call that blocks holds its connection."""
        inner = self._base
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        # Only TCP has connections; a FileStore takes the end of a clone for the end of a rank and removes its file.
        clone = getattr(self._base, "clone", None) if isinstance(inner, dist.TCPStore) else None
        return SealedStore(self._base if clone is None else clone(), self._key)


_TALKERS, _OVER = "shardwise/talkers", "shardwise/over"
_FAREWELL_S = 2.5
"""More than two ticks of a watch."""


class Talker:
    """A thread that asks the store now and then, until the process that serves the store is about to end.

    A call that meets the end of its server has torch print a warning and a stack of C++ frames, after a good run too.
    ``root`` counts the talkers of a job, and ``say_farewell`` waits until there is none.
    """

    def __init__(self, store: dist.Store) -> None:
        root = root_of(store)
        self._root = root if isinstance(root, dist.TCPStore) else None
        if self._root is not None:
            self._root.add(_TALKERS, 1)

    def must_leave(self) -> bool:
        """Return whether the server is about to end."""
        return self._root is not None and self._root.check([_OVER])

    def leave(self) -> None:
        """Count this talker no longer. It may not use the store afterwards; a second call does nothing."""
        root, self._root = self._root, None
        if root is not None:
            root.add(_TALKERS, -1)


def say_farewell(store: dist.Store) -> None:
    """Wait until no talker uses ``store`` any more, which this process serves and takes along as it ends.

    A rank that was killed cannot leave: the wait ends after some seconds.
    """
    end = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(RuntimeError):  # it has ended already
        store.set(_OVER, "")
        while store.add(_TALKERS, 0) > 0 and time.monotonic() < end:
            time.sleep(0.02)


def root_of(store: dist.Store) -> dist.Store:
    """The store below all seals and prefixes."""
    while isinstance(store, SealedStore | dist.PrefixStore):
        store = store._base if isinstance(store, SealedStore) else store.underlying_store
    return store


def missing_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Wait until all ``keys`` are there; the places of those that are not after ``timeout_s``.

    It asks again and again: a blocking wait would hold the store's connection, and with it every other thread of this
    rank.
    """
    names = list(keys)
    end = time.monotonic() + timeout_s
    pause_s = 0.0005
    while not store.check(names):
        if time.monotonic() > end:
            return [place for place, name in enumerate(names) if not store.check([name])]
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    return []
