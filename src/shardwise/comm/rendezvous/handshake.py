"""Handshake of all ranks at the store: identities, proof of the job's secret, and the key that seals their texts.

    rank r   hello/r     a number used once, and its identity (host, process, device)
    rank 0   welcome/r   a random word for this meeting, and a seal over both with the secret
    rank r   ready/r     sealed with the meeting's key = HMAC(secret, word)
    rank 0   go          sealed: the identities of all ranks; or why the job cannot begin, the same text on every rank

Both sides so prove that they have the secret, and no recorded value of another meeting fits. Source of the secret:

    environment   SHARDWISE_SECRET: our launcher draws one per job; for several hosts the user exports one
    file          all ranks on one host, without it: rank 0 draws one and writes it to a folder that only this user may
                  enter, under the meeting's word, until all have read it
    none          several hosts without it: the seals then detect accidents, not attackers. Rank 0 warns

Every rank determines by itself which of the three applies, so no other program can make it accept a weaker one.

Cost: two rounds over the store, some milliseconds; rank 0 writes one text per rank.
"""

import contextlib
import json
import os
import platform
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardwise.base.errors import CommError, ConfigError, DeadlineError
from shardwise.base.strict_json import read_object
from shardwise.base.words import counted, named_ranks
from shardwise.comm.rendezvous.hosts import numbered
from shardwise.comm.rendezvous.store import SealedStore, missing_keys, seal

_WORD_BYTES = 16
_TEXT_BYTES = 1 << 16
"""Most bytes of a text of the handshake that no seal protects."""
_PATIENCE_S = 15.0
"""Seconds that a rank waits longer than rank 0, so that rank 0 reports the missing ranks."""


class RankIdentity(NamedTuple):
    """Identity of one rank for the others."""

    host: str
    """Kernel, process ids and network: ranks with all of these in common are on one host."""
    pid: int
    device: str
    """Text that only the rank's device has (``device.identity_of``); "" on the CPU, which ranks may share."""
    name: str = ""
    """Name that the host has as its own."""
    address: str = ""
    """Numeric address at which other hosts reach the host; "" on one host."""
    interface: str = ""
    """Interface with that address."""
    chosen_by: str = ""
    """What decided the address."""
    has: str = ""
    """Processor cores or devices of the host."""
    versions: str = ""
    """What must be the same on all hosts, as "NAME VERSION, NAME VERSION"."""


class HandshakeResult(NamedTuple):
    """Result of a handshake, which all ranks share."""

    store: SealedStore
    word: str
    """Random word of this meeting: the first part of every key that follows from it."""
    who: list[RankIdentity]
    """Identities, by rank."""
    secret_from: str
    """Source of the secret: "environment", "file" or "none"."""
    turn: int
    """Number of the meeting in this job; 1 for the first."""
    clocks: tuple[float | None, ...] = ()
    """Seconds that the clock of each host is ahead of that of rank 0's host, by number of the host; only on rank 0 of
    several hosts, in the first meeting.
    """


Refusal = Callable[[Sequence[RankIdentity]], str]
"""Function that returns why ranks with these identities cannot begin, or ""."""


def identity(device: str) -> RankIdentity:
    """Return the identity of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = " ".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))])
    except OSError:
        host = platform.node()
    return RankIdentity(host, os.getpid(), device)


def private_folder(candidates: Sequence[Path]) -> Path | None:
    """Return the first folder that only this user may enter, made if needed; None if there is none."""
    for folder in candidates:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                return folder
    return None


def meet(
    base: dist.Store,
    rank: int,
    size: int,
    me: RankIdentity,
    given: str | None,
    folder: Path | None,
    timeout_s: float,
    refusal: Refusal = lambda who: "",
) -> HandshakeResult:
    """Wait for all ranks at the store, and agree on a key that seals their texts.

    Args:
        base: Store of the job.
        rank: This rank.
        size: Number of ranks.
        me: Identity of this rank.
        given: Secret from the environment, or None.
        folder: Folder in which ranks of one host may share a secret; None: there is none.
        timeout_s: Seconds to wait for the ranks.
        refusal: More reasons for which the job cannot begin; rank 0 asks, and all ranks refuse.

    Raises:
        DeadlineError: if ranks do not come within ``timeout_s``; the message names them.
        CommError: if a secret does not fit or the store does not answer.
        ConfigError: if ranks share a device, or ``refusal`` gives a reason.
    """
    try:
        return _meet(base, rank, size, me, given, folder, timeout_s, refusal)
    except dist.DistError as error:
        why = (
            "this rank serves it"
            if rank == 0
            else "rank 0, which serves it, has ended; the first error is in its log"
        )
        raise CommError(f"rank {rank}: the job's store does not answer: {why}. ({error})") from error


def _meet(
    base: dist.Store,
    rank: int,
    size: int,
    me: RankIdentity,
    given: str | None,
    folder: Path | None,
    timeout_s: float,
    refusal: Refusal,
) -> HandshakeResult:
    turn = base.add(f"shardwise/joins/{rank}", 1)
    place = f"shardwise/join/{turn}"
    nonce = secrets.token_hex(_WORD_BYTES)
    base.set(f"{place}/hello/{rank}", json.dumps([nonce, *me]))
    source = "environment" if given else "none" if folder is None else "file"
    if rank == 0:
        return _host(base, size, turn, given, folder, source, timeout_s, refusal)
    key = f"{place}/welcome/{rank}"
    if missing_keys(base, [key], timeout_s + _PATIENCE_S):
        raise DeadlineError(
            f"rank {rank}: rank 0 has not joined within {timeout_s + _PATIENCE_S:.0f} s; see its log. Where ranks "
            "start that far apart, raise comm.join_timeout_s"
        )
    said = read_object(bytes(base.get(key)), f"store: {key}", limit_bytes=_TEXT_BYTES, kind=CommError)
    if said.get("error"):
        raise DeadlineError(f"rank {rank}: {str(said['error'])[:_TEXT_BYTES]}")
    word = _checked(said.get("word"))
    secret = (given or "").encode()
    if source == "file":
        assert folder is not None, "a secret in a file has a folder"
        try:
            secret = (folder / word).read_bytes()
        except OSError as error:
            raise CommError(
                f"rank {rank}: cannot read the job's secret in {folder}, where rank 0 should have left it ({error}). "
                "Give all ranks the same SHARDWISE_SECRET in their environment"
            ) from error
    if said.get("seal") != seal(secret, b"welcome", key.encode(), nonce.encode(), word.encode()).hex():
        base.set(f"{place}/ready/{rank}", "refused")
        raise CommError(
            f"rank {rank}: what answers as rank 0 at the store does not know this job's secret (from {source}): the "
            "ranks have different SHARDWISE_SECRET, or another program answers"
        )
    store = SealedStore(base, seal(secret, b"key", word.encode()))
    store.set(f"{place}/ready/{rank}", b"ready")
    if missing_keys(base, [f"{place}/go"], timeout_s + _PATIENCE_S):
        raise DeadlineError(f"rank {rank}: rank 0 welcomed this rank and then stopped answering; see its log")
    refused, who = json.loads(store.get(f"{place}/go"))
    if refused:
        raise ConfigError(refused)
    met = HandshakeResult(store, word, [RankIdentity(*each) for each in who], source, turn)
    _answer_for_clock(met, rank, timeout_s)
    return met


def _host(
    base: dist.Store,
    size: int,
    turn: int,
    given: str | None,
    folder: Path | None,
    source: str,
    timeout_s: float,
    refusal: Refusal,
) -> HandshakeResult:
    """Run rank 0's part of the handshake."""
    place = f"shardwise/join/{turn}"
    absent = missing_keys(base, [f"{place}/hello/{rank}" for rank in range(size)], timeout_s)
    if absent:
        named = ", ".join(map(str, absent[:20])) + (" ..." if len(absent) > 20 else "")
        error = (
            f"rank{'s' * (len(absent) > 1)} {named} of {size} did not join within {timeout_s:.0f} s: they were not "
            "started, have ended, or are still starting. See their logs; where ranks start that far apart, raise "
            "comm.join_timeout_s"
        )
        for rank in set(range(1, size)) - set(absent):
            base.set(f"{place}/welcome/{rank}", json.dumps({"error": error}))
        raise DeadlineError(f"rank 0: {error}")
    try:
        hellos = [_hello(bytes(base.get(f"{place}/hello/{rank}")), rank) for rank in range(size)]
    except CommError as forged:
        for rank in range(1, size):
            base.set(f"{place}/welcome/{rank}", json.dumps({"error": str(forged)}))
        raise
    who = [each for _, each in hellos]
    word = secrets.token_hex(_WORD_BYTES)
    with _secret(given, folder if source == "file" else None, word) as secret:
        for rank in range(1, size):
            key = f"{place}/welcome/{rank}"
            proof = seal(secret, b"welcome", key.encode(), hellos[rank][0].encode(), word.encode()).hex()
            base.set(key, json.dumps({"error": "", "word": word, "seal": proof}))
        store = SealedStore(base, seal(secret, b"key", word.encode()))
        late = missing_keys(base, [f"{place}/ready/{rank}" for rank in range(1, size)], timeout_s)
        if late:
            raise DeadlineError(
                f"rank 0: {named_ranks([rank + 1 for rank in late])} connected to the store and then stopped answering"
            )
        for rank in range(1, size):
            store.get(f"{place}/ready/{rank}")
    error = _shared_devices(who) or refusal(who)
    store.set(f"{place}/go", json.dumps([error, who]))
    if error:
        raise ConfigError(error)
    met = HandshakeResult(store, word, who, source, turn)
    return met._replace(clocks=_measured_clocks(met, timeout_s))


def _first_ranks(met: HandshakeResult) -> list[int]:
    """Return the first rank of each host, if clocks are measured in this meeting, else an empty list."""
    numbers = numbered([each.host for each in met.who])
    return (
        [] if met.turn > 1 or max(numbers) == 0 else [numbers.index(host) for host in range(max(numbers) + 1)]
    )


def _answer_for_clock(met: HandshakeResult, rank: int, timeout_s: float) -> None:
    """Tell rank 0 this host's clock at the moment at which rank 0's question arrives."""
    if rank in _first_ranks(met):
        asked = f"clock/{met.word}/{rank}"
        # A call that blocks returns as soon as the question is there; polling would be late by a pause.
        met.store.wait([asked], timedelta(seconds=timeout_s + _PATIENCE_S))
        met.store.set(f"{asked}/answer", repr(time.time()))


def _measured_clocks(met: HandshakeResult, timeout_s: float) -> tuple[float | None, ...]:
    """Return how far each host's clock is ahead of this one, exact to half of the way there and back."""
    found: list[float | None] = []
    for rank in _first_ranks(met):
        if rank == 0:
            found.append(0.0)
            continue
        asked = f"clock/{met.word}/{rank}"
        before_s = time.time()
        met.store.set(asked, "")
        met.store.wait([f"{asked}/answer"], timedelta(seconds=timeout_s))
        after_s = time.time()
        found.append(float(met.store.get(f"{asked}/answer")) - (before_s + after_s) / 2)
    return tuple(found)


@contextlib.contextmanager
def _secret(given: str | None, folder: Path | None, word: str) -> Iterator[bytes]:
    """Yield the job's secret; a secret that rank 0 draws is in ``folder`` inside this context."""
    if folder is None:
        yield (given or "").encode()
        return
    secret = secrets.token_bytes(2 * _WORD_BYTES)
    path = folder / word
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    try:
        yield secret
    finally:
        path.unlink(missing_ok=True)


def _hello(data: bytes, rank: int) -> tuple[str, RankIdentity]:
    """Return the number used once and the identity in a rank's hello.

    Any program that reaches the port may write a hello, so the text is not trusted.

    Raises:
        CommError: if the text is not a hello.
    """
    where = f"store: the hello of rank {rank}"
    found = read_object(
        b'{"hello": ' + data[: _TEXT_BYTES + 1] + b"}", where, limit_bytes=_TEXT_BYTES, kind=CommError
    )
    match found["hello"]:
        case [str(nonce), str(host), int(pid), *texts] if (
            len(found) == 1
            and 0 < pid < 2**31
            and len(texts) == len(RankIdentity._fields) - 2
            and all(isinstance(text, str) for text in texts)
            and (nonce + host + "".join(texts)).isprintable()
        ):
            return nonce, RankIdentity(host, pid, *texts)
    raise CommError(
        f"{where} is not what a rank writes ({data[:80]!r}): another program reached the job's store. Start the job "
        "again, where no other program reaches its port"
    )


def _checked(word: object) -> str:
    """Return ``word`` if it has only hexadecimal digits, because it becomes part of a path."""
    if isinstance(word, str) and len(word) == 2 * _WORD_BYTES and set(word) <= set("0123456789abcdef"):
        return word
    raise CommError(
        f"store: rank 0's welcome holds {word!r} where a word of {2 * _WORD_BYTES} digits belongs"
    )


def _shared_devices(who: Sequence[RankIdentity]) -> str:
    """Return the reason why these ranks cannot begin, or ""."""
    taken: dict[str, dict[str, list[int]]] = {}
    for rank, each in enumerate(who):
        if each.device:
            taken.setdefault(each.host, {}).setdefault(each.device, []).append(rank)
    for devices in taken.values():
        for device, ranks in devices.items():
            if len(ranks) > 1:
                number = counted(sum(map(len, devices.values())), "rank")
                return (
                    f"{number} on one host took {counted(len(devices), 'device')}: {device} is that of "
                    f"{named_ranks(ranks)}. A number in comm.device gives one device to every rank: leave it out "
                    f"({device.partition(':')[0]}, auto). Where there is none, LOCAL_RANK is the same or missing, or "
                    "CUDA_VISIBLE_DEVICES shows these ranks one device: start a rank per device with shardwise launch, "
                    "torchrun or srun, set LOCAL_RANK, or comm.device: cpu"
                )
    return ""
