"""Choice of the address at which the ranks of several hosts meet: the first of these that is there.

    1  --master_addr
    2  the address by which ssh reached the first host, or, if that is a loopback address because the launcher runs on
       the first host, the address by which ssh left it for another host
    3  an address of the first host in a network in which every other host has an address, too
    4  what the first host's name resolves to on the launcher's host, unless that is a loopback address

All but the first are numeric, so that no rank depends on names of hosts.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.address import is_local, is_numeric, own_addresses, resolved

Hello = Mapping[str, Any]
"""An agent's first message (``agent.py``)."""


def addresses_here() -> list[str]:
    """Return the addresses of this host with their networks, such as ``10.0.0.1/24``, without those of loopback."""
    found = [each for each in own_addresses() if "%" not in each.address and not is_local(each.address)]
    return [f"{each.address}/{each.prefix}" for each in found if each.prefix]


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
        found = [address for address in resolved(name) if not _is_of_one_host(address)]
    except OSError:
        found = []
    if not found:
        raise ConfigError(
            f"launch: {name} has no address that the other hosts are known to reach; give --master_addr, its address "
            "in their network"
        )
    return found[0]


def _is_of_one_host(address: str) -> bool:
    """Return True for an address that another host cannot use: one of loopback or of one link, or no address."""
    if not is_numeric(address) or is_local(address):
        return True
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


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
