"""Hosts for tests: network namespaces of this machine, joined by a switch. They need root on Linux.

    namespace    shardwise1_PID   shardwise2_PID   ...
    first net    cable1           cable2                 10.213.7.N/24   fd00:213:7::N/64
    second net   second1          second2                10.213.8.N/24   fd00:213:8::N/64   (with ``second=True``)
    name         node1            node2                  the host's own name, which nothing resolves unless asked

Processes of a host see its interfaces, its ``/sys/class/net``, its name and its ``/etc/hosts`` alone; they share the
files of this machine. Bytes are those that the kernel counts on an interface.
"""

import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.ranks import PRELOADED

_NETS = {"cable": 7, "second": 8}
_NAMED = 'hostname "$0"; exec "$@"'
"""Program of sh that gives its own UTS namespace a name, and then becomes the process that was asked for."""


_NEW_NET, _NEW_NAMES, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
_BIND, _PRIVATE = 0x1000, 0x4000 | 0x40000
_PATIENCE_S = 60.0


class Counted(NamedTuple):
    """Bytes on one interface since it was made."""

    sent: int
    received: int


@dataclass
class NamespaceHost:
    """One host: a network namespace with a name of its own.

    Attributes:
        number: Number of the host, from 1.
        namespace: Name of the network namespace.
        hostname: Name that processes of the host have as their own.
        v4: IPv4 addresses, by interface.
        v6: IPv6 addresses, by interface.
    """

    number: int
    namespace: str
    hostname: str
    v4: dict[str, str] = field(default_factory=dict)
    v6: dict[str, str] = field(default_factory=dict)

    @property
    def interface(self) -> str:
        """Name of the interface in the first net."""
        return f"cable{self.number}"

    @property
    def address(self) -> str:
        """Address in the first net: IPv4 if there is one, else IPv6."""
        return self.v4.get(self.interface) or self.v6[self.interface]

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` on this host; the process keeps the number of the command's."""
        named = ["unshare", "--uts", "sh", "-c", _NAMED, self.hostname]
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[Any]":
        """Start ``words`` on this host; ``options`` are those of ``subprocess.Popen``."""
        return subprocess.Popen(self.command(*words), **options)

    def run(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[Any]":
        """Run ``words`` on this host to their end; ``options`` are those of ``subprocess.run``."""
        return subprocess.run(self.command(*words), **options)

    def enter(self) -> None:
        """Move this process to the host; for a process that has one thread, such as a fork."""
        system = ctypes.CDLL(None, use_errno=True)

        def call(name: str, *arguments: Any) -> None:
            if getattr(system, name)(*arguments):
                raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

        with open(f"/run/netns/{self.namespace}") as place:
            call("setns", place.fileno(), _NEW_NET)
        call("unshare", _NEW_NAMES | _NEW_MOUNTS)
        call("mount", b"none", b"/", None, _PRIVATE, None)
        for file in sorted((Path("/etc/netns") / self.namespace).iterdir()):
            call("mount", str(file).encode(), f"/etc/{file.name}".encode(), None, _BIND, None)
        socket.sethostname(self.hostname)

    def ip(self, *words: str) -> str:
        """Return what ``ip`` says in this namespace."""
        return _call("ip", "-n", self.namespace, *words)

    def counted(self, interface: str = "") -> Counted:
        """Return the bytes on an interface, "lo" among them; without a name, on that of the first net."""
        (link,) = json.loads(self.ip("-s", "-j", "link", "show", "dev", interface or self.interface))
        return Counted(*(link["stats64"][way]["bytes"] for way in ("tx", "rx")))

    def limit(self, rate: str, interface: str = "") -> None:
        """Let this host send at most ``rate`` ("100mbit") by an interface; "" lifts the limit."""
        device = interface or self.interface
        subprocess.run(
            ["tc", "-n", self.namespace, "qdisc", "del", "dev", device, "root"], capture_output=True
        )
        if rate:
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            _call("tc", "-n", self.namespace, "qdisc", "add", "dev", device, "root", *shape)

    def cut(self, interface: str = "") -> None:
        """Take an interface down."""
        self.ip("link", "set", interface or self.interface, "down")


def call_on(
    hosts: Sequence["NamespaceHost"], function: Callable[..., Any], *args: Any, each: int = 1, **env: str
) -> list[Any]:
    """Call ``function(*args)`` in ``each`` processes of every host, as ranks, and return results or exceptions by rank.

    The processes are forks of the server of tests/ranks.py, which has imported torch.

    Args:
        hosts: The hosts, in the order of their ranks.
        function: A function at module level.
        args: Its arguments.
        each: Number of ranks on each host.
        env: More variables; "" removes one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    started = []
    for rank in range(each * len(hosts)):
        ours, theirs = context.Pipe()
        own = {
            "RANK": rank,
            "WORLD_SIZE": each * len(hosts),
            "LOCAL_RANK": rank % each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": 29500,
        }
        variables = {name: str(value) for name, value in (own | env).items()}
        process = context.Process(
            target=_be_called, args=(hosts[rank // each], variables, theirs, function, args), daemon=True
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    found: list[Any] = []
    for process, pipe in started:
        try:
            found.append(
                pipe.recv() if pipe.poll(_PATIENCE_S) else TimeoutError(f"no answer in {_PATIENCE_S} s")
            )
        except EOFError:
            found.append(EOFError("the process ended without an answer"))
        process.join(5)
        process.kill()
    return found


def _be_called(
    host: "NamespaceHost",
    env: dict[str, str],
    pipe: Connection,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    host.enter()
    for name in [
        name for name in os.environ if name.startswith(("SLURM", "OMPI", "GLOO", "NCCL", "SHARDWISE"))
    ]:
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if value})
    for name in (name for name, value in env.items() if not value):
        os.environ.pop(name, None)
    try:
        answer = function(*args)
    except Exception as error:
        answer = error
    pipe.send(answer)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def can_make_namespaces() -> bool:
    """Return whether this process may make network namespaces."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    if any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare")):
        return False
    trial = f"shardwise_trial_{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True)
    subprocess.run(["ip", "netns", "delete", trial], capture_output=True)
    return made.returncode == 0


@contextmanager
def namespaces(
    count: int = 2,
    *,
    versions: Sequence[Literal[4, 6]] = (4,),
    second: bool = False,
    rate: str = "",
    names: Sequence[str] = (),
    resolves: dict[str, str] | list[dict[str, str]] | Literal["all"] | None = None,
    default_route: bool = False,
) -> Iterator[list[NamespaceHost]]:
    """Make hosts and remove them at the end of the context; skip the test without the right to make namespaces.

    Args:
        count: Number of hosts.
        versions: Versions of IP that the nets have.
        second: Give each host an interface in a second net, too.
        rate: Most that each host sends by each interface, as ``tc`` writes it: "100mbit"; "": no limit.
        names: The hosts' own names; default: node1, node2 and so on.
        resolves: Addresses by name in every host's ``/etc/hosts`` beside localhost, or a list with those of each host;
            "all": every host's name has its address in the first net; None: no name resolves.
        default_route: Give each host a default route, by its first interface.
    """
    if not can_make_namespaces():
        pytest.skip("needs ip, tc and unshare, and the right to make network namespaces")
    tag = os.getpid()
    named = list(names) or [f"node{number}" for number in range(1, count + 1)]
    hosts = [NamespaceHost(n, f"shardwise{n}_{tag}", name) for n, name in enumerate(named, 1)]
    switch = f"shardwise_switch_{tag}"
    nets = {net: part for net, part in _NETS.items() if net == "cable" or second}
    try:
        _call("ip", "netns", "add", switch)
        for net in nets:
            _call("ip", "-n", switch, "link", "add", net, "type", "bridge")
            _call("ip", "-n", switch, "link", "set", net, "up")
        for host in hosts:
            _call("ip", "netns", "add", host.namespace)
            host.ip("link", "set", "lo", "up")
            for net, part in nets.items():
                _plug(host, switch, net, part, versions)
                if rate:
                    host.limit(rate, f"{net}{host.number}")
            if default_route and 4 in versions:
                host.ip("route", "add", "default", "via", f"10.213.{nets['cable']}.254")
            if default_route and 6 in versions:
                host.ip("-6", "route", "add", "default", "via", f"fd00:213:{nets['cable']}::fe")
        known = {host.hostname: host.address for host in hosts} if resolves == "all" else resolves or {}
        for number, host in enumerate(hosts):
            _write_names(host, known[number] if isinstance(known, list) else known)
        yield hosts
    finally:
        for name in (switch, *(host.namespace for host in hosts)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _plug(host: NamespaceHost, switch: str, net: str, part: int, versions: Sequence[int]) -> None:
    """Give a host an interface in a net of the switch."""
    device, port = f"{net}{host.number}", f"{net}_port{host.number}"
    peer = ["type", "veth", "peer", "name", port, "netns", switch]
    host.ip("link", "add", device, *peer)
    _call("ip", "-n", switch, "link", "set", port, "master", net)
    _call("ip", "-n", switch, "link", "set", port, "up")
    if 4 in versions:
        host.v4[device] = f"10.213.{part}.{host.number}"
        host.ip("addr", "add", f"{host.v4[device]}/24", "dev", device)
    if 6 in versions:
        host.v6[device] = f"fd00:213:{part}::{host.number:x}"
        # nodad: else the address cannot be bound until the kernel has looked for a second owner.
        host.ip("-6", "addr", "add", f"{host.v6[device]}/64", "dev", device, "nodad")
    host.ip("link", "set", device, "up")


def _write_names(host: NamespaceHost, resolves: dict[str, str]) -> None:
    """Write a host's ``/etc/hosts``, and let names be looked up nowhere else; ``ip netns exec`` mounts both."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address} {name}" for name, address in resolves.items()]
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
