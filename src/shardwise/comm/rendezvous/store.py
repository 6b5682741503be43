"""The store of a job: short texts under keys, each sealed with the job's secret.

A gate (gate.py) keeps programs without the secret away from torch's TCPStore, which accepts everyone. A store that the
program hands over has no gate. So every value that Shardwise writes is HMAC-SHA256(key of the job, name of the value +
value) followed by the value, and a value whose seal does not fit is refused by name. A stranger there can still end a
job, but cannot pass it a directory, a neighbour's memory or an error that no rank wrote. torch's own rendezvous (the
addresses of gloo) uses the same class.

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

from shardwise.base.errors import CommError

_SEAL_BYTES = 32


def seal(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA256 over the parts, each with its length, so that bytes cannot move between neighbouring parts."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "big") + part)
    return code.digest()


class SealedStore(dist.Store):
    """``base`` with every value sealed. Counters (``add``) are the server's sums and have no seal."""

    def __init__(self, base: dist.Store, key: bytes):
        super().__init__()
        self._base = base
        self._key = key

    def set(self, key: str, value: Any) -> None:
        """Seal and write a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._base.set(key, seal(self._key, key.encode(), data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Read a value, after waiting until it exists.

        Raises:
            CommError: if the seal does not fit.
        """
        found = bytes(self._base.get(key))
        mark, data = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        if not hmac.compare_digest(mark, seal(self._key, key.encode(), data)):
            raise CommError(
                f"store: the value under {key!r} is not signed with this job's secret: another program than its ranks "
                "wrote it, or a rank was started with another SHARDWISE_SECRET"
            )
        return data

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a counter of the server and return the sum."""
        return self._base.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._base.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:  # noqa: B008
        """Wait until all keys exist."""
        self._base.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        try:
            return self._base.delete_key(key)
        except RuntimeError:
            # The store of a group that we made is a SealedStore again, and torch forwards no deletion to a store in
            # Python.
            self._base.set(key, "")
            return True

    def num_keys(self) -> int:
        """Return the number of keys in the whole store."""
        return self._base.num_keys()

    def again(self) -> "SealedStore":
        """Return the same store over a separate connection, if the base has connections.

        A call that blocks holds its connection.
        """
        inner = self._base
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        # Only TCP has connections; a FileStore mistakes the end of a clone for the end of a rank and removes its file.
        clone = getattr(self._base, "clone", None) if isinstance(inner, dist.TCPStore) else None
        return SealedStore(self._base if clone is None else clone(), self._key)


_TALKERS, _OVER = "shardwise/talkers", "shardwise/over"
_FAREWELL_S = 2.5
"""Seconds to wait for talkers: more than two ticks of a watch."""


class StoreClient:
    """A thread's use of the store, until the process that serves the store is about to end.

    If a call is running when its server ends, torch prints a warning and a stack of C++ frames, even after a good run.
    The root store counts the talkers of a job, and ``say_farewell`` waits until there is none.
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
        """Count this talker no longer. The thread may not use the store afterwards; a second call does nothing."""
        root, self._root = self._root, None
        if root is not None:
            root.add(_TALKERS, -1)


def say_farewell(store: dist.Store) -> None:
    """Wait until no talker uses ``store``, which this process serves and which ends with it.

    A rank that was killed cannot leave: the wait ends after some seconds.
    """
    end = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(RuntimeError):  # the store has ended already
        store.set(_OVER, "")
        while store.add(_TALKERS, 0) > 0 and time.monotonic() < end:
            time.sleep(0.02)


def root_of(store: dist.Store) -> dist.Store:
    """Return the store below all seals and prefixes."""
    while isinstance(store, SealedStore | dist.PrefixStore):
        store = store._base if isinstance(store, SealedStore) else store.underlying_store
    return store


def missing_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Wait until all ``keys`` exist, and return the positions of those that do not after ``timeout_s``.

    The function polls, because a blocking wait would hold the store's connection and so block every other thread of
    this rank.

    Args:
        store: The store.
        keys: Keys to wait for.
        timeout_s: Seconds to wait.
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
