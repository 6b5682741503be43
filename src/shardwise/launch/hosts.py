"""Hosts and slots of a job, and the position of this host's ranks in it.

    hostfile                   gpu1 slots=4                      a line per host; # begins a comment
                               gpu2 slots=4
    --include "gpu1@gpu2:0,2"  hosts, or slots of hosts          taken from the hostfile, in its order
    --exclude "gpu2:1,3"       the same without these            (only one of the two options)
    ranks                      0 1 2 3 on gpu1, 4 5 on gpu2      host by host, slot by slot

A slot is a place for one rank. On a host with accelerators the slot is the number of one of them, counted through
``CUDA_VISIBLE_DEVICES`` if that is set. The launcher starts no process on another host: every host runs the same
command with its own ``--node_rank``, and the ranks connect at the first host's address.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.regular_files import read_small_text
from shardwise.base.words import counted
from shardwise.comm.rendezvous.address import interface_of, own_address
from shardwise.comm.rendezvous.seat import is_loopback

LOOPBACK = "127.0.0.1"
HERE = "localhost"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")
_HOSTFILE_BYTES = 16 << 20
_DIGITS = 9
_CORE_LIMIT = 1 << 16
_SHOWN = 16
SLOT_LIMIT = 4096
"""Most slots of one host, and most ranks that one launcher starts."""
RANK_LIMIT = 1 << 20
"""Most ranks of one job."""


class Host(NamedTuple):
    """One host and its slots that take ranks."""

    name: str
    slots: tuple[int, ...]


class HostRanks(NamedTuple):
    """Position of this host's ranks in the job."""

    local: int
    """Number of ranks on this host."""
    world: int
    """Number of ranks of the job."""
    first: int = 0
    """Rank number of this host's first rank."""
    address: str = LOOPBACK
    """Address of the store at which the ranks connect."""
    port: int = 0
    """Port of the store at ``address``; 0: any free port."""
    interface: str = "lo0" if sys.platform == "darwin" else "lo"
    """Network interface by which the ranks of this host are reached."""
    slots: tuple[int, ...] | None = None
    """Accelerator of each local rank; None: as torch counts them."""

    @property
    def is_one_host(self) -> bool:
        """True if this host has all ranks of the job."""
        return self.local == self.world


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile, in its order.

    Raises:
        ConfigError: if the file cannot be read or a line is wrong; the message names the line.
    """
    try:
        text = read_small_text(path, _HOSTFILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"hostfile: cannot read {path} ({error.strerror}); give a text file with a line `HOST slots=N` per host"
        ) from None
    found: list[Host] = []
    names: set[str] = set()
    total = 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.partition("#")[0].strip()
        if not bare:
            continue
        match = _LINE.fullmatch(bare)
        slots = 0 if match is None or len(match["slots"]) > _DIGITS else int(match["slots"])
        if match is None or not 1 <= slots <= SLOT_LIMIT:
            raise ConfigError(
                f"hostfile: {path}, line {number}: {_short(bare)}; expected `HOST slots=N`, N from 1 to {SLOT_LIMIT}"
            )
        name = _checked(match["name"], f"hostfile: {path}, line {number}")
        if name in names:
            raise ConfigError(
                f"hostfile: {path}, line {number}: {name} is there twice; give each host one line"
            )
        names.add(name)
        total += slots
        if total > RANK_LIMIT:
            raise ConfigError(
                f"hostfile: {path}, line {number}: more than {RANK_LIMIT} slots in all; is it a hostfile?"
            )
        found.append(Host(name, tuple(range(slots))))
    if not found:
        raise ConfigError(f"hostfile: {path} names no host; expected a line `HOST slots=N` per host")
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _checked(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {_short(name)} is not the name of a host; it has letters, digits, dots and dashes"
        )
    return name


def choose(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Return ``hosts`` after ``--include`` or ``--exclude`` is applied.

    Args:
        hosts: All hosts.
        include: Hosts and slots to keep, as in ``gpu1@gpu2:0,2``.
        exclude: Hosts and slots to leave out.

    Raises:
        UsageError: if both filters are given, a filter names an unknown host or slot, or no slot is left.
        ConfigError: if a name is not the name of a host.
    """
    if include and exclude:
        raise UsageError("launch: --include and --exclude exclude one another; give one of them")
    option = "--include" if include else "--exclude"
    named = _parsed(include or exclude, option)
    known = {host.name: host for host in hosts}
    for name, slots in named.items():
        if name not in known:
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise UsageError(
                f"launch: {option} names the host {name!r}; there are {', '.join(list(known)[:_SHOWN])}{more}"
            )
        missing = sorted(set(slots) - set(known[name].slots))
        if missing:
            raise UsageError(
                f"launch: {option} names slot {missing[0]} of {name}, which has {list(known[name].slots[:_SHOWN])}"
                + (f" and {len(known[name].slots) - _SHOWN} more" if len(known[name].slots) > _SHOWN else "")
            )
    chosen = []
    for host in hosts:
        asked = named.get(host.name)
        if asked is None:
            taken = () if include else host.slots
        elif include:
            taken = tuple(asked) or host.slots
        else:
            taken = tuple(slot for slot in host.slots if asked and slot not in asked)
        if taken:
            chosen.append(Host(host.name, taken))
    if not chosen:
        raise UsageError(f"launch: {option} {include or exclude!r} leaves no slot at all")
    return chosen


def _parsed(text: str, option: str) -> dict[str, list[int]]:
    """Return the slots by host of a filter such as ``gpu1@gpu2:0,2``; no slots stand for the whole host."""
    found: dict[str, list[int]] = {}
    for part in filter(None, (part.strip() for part in text.split("@"))):
        name, colon, rest = part.partition(":")
        _checked(name, f"launch: {option}")
        if name in found:
            raise UsageError(f"launch: {option} names {name} twice; give it once, with all of its slots")
        texts = rest.split(",") if colon else []
        if not all(re.fullmatch(rf"[0-9]{{1,{_DIGITS}}}", text.strip()) for text in texts):
            raise UsageError(f"launch: {option} {_short(part)}: expected HOST or HOST:SLOT,SLOT")
        slots = [int(text) for text in texts]
        if slots and max(slots) >= SLOT_LIMIT:
            raise UsageError(
                f"launch: {option} {_short(part)} names slot {max(slots)}; slots count from 0 to {SLOT_LIMIT - 1}"
            )
        if len(set(slots)) != len(slots):
            raise UsageError(f"launch: {option} {_short(part)} names a slot twice")
        found[name] = slots
    return found


def slots_named(text: str) -> list[int]:
    """Return the slots of this host that ``localhost:0,2`` names, for jobs without a hostfile.

    Raises:
        UsageError: if ``text`` names another host.
    """
    found = _parsed(text, "--include")
    if set(found) - {HERE}:
        raise UsageError(
            f"launch: --include names {', '.join(sorted(set(found) - {HERE}))} without a hostfile; give --hostfile, or "
            f"name slots of this host as {HERE}:0,1"
        )
    return found.get(HERE, [])


def ranks_here(hosts: Sequence[Host], node: int | None, address: str | None, port: int) -> HostRanks:
    """Return the position of the ranks of host number ``node``; a single host uses the loopback interface.

    Args:
        hosts: All hosts of the job.
        node: Number of this host in ``hosts``; may be None for one host.
        address: Address of the first host; None: its name.
        port: Port of the store.

    Raises:
        UsageError: if there are several hosts and ``node`` or ``address`` does not fit.
        ConfigError: if ``address`` cannot be reached.
    """
    counts = [len(host.slots) for host in hosts]
    world = sum(counts)
    if len(hosts) == 1:
        return HostRanks(world, world, slots=hosts[0].slots)
    address = address or hosts[0].name
    if node is None:
        commands = "\n".join(
            f"  on {host.name}: shardwise launch --node_rank {number} --master_addr {address} --master_port {port} ..."
            for number, host in enumerate(hosts[:_SHOWN])
        )
        commands += f"\n  and so on, for {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
        raise UsageError(
            f"launch: {counted(len(hosts), 'host')} are named, and ranks are started on this one alone; start the same "
            f"command on each, with its number (and one SHARDWISE_SECRET in the environment of all):\n{commands}"
        )
    if not 0 <= node < len(hosts):
        raise UsageError(
            f"launch: --node_rank {node} of {counted(len(hosts), 'host')}; it counts from 0 to {len(hosts) - 1}"
        )
    if is_loopback(address):
        raise UsageError(
            f"launch: --master_addr {address} cannot be reached from the other hosts; give the first host's address "
            "in the network that they share"
        )
    own = own_address(address)
    return HostRanks(
        counts[node], world, sum(counts[:node]), address, port, interface_of(own), slots=hosts[node].slots
    )


def visible_devices(slots: Sequence[int], visible: str | None) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` for ``slots``.

    Args:
        slots: Indices into the devices that ``visible`` shows.
        visible: Current value of the variable; None: not set.

    Raises:
        UsageError: if ``visible`` shows fewer devices.
    """
    if not visible:
        return ",".join(map(str, slots)) if visible is None else ""
    shown = [name.strip() for name in visible.split(",") if name.strip()]
    if slots and max(slots) >= len(shown):
        raise UsageError(
            f"launch: slot {max(slots)} is asked for, and CUDA_VISIBLE_DEVICES={visible} shows {len(shown)}; "
            "its devices count from 0"
        )
    return ",".join(shown[slot] for slot in slots)


def parse_cores(text: str) -> list[int]:
    """Return the cores that a list such as ``0,2-4`` names: [0, 2, 3, 4].

    Raises:
        UsageError: if ``text`` is not such a list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(rf"\s*([0-9]{{1,{_DIGITS}}})(?:-([0-9]{{1,{_DIGITS}}}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last >= _CORE_LIMIT:
            raise UsageError(
                f"launch: --bind_core_list {_short(text)}: expected cores below {_CORE_LIMIT}, as in 0,2-4"
            )
        found += range(first, last + 1)
        if len(found) > _CORE_LIMIT:
            break
    if len(set(found)) != len(found):
        raise UsageError(f"launch: --bind_core_list {_short(text)} names a core twice")
    return found


def shares(cores: Iterable[int], ranks: int) -> list[tuple[int, ...]]:
    """Split ``cores`` into equal parts, one for each rank; cores that are left over stay unused.

    Args:
        cores: Cores to split.
        ranks: Number of ranks.

    Raises:
        UsageError: if there are fewer cores than ranks.
    """
    given = list(cores)
    size = len(given) // ranks
    if not size:
        raise UsageError(
            f"launch: {counted(ranks, 'rank')} cannot be bound to {counted(len(given), 'core')}; each needs its own"
        )
    return [tuple(given[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def cores_of_ranks(core_list: str | None, ranks: int) -> list[tuple[int, ...]]:
    """Return the cores of this host that each of ``ranks`` ranks binds itself to.

    Args:
        core_list: The cores to share out; None: the cores of this process.
        ranks: Number of ranks on this host.

    Raises:
        UsageError: if this system does not bind processes to cores, or this process may not use one of the cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("launch: --bind_cores_to_rank: this system does not bind processes to cores")
    mine = sorted(os.sched_getaffinity(0))
    wanted = parse_cores(core_list) if core_list else mine
    if set(wanted) - set(mine):
        raise UsageError(f"launch: --bind_core_list {core_list}: this process may use the cores {mine}")
    return shares(wanted, ranks)
