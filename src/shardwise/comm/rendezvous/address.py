"""Addresses: the numeric address by which this host reaches the job's store, and the interface that has it.

    the store's name   10.0.0.1, fd00::1, gpu1           whatever started the ranks gives: MASTER_ADDR, SLURM's list
    its address        10.0.0.1                          numeric; a name is resolved once
    this host's own    10.0.0.2                          the address from which the kernel sends to the store
    its interface      eth1                              for gloo and NCCL, which take names of interfaces

A host's own name is never used: it may resolve nowhere, or to 127.0.1.1. The first of these decides which interface
gloo and NCCL use: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, the key ``comm.interface``, the way to the store.

If the store's name means this host itself and resolves to a loopback address or nowhere, the store listens at the
host's only address; if the host has several, at that of ``comm.interface`` or of the default route.

Cost: one look-up of a name, one datagram socket that sends nothing.
"""

import ctypes
import ipaddress
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.base.errors import ConfigError

_PATIENCE_S = 8.0
"""Seconds within which a name must resolve."""
_ELSEWHERE = {4: "198.51.100.1", 6: "2001:db8::1"}
"""Addresses of documentation: the way to them is the default route."""
_ANY_PORT = 9
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables in which gloo and NCCL look for the name of an interface."""
_OF_LAUNCHER = "SHARDWISE_INTERFACE"
"""Variable with the interface that our launcher has put into the two others, by the way to the store."""


class HostAddress(NamedTuple):
    """One address of this host."""

    interface: str
    address: str
    """Numeric, with the zone of an address that is valid on one link alone: fe80::1%eth0."""
    prefix: int = 0
    """Leading bits that all addresses of its network share; 0 if not known."""

    @property
    def version(self) -> int:
        """Version of IP: 4 or 6."""
        return 6 if ":" in self.address else 4


class HostRoute(NamedTuple):
    """Way of this host to the job's store."""

    store: str
    """Numeric address of the store."""
    own: str
    """Numeric address at which other hosts reach this host."""
    interface: str
    """Interface that has ``own``; "" if the system does not report it."""
    reason: str
    """What decided it, for the table of hosts."""


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _InterfaceAddress(ctypes.Structure):
    pass


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("mask", ctypes.POINTER(_SocketAddress)),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)
_IS_UP = 0x1


def own_addresses() -> list[HostAddress]:
    """Return the addresses of the interfaces of this host that are up; empty where the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return []
    system = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if system.getifaddrs(ctypes.byref(first)):
        return []
    found = []
    try:
        each = first
        while each:
            row = each.contents
            if row.address and row.flags & _IS_UP:
                name = row.name.decode(errors="replace")
                data = bytes(row.address.contents.data)
                mask = bytes(row.mask.contents.data) if row.mask else b""
                if row.address.contents.family == socket.AF_INET:
                    text = socket.inet_ntop(socket.AF_INET, data[2:6])
                    found.append(HostAddress(name, text, _ones(mask[2:6])))
                elif row.address.contents.family == socket.AF_INET6:
                    text = socket.inet_ntop(socket.AF_INET6, data[6:22])
                    zone = f"%{name}" if ipaddress.ip_address(text).is_link_local else ""
                    found.append(HostAddress(name, text + zone, _ones(mask[6:22])))
            each = row.next
    finally:
        system.freeifaddrs(first)
    return found


def _ones(mask: bytes) -> int:
    return int.from_bytes(mask, "big").bit_count()


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address; "" if the system does not report it."""
    return next((each.interface for each in own_addresses() if each.address == address), "")


def is_numeric(address: str) -> bool:
    """Return whether ``address`` is an address and not a name."""
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local(address: str) -> bool:
    """Return whether a numeric address can be reached from this host alone."""
    bare = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(bare, "ipv4_mapped", None) or bare
    return bool(mapped.is_loopback or mapped.is_unspecified)


def is_public(address: str) -> bool:
    """Return whether a numeric address is one of the open internet."""
    return is_numeric(address) and ipaddress.ip_address(address.partition("%")[0]).is_global


def bare(address: str) -> str:
    """Return ``address`` without the brackets that URLs put around IPv6."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def resolved(name: str, patience_s: float = _PATIENCE_S) -> list[str]:
    """Return the numeric addresses of a name, in the resolver's order.

    Args:
        name: A name, or a numeric address.
        patience_s: Seconds to wait; a resolver may ask servers that do not answer.

    Raises:
        OSError: if the name does not resolve, or not in time.
    """
    answers: queue.Queue[list[str] | OSError] = queue.Queue()

    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_STREAM)
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # ValueError: no name of a host, such as one with a NUL
            answers.put(error if isinstance(error, OSError) else OSError(str(error)))
        else:
            answers.put([_text(row[4]) for row in rows if row[0] in (socket.AF_INET, socket.AF_INET6)])

    threading.Thread(target=look_up, name="shardwise-resolver", daemon=True).start()
    try:
        found = answers.get(timeout=patience_s)
    except queue.Empty:
        raise OSError(f"no answer within {patience_s:.0f} s") from None
    if isinstance(found, OSError):
        raise found
    return list(dict.fromkeys(found))


def _text(place: Sequence[object]) -> str:
    """Return the address in a socket's address, with the zone of an IPv6 address that has one."""
    address = str(place[0])
    zone = place[3] if len(place) == 4 else 0
    if isinstance(zone, int) and zone and "%" not in address:
        return f"{address}%{socket.if_indextoname(zone)}"
    return address


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of sockets of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_of(address: str) -> str:
    """Return the address from which this host sends to a numeric address.

    Raises:
        OSError: if there is no way to the address.
    """
    place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4]
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # connecting a datagram socket sends nothing
        return _text(probe.getsockname())


def own_address(address: str) -> str:
    """Return this host's address on the way to ``address``, a name or a numeric address of another host.

    Raises:
        ConfigError: if there is no way to the address.
    """
    try:
        return source_of(resolved(bare(address))[0])
    except OSError as error:
        raise ConfigError(
            f"launch: this host finds no way to --master_addr {_short(address)}: {error}; check the name and the "
            "network"
        ) from None


def selected(asked: str, present: Sequence[HostAddress]) -> HostAddress:
    """Return the address that ``comm.interface`` names: that of an interface, or one within a network.

    Args:
        asked: Name of an interface, a network such as 10.0.0.0/8, or an address.
        present: Addresses of this host.

    Raises:
        ConfigError: if this host has no such address.
    """
    try:
        network = ipaddress.ip_network(asked, strict=False)
    except ValueError:
        found = [each for each in present if each.interface == asked]
    else:
        # Whether an address lies in a network of the other version is a question with the answer no.
        found = [each for each in present if ipaddress.ip_address(each.address.partition("%")[0]) in network]
    found.sort(key=lambda each: ("%" in each.address, each.version))
    if not found:
        raise ConfigError(
            f"comm.interface: this host has no interface and no address that fits {_short(asked)}; it has "
            f"{listed(present)}"
        )
    return found[0]


def find_route(
    name: str, env: Mapping[str, str], asked: str = "", present: Sequence[HostAddress] | None = None
) -> HostRoute:
    """Return the way of this host to the store of a job on several hosts.

    Args:
        name: Name or address of the store's host.
        env: Environment of this process.
        asked: Value of ``comm.interface``; "": the way to the store decides.
        present: Addresses of this host; None: as the system reports them.

    Raises:
        ConfigError: if the name does not resolve, there is no way to it, or the choice is not clear.
    """
    present = own_addresses() if present is None else present
    chosen, reason = _chosen(asked, present, env)
    store = _store_address(bare(name), chosen, present)
    try:
        on_the_way = source_of(store)
    except OSError as error:
        raise ConfigError(
            f"comm: this host has no way to the store at {store}: {error.strerror or error}; it has "
            f"{listed(present)}. Give MASTER_ADDR an address that every host reaches"
        ) from None
    if chosen is None:
        return HostRoute(store, on_the_way, interface_of(on_the_way), f"the way to {store}")
    return HostRoute(store, chosen.address, chosen.interface, reason)


def _chosen(
    asked: str, present: Sequence[HostAddress], env: Mapping[str, str]
) -> tuple[HostAddress | None, str]:
    """Return the address that the user's variables or ``comm.interface`` choose, and what chose it."""
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
        first = env.get(variable, "").split(",")[0].removeprefix("=")
        if first == env.get(_OF_LAUNCHER):
            continue
        fitting = [each for each in present if each.interface == first and "%" not in each.address]
        if fitting:
            return fitting[0], f"{variable}={env[variable]}"
    if asked:
        return selected(asked, present), f"comm.interface: {asked}"
    return None, ""


def _store_address(name: str, chosen: HostAddress | None, present: Sequence[HostAddress]) -> str:
    """Return the numeric address of the store's host."""
    try:
        found, why = resolved(name), "resolves to itself here"
    except OSError as error:
        found, why = [], f"does not resolve: {error.strerror or error}"
    reachable = [address for address in found if not is_local(address)]
    if reachable:
        return reachable[0]
    own_name = socket.gethostname()
    if not name or is_numeric(name) or name.partition(".")[0] not in (own_name, own_name.partition(".")[0]):
        raise ConfigError(
            f"comm: the store's host {_short(name)} {why}, and the job has several hosts; set MASTER_ADDR to the "
            "first host's address in the network that they share"
        )
    return _main_address(chosen, present, f"the store's host {name} is this one, and the name {why}")


def main_address(env: Mapping[str, str], asked: str = "") -> str:
    """Return the address at which other hosts reach this one, for a store whose address the others are yet to learn.

    Args:
        env: Environment of this process.
        asked: Value of ``comm.interface``.

    Raises:
        ConfigError: if this host has several addresses and nothing says which one is meant.
    """
    present = own_addresses()
    return _main_address(_chosen(asked, present, env)[0], present, "the store is on this host")


def _main_address(chosen: HostAddress | None, present: Sequence[HostAddress], why: str) -> str:
    if chosen is not None:
        return chosen.address
    # Bridges of containers exist on hosts alike, with the same addresses.
    outward = [
        each
        for each in present
        if not is_local(each.address)
        and "%" not in each.address
        and not each.interface.startswith(("docker", "virbr"))
    ]
    if len({each.interface for each in outward}) == 1:
        return outward[0].address
    for elsewhere in _ELSEWHERE.values():
        try:
            return source_of(elsewhere)
        except OSError:
            continue
    raise ConfigError(
        f"comm: {why}, and nothing says which address the other hosts reach: it has {listed(present)} and no default "
        "route. Set MASTER_ADDR to one of them, or comm.interface to an interface"
    )


def listed(present: Sequence[HostAddress]) -> str:
    """Return addresses with their interfaces as text for an error."""
    shown = [f"{each.address} ({each.interface})" for each in present if "%" not in each.address]
    return ", ".join(shown[:16]) or "no address"


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
