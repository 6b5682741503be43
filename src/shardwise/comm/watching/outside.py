"""A process seen from outside, by what the kernel says of it: for a rank whose watch does not answer.

stopped     SIGSTOP or a debugger: it cannot answer, and its stack cannot be requested
ended       it is gone
computes    one long call that lets no Python thread run beside it; its stack comes by a signal (stack_file.py)
sleeps      the same, and it computes nothing
"""

import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from shardwise.comm.rendezvous.process import ThreadCall, has_ended, seconds_of, state_of
from shardwise.comm.rendezvous.stack_file import stack_by_signal

_LOOK_S = 0.3
_COMPUTING = 0.1
"""Share of the time of a look in which a process that computes has a processor, also on a machine with many others. A
process that sleeps takes single ticks of the kernel's clock, for the threads that wake in it.
"""


class ProcessState(Enum):
    """The state of a process, seen from outside."""

    STOPPED = "stopped"
    ENDED = "ended"
    COMPUTES = "computes"
    SLEEPS = "sleeps"


class ProcessView(NamedTuple):
    """A process of this host, seen from outside."""

    state: ProcessState
    sentence: str
    calls: list[ThreadCall]
    """Stack of the watched thread, the last call first; empty if it cannot be had."""

    @property
    def can_never_answer(self) -> bool:
        """True if the process is stopped or gone."""
        return self.state in (ProcessState.STOPPED, ProcessState.ENDED)


def seen_from_outside(pid: int, offer: Sequence[int] = ()) -> ProcessView:
    """Return what a process of this host does.

    Args:
        pid: The process.
        offer: Numbers with which its stack can be requested. The signal ends a sleep in C early.
    """
    state = state_of(pid)
    if state in ("T", "t"):
        said = f"its process {pid} is stopped (SIGSTOP or a debugger), so its stack cannot be asked for"
        return ProcessView(ProcessState.STOPPED, said, [])
    if has_ended(pid):
        return ProcessView(ProcessState.ENDED, f"its process {pid} has ended", [])
    before = seconds_of(pid)
    time.sleep(_LOOK_S)
    # The signal may end a sleep, so the process is judged before it.
    computes = state == "R" or seconds_of(pid) - before > _COMPUTING * _LOOK_S
    calls = stack_by_signal(pid, list(offer)) if offer else []
    if computes:
        said = f"its process {pid} computes in one long call that lets no Python run beside it"
        return ProcessView(ProcessState.COMPUTES, said, calls)
    return ProcessView(ProcessState.SLEEPS, f"its process {pid} sleeps (state {state})", calls)
