"""CommPolicy: how ranks talk and how long they wait for one another."""

from typing import Literal

from pydantic import PositiveFloat

from shardwise.plan.policy import Policy

LONGEST_WAIT_S = 300.0
"""``deadline_s: auto`` never ends a job sooner for a rank that is at work."""
PATIENCE_S = 20.0
"""After which a rank that waits asks who keeps it waiting."""
FIRST_STEP_S = 60.0
"""A rank may stand still so long in its first step: it fetches data and models, and others compile for it."""


class CommPolicy(Policy):
    """Keys under ``comm:``."""

    device: str = "auto"
    """Where ranks compute: ``cpu``, ``cuda``, ``cuda:1`` and the like; ``auto`` takes an accelerator that knows fp64
    and has a backend for several ranks, else the CPU."""
    transport: Literal["auto", "shared_memory", "torch"] = "auto"
    """What carries the collectives: ``shared_memory`` between CPU ranks of one host, ``torch`` for the backend of torch
    (gloo or NCCL); ``auto`` takes shared memory where every rank can."""
    deadline_s: PositiveFloat | Literal["auto"] = "auto"
    """Seconds that a rank waits for the others in one collective before the job ends; ten times as long in the first
    step, in which ranks still build, compile and fill caches. ``auto``: 300 or ten median steps, the longer; but a rank
    that does not answer, or neither moves nor computes, ends the job after 20 s or five median steps. Whoever is waited
    for is named with its Python stack by then in any case."""
    join_s: PositiveFloat = 60.0
    """Seconds within which all ranks must have come, from the arrival of rank 0."""
    delay_s: float = 0.0
    """Debugging: each collective starts after a random pause of up to this many seconds; no result may change."""

    @property
    def limit_s(self) -> float:
        """Seconds to wait where no steps have been measured."""
        return LONGEST_WAIT_S if self.deadline_s == "auto" else self.deadline_s
