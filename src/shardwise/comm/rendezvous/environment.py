"""Variables and limits of a process that gloo and NCCL read, set before the first group of a job is made.

    GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   loopback if all ranks are on one host; over several hosts gloo takes the
                                             interfaces that NCCL is told to use, else both take the interface on
                                             the way to the store (comm/address.py)
    NCCL_LAUNCH_ORDER_IMPLICIT               kernels of several communicators start in the order of the calls
    TORCH_NCCL_ASYNC_ERROR_HANDLING          torch's own thread leaves a failed communicator to the watch
    CUBLAS_WORKSPACE_CONFIG                  cuBLAS sums in a fixed order; only for ``deterministic: true``
    MALLOC_..., GLIBC_TUNABLES               limits of the heap, which are then left as they are
    RLIMIT_NOFILE                            a group of gloo opens a socket to each of its ranks

A value that is set already stays. NCCL reads a variable when it makes its first communicator, so ``import shardwise``
imports this module, which sets the order and loads nothing.
"""

import logging
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence

_log = logging.getLogger(__name__)
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that sets the number and the sizes of cuBLAS's workspaces, which decide the order of its sums."""
FIXED_WORKSPACE = ":4096:8"
"""Workspaces with which cuBLAS computes the same bits in every run."""
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_MANY_RANKS = 64
"""Number of ranks from which on the usual limit of 1,024 descriptors may be too low for the sockets of all groups."""


def _set_order() -> bool:
    """Set the order of kernels; return True if torch's default group was there before."""
    is_set = _ORDER in os.environ
    os.environ.setdefault(_ORDER, "1")
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)
    return not is_set and is_initialized is not None and bool(is_initialized())


_CAME_LATE = _set_order()
"""True if torch's default group was made before the order was set."""


def prepare_for_groups(
    one_host: bool,
    backend: str,
    size: int,
    adopts: bool,
    env: MutableMapping[str, str] = os.environ,
    interface: str = "",
) -> None:
    """Set what gloo and NCCL read before the groups of a job are made.

    Args:
        one_host: True if all ranks are on this host.
        backend: Backend of torch for tensors on the ranks' devices.
        size: Number of ranks.
        adopts: True if torch's default group was made by the program.
        env: Environment of this process.
        interface: Interface at which the other hosts reach this one; "" if it is not known.
    """
    if one_host:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if backend == "nccl":
            env.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif env.get("SHARDWISE_INTERFACE", interface) != interface and interface:
        # comm.interface chose another interface than our launcher.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if env.get(variable) in (None, env["SHARDWISE_INTERFACE"]):
                env[variable] = interface
    elif "GLOO_SOCKET_IFNAME" not in env and "NCCL_SOCKET_IFNAME" in env:
        found = interfaces_of(env["NCCL_SOCKET_IFNAME"], [name for _, name in socket.if_nameindex()])
        if found:
            env["GLOO_SOCKET_IFNAME"] = ",".join(found)
    elif interface:
        # Without it gloo takes the interface of what this host's name resolves to, if it resolves.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        if backend == "nccl":
            env.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if backend == "nccl":
        # Several communicators run at once. With this variable their kernels start in the order of the calls, which is
        # the same on all ranks; in another order they could wait for one another.
        env.setdefault(_ORDER, "1")
        # The watch ends a communicator that fails and reports where; torch's own thread would end the process first.
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        if adopts and _CAME_LATE:
            _log.warning(
                "torch's default group was made before shardwise was imported. If it has communicated already, NCCL "
                "does not see %s=1, and kernels of several communicators may wait for one another: import shardwise "
                "before init_process_group, or set the variable in the job's environment",
                _ORDER,
            )
    if size >= _MANY_RANKS:
        raise_descriptor_limit()


def set_cublas_workspace(env: MutableMapping[str, str] = os.environ) -> str:
    """Set ``CUBLAS_WORKSPACE_CONFIG`` for sums in a fixed order, unless it is set, and return its value.

    Args:
        env: Environment of this process. cuBLAS reads it when it is first used.
    """
    return env.setdefault(CUBLAS_WORKSPACE, FIXED_WORKSPACE)


def sets_heap(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment sets limits of glibc's heap, or loads another allocator.

    Args:
        env: Environment of this process.
    """
    limits = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    return (
        any(name in env for name in limits)
        or "glibc.malloc." in env.get("GLIBC_TUNABLES", "")
        or "malloc" in env.get("LD_PRELOAD", "")
    )


def interfaces_of(pattern: str, present: Sequence[str]) -> list[str]:
    """Return the network interfaces that a value of ``NCCL_SOCKET_IFNAME`` selects.

    Args:
        pattern: Beginnings of names ("eth,ib"), or whole names after "=", or what is excluded after "^".
        present: Names of the interfaces of this host.
    """
    is_excluded = pattern.startswith("^")
    words = pattern.removeprefix("^").removeprefix("=")
    is_whole = words != pattern.removeprefix("^")
    named = [word for word in words.split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if is_whole else name.startswith(word) for word in named)

    found = [name for name in present if fits(name) != is_excluded]
    # NCCL never takes these if it has a choice, and gloo would.
    return [name for name in found if not is_excluded or not name.startswith(("lo", "docker"))]


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors of this process to the highest value that it may set."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system whose hard limit is more than a process may have
            _log.warning("the limit of %d open descriptors stays, because the system refuses %d", soft, hard)
