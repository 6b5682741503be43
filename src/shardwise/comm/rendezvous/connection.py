"""Connection of a rank to the job's store.

The store is torch's TCPStore, which rank 0 serves, or the agent of torchrun. A TCPStore that opens its own socket
listens on every interface; so rank 0 always gives it a socket that is bound to one address: the loopback interface if
all ranks are on one host, else the address of MASTER_ADDR.
"""

import errno
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.base.errors import CommError
from shardwise.comm.rendezvous.address import HostRoute, family_of
from shardwise.comm.rendezvous.seat import LOOPBACK, JobSeat


def is_under_agent(env: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent serves the store."""
    return "TORCHELASTIC_RUN_ID" in env


def serves(seat: JobSeat, env: Mapping[str, str]) -> bool:
    """Return whether this rank serves the store."""
    return seat.rank == 0 and not is_under_agent(env)


def connect(seat: JobSeat, route: HostRoute | None, timeout_s: float, env: Mapping[str, str]) -> dist.Store:
    """Return the store of the job, which rank 0 begins to serve.

    Args:
        seat: This rank.
        route: Way to the store's host; None: all ranks are on this host.
        timeout_s: Seconds to wait for the store.
        env: Environment of this process.

    Raises:
        CommError: if the store cannot be reached or served.
    """
    descriptor = env.get("SHARDWISE_STORE_FD")
    under_agent, listens = is_under_agent(env), serves(seat, env)
    # All ranks are on this host: no other host shall reach the store, whatever name of this host the environment
    # contains.
    one_host = seat.local_size == seat.world_size
    address = LOOPBACK if one_host and not under_agent else seat.address if route is None else route.store
    listening: dict[str, Any] = {}
    if address == LOOPBACK and not _has_loopback():
        raise CommError(
            f"rank {seat.rank}: this host has no loopback interface ({LOOPBACK} cannot be bound), where ranks of one "
            "host meet; switch it on (ip link set lo up), or let the container have one"
        )
    try:
        if descriptor and listens:
            listening = {"master_listen_fd": int(descriptor)}
        elif listens:
            listening = {"master_listen_fd": _bound(address, seat.port)}
        place = (os.getpid(), address, seat.port)
        if listens and place in _SERVED:
            return _SERVED[place]
        store = dist.TCPStore(
            address,
            seat.port,
            world_size=None,
            is_master=listens,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            **listening,
        )
        if listens:
            _SERVED[place] = store
        return store
    except (RuntimeError, dist.DistNetworkError, OSError) as error:
        advice = (
            ""
            if listens
            else f"; rank 0, which serves it, has not come within {timeout_s:.0f} s or has ended"
        )
        raise CommError(
            f"rank {seat.rank}: cannot reach the store at {address}:{seat.port} (from {seat.source}){advice}: {error}"
        ) from error


_SERVED: dict[tuple[int, str, int], dist.Store] = {}
"""Stores that this process serves, by process, address and port.

A program may destroy torch's default group and initialize again. Without this reference the server would end with the
group, and ranks that come first would join the old one; the descriptor of the launcher's port exists once.
"""


def _has_loopback() -> bool:
    """Return False if no socket can be bound to the loopback interface; torch's error would name another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        try:
            opened.bind((LOOPBACK, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _bound(address: str, port: int) -> int:
    """Return the descriptor of a socket at one address of this host, for a store to listen on; the store closes it."""
    family = family_of(address)
    place = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place)
        return opened.detach()
