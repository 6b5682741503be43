"""Choice of the address at which the ranks of several hosts meet: the first of these that is there.

    1  --master_addr
    2  the address by which ssh reached the first host, or, if that is a loopback address because the launcher runs on
       the first host, the address by which ssh left it for another host
    3  an address of the first host in a network in which every other host has an address, too
    4  what the first host's name resolves to on the launcher's host, unless that is a loopback address

All but the first are numeric, so that no rank depends on names of hosts.
"""

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"
Hello = Mapping[str, Any]
"""An agent's first message (``agent.py``)."""


def addresses_here() -> list[str]:
    """Return the addresses of this host with their networks, such as ``10.0.0.1/24``, without those of loopback."""
    if not sys.platform.startswith("linux"):
        return []
    found = [*_version_4(), *_version_6()]
    return [text for text in found if not ipaddress.ip_interface(text).is_loopback]


def _version_4() -> Iterator[str]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                texts = [
                    socket.inet_ntoa(fcntl.ioctl(probe.fileno(), code, request)[20:24])
                    for code in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                ]
            except OSError:  # an interface without an address
                continue
            yield "/".join(texts)


def _version_6() -> Iterator[str]:
    try:
        rows = [line.split() for line in _IF_INET6.read_text().splitlines()]
    except OSError:  # a kernel without version 6
        return
    for digits, _, prefix, scope, *_ in rows:
        if scope == _GLOBAL_SCOPE:
            yield f"{ipaddress.IPv6Address(int(digits, 16))}/{int(prefix, 16)}"


def meeting_address(hellos: Sequence[Hello], name: str, given: str | None) -> str:
    """Return the address of the store, by the list in the module's docstring.

    Args:
        hellos: The agents' hellos, by host.
        name: Name of the first host, as the launcher knows it.
        given: Value of ``--master_addr``.

    Raises:
        ConfigError: if no address is found.
    """
    if given:
        return given
    server = str(hellos[0].get("server", ""))
    if server and not _is_of_one_host(server):
        return server
    clients = {str(hello.get("client", "")) for hello in hellos[1:]}
    if server and len(clients) == 1 and (client := clients.pop()) and not _is_of_one_host(client):
        return client
    shared = _in_shared_network([_interfaces(hello) for hello in hellos])
    if shared is not None:
        return shared
    try:
        resolved = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        resolved = ""
    if not resolved or _is_of_one_host(resolved):
        raise ConfigError(
            f"launch: {name} has no address that the other hosts are known to reach; give --master_addr, its address "
            "in their network"
        )
    return resolved


def _is_of_one_host(address: str) -> bool:
    """Return True for an address that another host cannot use: one of loopback or of one link."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return found.is_loopback or found.is_link_local or found.is_unspecified


Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def _interfaces(hello: Hello) -> list[Interface]:
    found = []
    for text in hello.get("addresses", ()):
        try:
            found.append(ipaddress.ip_interface(text))
        except ValueError:
            continue
    return [each for each in found if not _is_of_one_host(str(each.ip))]


def _in_shared_network(hosts: Sequence[Sequence[Interface]]) -> str | None:
    """Return an address of the first host in a network of all hosts.

    A bridge of containers has the same address on every host, so the addresses in the network must differ.
    """
    for mine in hosts[0]:
        theirs = [next((each for each in host if each.network == mine.network), None) for host in hosts[1:]]
        if all(each is not None and each.ip != mine.ip for each in theirs):
            return str(mine.ip)
    return None
