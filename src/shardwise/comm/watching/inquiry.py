"""The inquiry: what is known of the ranks of a job, from the rings in its folder and from the processes of this host.

    running   a file ``question`` is put into the folder; the watch of each rank looks for it every second and puts its
              next answer into the rank's ring. There is no port, and no secret. A rank that does not answer and whose
              process is on this host is looked at from outside (outside.py)
    ended     the rings say what each rank did at the end, however it ended

A process on another host cannot be seen from here. Its watch gives a sign of life each second, so a job has ended if no
process of this host runs and no ring of another host had a sign of life while the question waited.

[Note: whose stack is asked for]
A stack is requested by a signal. A ring may be another person's file and name any process, so the signal is sent only
if the process started when the ring says, has this very file mapped, and the signal is a real-time one; stack_file.py
checks that the process catches it.

Cost: the rings of all ranks are read, 0.7 MiB and 30 ms each; up to four seconds for ranks that do not answer.
"""

import contextlib
import os
import secrets
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shardwise.base.errors import UsageError
from shardwise.base.regular_files import write_small_file
from shardwise.comm.rendezvous.process import has_ended, stack_of
from shardwise.comm.watching.answers import RankAnswer
from shardwise.comm.watching.outside import ProcessState, seen_from_outside
from shardwise.comm.watching.questions import ANSWER_S
from shardwise.comm.watching.recorder import QUESTION, Event, start_ticks
from shardwise.comm.watching.rings import RankRing, read_answer, read_ring
from shardwise.comm.watching.verdict import PRESENCE_OF, JobVerdict, Presence, RankEvidence, blamed_in, judge

_PATIENCE_S, _PATIENCE_STEPS = 5.0, 5
_PAUSE_S = 0.1
_BEAT_S = 4.0
"""Seconds without a sign of life after which a rank of a job that has ended counts as silent before the end."""
_START_NS = 900 * 10**9
"""Nanoseconds within which all ranks of one start open their rings."""
_STEPS = 32
_NS = 1e-9


class OwnFailure(NamedTuple):
    """The failure that a rank reported, from the launcher's records."""

    time_s: float
    headline: str
    is_of_peers: bool


def ring_folder(run: Path) -> Path | None:
    """Return the folder of a run's rings; None if it has none.

    Args:
        run: Folder of a run, of its logs or of the rings themselves.
    """
    for folder in (run, run / "flight", run / "logs" / "flight"):
        if folder.is_dir() and any(folder.glob("rank_*.ring")):
            return folder
    return None


def inquire(folder: Path, host: str, failures: Mapping[int, OwnFailure]) -> JobVerdict:
    """Return the verdict on the job whose rings are in ``folder``.

    Args:
        folder: The folder.
        host: This host, as in ``RankIdentity.host``.
        failures: Failures that ranks have reported, by rank.

    Raises:
        DamagedError: if a ring is damaged.
        UsageError: if the folder has no rings.
    """
    before = _newest(folder)
    asked = _ask(folder, host, before)
    rings = _newest(folder)
    alive = {rank: _is_alive(ring, host) for rank, ring in rings.items()}
    is_over = not any(_may_run(ring, alive[rank], before.get(rank)) for rank, ring in rings.items())
    if is_over:
        asked, alive = "", dict.fromkeys(alive, False)
    now_ns = max(map(_last_ns, rings.values())) if is_over else time.time_ns()
    stories = [ring.answer.story for ring in rings.values() if ring.answer is not None]
    job = []
    for rank in range(max(ring.ranks for ring in rings.values())):
        ring = rings.get(rank)
        if ring is None:
            job.append(_unseen(rank))
            continue
        found = _evidence(ring, alive[rank], asked, now_ns, stories)
        failure = failures.get(rank)
        if failure is not None and failure.time_s > ring.opened_ns * _NS and not failure.is_of_peers:
            found = found._replace(failure=failure.headline, failed_s=failure.time_s)
        job.append(found)
    return judge(job, _patience_of(rings.values()), is_over)


def _newest(folder: Path) -> dict[int, RankRing]:
    """Return the rings of the last start by rank; rings of an earlier start with more ranks may lie beside them."""
    rings = [read_ring(path) for path in sorted(folder.glob("rank_*.ring"))]
    if not rings:
        raise UsageError(f"doctor: {folder} has no rings of records (rank_00000.ring)")
    last = max(rings, key=lambda ring: ring.wall_ns + ring.opened_ns)
    since_ns = last.wall_ns + last.opened_ns - _START_NS
    return {
        ring.rank: ring
        for ring in rings
        if ring.ranks == last.ranks and ring.wall_ns + ring.opened_ns > since_ns
    }


def _ask(folder: Path, host: str, rings: Mapping[int, RankRing]) -> str:
    """Ask all ranks that may run, and return the question when they have answered or had time for it."""
    waiting = {rank: ring for rank, ring in rings.items() if _is_alive(ring, host) is not False}
    if not waiting:
        return ""
    question = secrets.token_hex(8)
    try:
        write_small_file(folder / QUESTION, question.encode())
    except OSError:
        return ""  # a folder that may only be read: the answers of the last second count
    until_s = time.monotonic() + ANSWER_S
    while waiting and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
        for rank, ring in list(waiting.items()):
            answer = read_answer(ring.path)
            if answer is not None and answer.question == question:
                del waiting[rank]
    with contextlib.suppress(OSError):
        (folder / QUESTION).unlink()
    return question


def _is_alive(ring: RankRing, host: str) -> bool | None:
    """Return whether the process that writes a ring lives; None if it is on another host and may."""
    if not _shares_processes(ring.host, host):
        return None if not ring.has_left else False
    return not has_ended(ring.pid) and start_ticks(ring.pid) == ring.started_ticks and not ring.has_left


def _shares_processes(host: str, other: str) -> bool:
    """Return whether processes of two hosts, as in ``RankIdentity.host``, see one another."""
    return host.split()[:2] == other.split()[:2]


def _may_run(ring: RankRing, is_alive: bool | None, before: RankRing | None) -> bool:
    """Return whether a rank runs, or may run on another host.

    Args:
        ring: Its ring.
        is_alive: As ``_is_alive`` returns it.
        before: Its ring before the question; None if it has come since.
    """
    if is_alive is not None:
        return is_alive
    return before is None or ring.beat_ns != before.beat_ns or ring.opened_ns != before.opened_ns


def _writes(ring: RankRing) -> bool:
    """Return whether the process of a ring has the ring's file mapped. See [Note: whose stack is asked for]."""
    try:
        status = os.stat(ring.path)
        mark = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
        return mark in Path(f"/proc/{ring.pid}/maps").read_text()
    except OSError:
        return False


def _last_ns(ring: RankRing) -> int:
    """Return the wall-clock time of a ring's last sign of life."""
    return ring.wall_ns + max([ring.beat_ns, *(record.time_ns for record in ring.records[-1:])])


def _evidence(
    ring: RankRing, is_alive: bool | None, asked: str, now_ns: int, stories: Sequence[str]
) -> RankEvidence:
    answer = ring.answer or RankAnswer(time_ns=ring.opened_ns)
    silent_s = max(now_ns - ring.wall_ns - ring.beat_ns, 0) * _NS
    seen, stack, is_computing = "", answer.stack, False
    if ring.has_left:
        presence = Presence.LEFT
    elif answer.question == asked != "" or (not asked and silent_s < _BEAT_S):
        presence = Presence.ANSWERS
    elif is_alive is None:
        # Another rank of its host may have looked at the process.
        told, there = _told_of(ring.rank, stories)
        presence, seen, stack = Presence.UNSEEN, told or "nothing is heard from it", there or stack
    elif is_alive:
        safe = _writes(ring) and ring.offer[0] >= signal.SIGRTMIN
        view = seen_from_outside(ring.pid, ring.offer if safe else ())
        presence, seen = PRESENCE_OF[view.state], view.sentence
        is_computing = view.state is ProcessState.COMPUTES
        stack = stack_of(view.calls) or stack
        if not view.calls and stack:
            seen += "; its stack is the one of its last sign of life"
    else:
        gone = f"its process {ring.pid} has ended"
        held = "it gave no sign of life before the end: stopped, killed, or held up in one call"
        presence, seen = Presence.ENDED, gone if asked else held
        told, there = _told_of(ring.rank, stories)
        seen, stack = told or seen, there or stack
    action, step, between = _cursor_of(ring)
    return RankEvidence(
        ring.rank,
        ring.host_name,
        presence,
        answer,
        max(now_ns - ring.wall_ns - answer.time_ns, 0) * _NS,
        silent_s,
        seen,
        stack,
        step,
        action,
        between,
        [record.call for record in ring.records if record.event is Event.START and record.call is not None],
        is_computing,
    )


def _told_of(rank: int, stories: Sequence[str]) -> tuple[str, str]:
    """Return what another rank's watch has found of a rank from outside, and the rank's stack by it.

    Ranks of other hosts have found less: what comes with a stack is taken first.
    """
    told = [story.partition("Its main thread is at\n") for story in stories if blamed_in(story) == rank]
    said, _, stack = max(told, key=lambda each: bool(each[2]), default=("", "", ""))
    return said.strip().rstrip(".").removeprefix(f"rank {rank} does not answer: "), stack


def _cursor_of(ring: RankRing) -> tuple[str, int, bool]:
    """Return the last Action of a rank, its step, and whether the rank is between two steps."""
    for record in reversed(ring.records):
        if record.event is Event.STEP:
            return "", record.step, True
        if record.action is not None:
            return str(record.action), record.step, False
    return "", ring.records[-1].step if ring.records else 0, False


def _patience_of(rings: Iterable[RankRing]) -> float:
    """Return the seconds from which a wait is long: five steps, and at least five seconds."""
    medians = []
    for ring in rings:
        ends = [record.time_ns for record in ring.records if record.event is Event.STEP][-_STEPS:]
        if len(ends) > 1:
            medians.append(statistics.median(b - a for a, b in pairwise(ends)) * _NS)
    return max([_PATIENCE_S, *(_PATIENCE_STEPS * each for each in medians)])


def _unseen(rank: int) -> RankEvidence:
    return RankEvidence(
        rank,
        "?",
        Presence.UNSEEN,
        RankAnswer(),
        0.0,
        0.0,
        "it keeps no records in this folder: another host, or not started",
        "",
        0,
        "",
        False,
    )
