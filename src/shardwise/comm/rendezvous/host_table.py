"""Table of the hosts of a job, and what differs between them.

    host   ranks  address   interface  chosen by            has      clock
    gpu1   0-7    10.0.0.1  eth1       the way to 10.0.0.1  8 H200
    gpu2   8-15   10.0.0.2  eth1       the way to 10.0.0.1  8 H200   +0.002 s

Each rank tells the facts of its host when the ranks meet (handshake.py); rank 0 prints the table if there are several
hosts. Hosts whose versions of Shardwise, torch or Python differ, or whose program does, are named and refused, unless
``comm.versions: warn`` is set: they may disagree about what they send, and then wait for one another.

Cost: on several hosts the first rank of each reads the source of this package once, some milliseconds.
"""

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.base.words import counted
from shardwise.comm.rendezvous.address import HostRoute, is_public
from shardwise.comm.rendezvous.handshake import RankIdentity
from shardwise.comm.rendezvous.hosts import numbered

_ROWS = 64
_DIGITS = 8
_PROGRAM_BYTES = 1 << 24
CLOCK_S = 1.0
"""Difference of two hosts' clocks that is worth a warning."""


class HostRow(NamedTuple):
    """One host of the table."""

    name: str
    ranks: tuple[int, ...]
    about: RankIdentity
    """What the first of its ranks has told."""
    clock_s: float | None
    """Seconds that the host's clock is ahead of that of rank 0's host; None: not measured."""


def described(
    me: RankIdentity, device: torch.device, route: HostRoute | None, one_host: bool, is_first: bool
) -> RankIdentity:
    """Return ``me`` with the facts of this host.

    Args:
        me: Identity of this rank.
        device: The device of this rank.
        route: Way to the store, on several hosts.
        one_host: True if all ranks are on this host, which then need no versions.
        is_first: True if this rank is the first of its host.
    """
    return me._replace(
        name=_plain(socket.gethostname()),
        address="" if route is None else route.own,
        interface="" if route is None else route.interface,
        chosen_by="" if route is None else _plain(route.reason),
        has=_plain(_resources(device)),
        versions="" if one_host else _plain(", ".join(_versions(is_first))),
    )


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:200]


def _resources(device: torch.device) -> str:
    if device.type == "cpu":
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return counted(count, "core")
    module = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    return f"{torch.accelerator.device_count()} {device.type if named is None else named(device)}"


def _versions(reads_code: bool) -> list[str]:
    """Return "NAME VERSION" of what must be the same on all hosts."""
    try:
        own = metadata.version("shardwise")
    except metadata.PackageNotFoundError:
        own = "?"
    python = ".".join(platform.python_version_tuple()[:2])
    found = [f"shardwise {own}", f"torch {torch.__version__}", f"python {python}"]
    if reads_code:
        root = Path(__file__).parents[2]
        found.append(f"code {_digest(root, sorted(root.rglob('*.py')))}")
        program = getattr(sys.modules.get("__main__"), "__file__", None)
        # What an installation writes for a command names the folder of the installation, which may differ.
        if program and program.endswith(".py") and not Path(program).is_relative_to(root):
            found.append(f"program {Path(program).name} {_digest(Path(program).parent, [Path(program)])}")
    return found


def _digest(root: Path, files: Sequence[Path]) -> str:
    """Return a few digits of a hash of ``files``."""
    code = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as opened:
                data = opened.read(_PROGRAM_BYTES)
        except OSError:
            data = b""
        code.update(
            str(file.relative_to(root)).encode(errors="replace") + len(data).to_bytes(8, "big") + data
        )
    return code.hexdigest()[:_DIGITS]


def rows_of(who: Sequence[RankIdentity], clocks: Sequence[float | None] = ()) -> list[HostRow]:
    """Return the hosts in the order of their first ranks.

    Args:
        who: Identities, by rank.
        clocks: Seconds that each host's clock is ahead, by number of the host; empty: not measured.
    """
    numbers = numbered([each.host for each in who])
    found = []
    for number in range(max(numbers) + 1):
        ranks = tuple(rank for rank, host in enumerate(numbers) if host == number)
        first = who[ranks[0]]
        clock_s = clocks[number] if clocks else None
        found.append(HostRow(first.name or f"host {number}", ranks, first, clock_s))
    return found


def table(rows: Sequence[HostRow]) -> str:
    """Return the table as text."""
    lines = [("host", "ranks", "address", "interface", "chosen by", "has", "clock")]
    for row in rows[:_ROWS]:
        clock = "" if row.clock_s is None or row is rows[0] else f"{row.clock_s:+.3f} s"
        about = row.about
        place = (about.address, about.interface, about.chosen_by)
        lines.append((row.name, _span(row.ranks), *place, about.has, clock))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines]
    if len(rows) > _ROWS:
        text.append(f"and {len(rows) - _ROWS} more")
    return "\n".join(f"  {line.rstrip()}" for line in text)


def _span(ranks: Sequence[int]) -> str:
    is_whole = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    return (
        f"{ranks[0]}-{ranks[-1]}" if is_whole else ",".join(map(str, ranks[:8])) + ",..." * (len(ranks) > 8)
    )


def differences(who: Sequence[RankIdentity]) -> list[str]:
    """Return a sentence for each version that is not the same on all hosts, with the hosts of each."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows_of(who):
        for part in filter(None, row.about.versions.split(", ")):
            name, _, version = part.partition(" ")
            found.setdefault(name, {}).setdefault(version, []).append(row.name)
    sentences = []
    for name, versions in found.items():
        if len(versions) > 1:
            shown = [f"{version} on {_listed(hosts)}" for version, hosts in versions.items()]
            what = {"code": "the source of shardwise", "program": "the program"}.get(name, name)
            sentences.append(f"{what} differs between the hosts: {'; '.join(shown)}")
    return sentences


def refusal_of_versions(who: Sequence[RankIdentity]) -> str:
    """Return why hosts with other versions cannot begin, or ""."""
    found = differences(who)
    if not found:
        return ""
    return (
        f"comm.versions: {'; and '.join(found)}. Install the same on every host, or set comm.versions: warn to run all "
        "the same"
    )


def refusal_of_addresses(who: Sequence[RankIdentity]) -> str:
    """Return why hosts at addresses of the internet cannot begin without ``comm.public``, or ""."""
    found = [row for row in rows_of(who) if row.about.address and is_public(row.about.address)]
    if not found:
        return ""
    shown = _listed([f"{row.name} at {row.about.address}" for row in found])
    return (
        f"comm.public: {shown} would exchange data at an address of the open internet, where the ports of gloo and "
        "NCCL accept everyone; choose another interface (comm.interface), or set comm.public: true"
    )


def clock_warnings(rows: Sequence[HostRow]) -> list[str]:
    """Return a sentence for each host whose clock is far from that of rank 0's host."""
    return [
        f"the clock of {row.name} is {abs(row.clock_s):.1f} s {'ahead of' if row.clock_s > 0 else 'behind'} that of "
        f"{rows[0].name}: times in the logs of the two do not agree"
        for row in rows
        if row.clock_s is not None and abs(row.clock_s) >= CLOCK_S
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
