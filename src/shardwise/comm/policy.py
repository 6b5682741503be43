"""CommPolicy: how ranks talk and how long they wait for one another."""

from typing import Literal

from pydantic import PositiveFloat

from shardwise.plan.policy import Policy


class CommPolicy(Policy):
    """Keys under ``comm:``."""

    transport: Literal["auto", "shared_memory", "torch"] = "auto"
    """What carries the collectives: ``shared_memory`` between CPU ranks of one host, ``torch`` for the backend of torch
    (gloo or NCCL); ``auto`` takes shared memory where every rank can."""
    deadline_s: PositiveFloat = 300.0
    """Seconds that a rank waits for the others in one collective; ten times as long in the first step, in which ranks
    still build, compile and fill caches."""
    delay_s: float = 0.0
    """Debugging: each collective starts after a random pause of up to this many seconds; no result may change."""
