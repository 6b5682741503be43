"""Keys under ``comm:``: how ranks find one another, how their data is sent, and how long they wait."""

from typing import Literal

from pydantic import PositiveFloat

from shardwise.base.policy import Policy

LONGEST_WAIT_S = 300.0
"""Least seconds that ``timeout_s: auto`` waits for a rank that is working."""
PATIENCE_S = 20.0
"""Seconds after which a waiting rank asks which rank keeps it waiting."""
FIRST_STEP_S = 60.0
"""Seconds that a rank may make no progress in its first step, while it reads data and models or compiles."""


class CommPolicy(Policy):
    """Keys under ``comm:``."""

    device: str = "auto"
    """Device on which ranks compute: ``cpu``, ``cuda``, ``cuda:1`` and the like; ``auto`` uses an accelerator that
    supports fp64 and has a backend for several ranks, else the CPU.
    """
    transport: Literal["auto", "shared_memory", "torch"] = "auto"
    """Transport of the collectives: ``shared_memory`` between CPU ranks of one host, with gloo across several hosts;
    ``torch`` for the backend of torch alone (gloo or NCCL); ``auto`` uses shared memory if every rank of a host can.
    """
    timeout_s: PositiveFloat | Literal["auto"] = "auto"
    """Seconds that a rank waits for the others in one collective before the job ends; ten times as long in the first
    step, in which ranks still build, compile and fill caches.

    ``auto``: 300 s or ten median steps, whichever is longer, but 20 s or five median steps for a rank that does not
    answer or neither moves nor computes. In all cases the error names the rank that is waited for and shows its Python
    stack.
    """
    join_timeout_s: PositiveFloat = 60.0
    """Seconds after the start of rank 0 within which all ranks must have joined."""
    interface: str = ""
    """Network interface by which the hosts of a job reach one another: its name (``eth1``), a network that contains its
    address (``10.0.0.0/8``) or the address; only for jobs on several hosts. Without it, the interface on the way to the
    store. ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` take precedence.
    """
    versions: Literal["same", "warn"] = "same"
    """What happens if hosts run different versions of Shardwise, torch or Python, or another program: ``same`` refuses
    the job and names the hosts, ``warn`` logs them.
    """
    public: bool = False
    """Allows the hosts to reach one another at addresses of the open internet. The store accepts no rank without the
    job's secret, but the data ports of gloo and NCCL cannot authenticate anyone.
    """
    debug_delay_s: float = 0.0
    """Debugging: each collective starts after a random pause of up to this many seconds; no result may change."""

    @property
    def limit_s(self) -> float:
        """Seconds to wait before any steps have been measured."""
        return LONGEST_WAIT_S if self.timeout_s == "auto" else self.timeout_s
