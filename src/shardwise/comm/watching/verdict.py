"""The verdict on a job: which rank keeps the others waiting, where it is, and which calls of two ranks differ.

Two readers share these functions. The watch of a rank judges the answers that came over the store, and may end the job
(watch.py). ``shardwise doctor`` judges the answers in the ranks' rings, from another terminal and behind the end of the
job (inquiry.py).

    no rank waits long                                  running
    a rank that is waited for is stopped, gone, silent
    or does not move                                    hung
    all ranks wait, and the calls of two differ         mismatch     (mismatch.py)
    a rank that is waited for is at work                slow

Cost: one look at each record that two ranks have in common.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from shardwise.base.words import named_ranks
from shardwise.comm.watching.answers import AwaitedCall, RankAnswer, StartedCall
from shardwise.comm.watching.mismatch import CallMismatch, SkippedCall, first_mismatch, skipped_call
from shardwise.comm.watching.outside import ProcessState
from shardwise.comm.watching.waits import SOON_S, CollectiveWait, advice

JobState = Literal["running", "hung", "slow", "mismatch", "ended"]
RankPhase = Literal["reading", "computing", "waiting"]


class RankState(Enum):
    """The state of a rank that keeps another one waiting."""

    WAITS = "waits"
    WORKS = "works"
    STILL = "still"


# Sentences of the watch --------------------------------------------------------------------------------------------


def line_of(rank: int, said: RankAnswer, wait: CollectiveWait) -> tuple[str, RankState]:
    """Return a line about a rank that answers, and its state; no line if it waits as the asking rank does.

    Args:
        rank: The rank.
        said: Its answer.
        wait: Wait of the rank that asks.
    """
    for work in said.works:
        if work.is_main or (wait.words is not None and wait.words.key.startswith(f"{work.key}/")):
            at = f"That thread is at\n{work.stack}"
            line = f"rank {rank} is at work on its own for {work.seconds:.0f} s: {work.what}. {at}"
            return line, RankState.WORKS
    if said.waits:
        line = "" if wait.words is None else f"{said.waits}, waits for {said.waited_s:.0f} s"
        return line, RankState.WAITS
    if said.unmoved_s > wait.patience_s / 2:
        state = f"has not moved for {said.unmoved_s:.0f} s: no line, no computing, no reading or writing"
    else:
        state = "is alive and at work"
    hint = f" {advice(wait.call)}." if wait.call and wait.words is not None else ""
    return (
        f"rank {rank} {state}.{hint} Its main thread is at\n{said.stack}",
        RankState.STILL if said.unmoved_s >= wait.standstill_s else RankState.WORKS,
    )


def lines_of_all_waiting(answers: Mapping[int, RankAnswer]) -> list[str]:
    """Return lines for ranks that all wait: what each waits for, and the first of their calls that differs."""
    lines = ["all ranks wait for one another:"]
    lines += [f"    {said.waits}, for {said.waited_s:.0f} s" for said in answers.values()]
    differs = first_mismatch({rank: said.starts for rank, said in answers.items()})
    skipped = skipped_call(
        {rank: said.awaited for rank, said in answers.items() if said.waits},
        {rank: said.starts for rank, said in answers.items()},
    )
    if differs is not None or skipped is not None:
        lines.append(str(differs or skipped))
    alike = {(said.key, said.call) for said in answers.values()}
    calls = sorted({said.call for said in answers.values()} - {""})
    return lines + ([advice(" and ".join(calls))] if len(alike) > 1 and calls else [])


def crossed_line(
    rank: int, wait: CollectiveWait, answers: Mapping[int, RankAnswer], awaited: Iterable[int]
) -> str:
    """Return a sentence if two ranks have waited for one another for a while in different engine calls, else "".

    Args:
        rank: The rank that asks.
        wait: Its wait.
        answers: Answers by rank.
        awaited: Ranks that it waits for.
    """
    own = answers.get(rank)
    if own is None or not own.waits or own.is_flying or own.waits != str(wait):
        return ""
    for other in awaited:
        said = answers.get(other)
        if said is None or other == rank or not said.waits or other not in wait.members:
            continue
        is_other = said.call != own.call or said.key != own.key
        calls = [call for call in (own.call, said.call) if call]
        if not is_other or not calls or rank not in said.awaited.members:
            continue
        # A rank within the call may be a phase ahead of one that reads what it has written.
        if said.call == own.call or min(own.waited_s, said.waited_s) < SOON_S:
            continue
        both = " and ".join(dict.fromkeys(calls))
        return (
            f"it waits for rank {other}, and {said.waits}, has waited for this one for "
            f"{said.waited_s:.0f} s: neither can go on. {advice(both)}"
        )
    return ""


# The job, from another terminal ---------------------------------------------------------------------------------------


class Presence(Enum):
    """The state of a rank's process, as far as it is known."""

    ANSWERS = "answers"
    """Its watch answers, or did until the end of the job."""
    SILENT = "silent"
    """Its process lives, and its watch does not answer."""
    STOPPED = "stopped"
    ENDED = "ended"
    """Its process is gone, or showed no sign of life for seconds before the job ended."""
    LEFT = "left"
    """It left the job in order."""
    UNSEEN = "unseen"
    """It runs on another host, from which nothing is heard."""


PRESENCE_OF = {
    ProcessState.STOPPED: Presence.STOPPED,
    ProcessState.ENDED: Presence.ENDED,
    ProcessState.COMPUTES: Presence.SILENT,
    ProcessState.SLEEPS: Presence.SILENT,
}


class RankEvidence(NamedTuple):
    """Everything that is known of one rank."""

    rank: int
    host: str
    presence: Presence
    answer: RankAnswer
    age_s: float
    """Seconds since the answer; of a job that has ended, until its end."""
    silent_s: float
    """Seconds since the last sign of life."""
    seen: str
    """Description of the process from outside; "" if it answers."""
    stack: str
    step: int
    action: str
    """Action that the rank came to last; "" before the first."""
    is_between_steps: bool
    starts: Sequence[StartedCall] = ()
    is_computing: bool = False
    """True if a silent process computes."""
    failure: str = ""
    """First line of the failure with which the rank ended; "" without one."""
    failed_s: float = 0.0
    """Time of the failure, by the monotonic clock of the rank's host."""

    @property
    def waited_s(self) -> float:
        """Seconds that the rank has waited for others; 0 if it waits for nobody."""
        return self.answer.waited_s + self.age_s if self.answer.waits else 0.0

    @property
    def unmoved_s(self) -> float:
        """Seconds in which the rank has not moved, as far as is known."""
        return self.silent_s if self.presence is not Presence.ANSWERS else self.answer.unmoved_s + self.age_s

    @property
    def phase(self) -> RankPhase:
        """The work of the rank: it reads data, computes or waits."""
        if self.presence is Presence.ANSWERS and self.answer.waits:
            return "waiting"
        reads = any(part in self.stack for part in _READERS)
        return "reading" if reads or self.is_between_steps else "computing"

    @property
    def where(self) -> str:
        """The innermost place of the stack in the user's code, or else in any code; "" without a stack."""
        places = [line.strip() for line in self.stack.splitlines() if line.startswith('  File "')]
        own = [each for each in places if not any(part in each for part in _NOT_THE_USERS)]
        return (own or places or [""])[-1]


_READERS = ("/shardwise/data/", "/torch/utils/data/")
_NOT_THE_USERS = ("/shardwise/", "site-packages", "/lib/python", "<frozen")


class JobVerdict(NamedTuple):
    """The state of a job, and the rank that causes it."""

    state: JobState
    sentence: str
    rank: int | None = None
    """Rank that keeps the others waiting, or that differs."""
    host: str | None = None
    step: int | None = None
    action: str | None = None
    where: str | None = None
    seconds: float | None = None
    """Seconds since when it has been so."""
    stack: str | None = None
    waiting: list[int] = []
    """Ranks that wait."""
    phase: RankPhase | None = None


def judge(job: Sequence[RankEvidence], patience_s: float, is_over: bool = False) -> JobVerdict:
    """Return the verdict on a job.

    Args:
        job: What is known of each rank.
        patience_s: Seconds from which a wait is long.
        is_over: True if no rank runs any more: the verdict is on the moment before the end.
    """
    told = next((each.answer.verdict for each in job if each.answer.verdict), "")
    if told:
        return _of_watch(job, told)
    failed = min((each for each in job if each.failure), key=lambda each: each.failed_s, default=None)
    if failed is not None and is_over:
        return _named("ended", failed, [], f"ended with an error: {failed.failure}", None)
    waiting = [each for each in job if each.waited_s > patience_s and each.presence is Presence.ANSWERS]
    roots = _roots(job, waiting, patience_s, is_over)
    stuck = [each for each in roots if _is_stuck(each, patience_s)]
    has_left = all(each.presence is Presence.LEFT for each in job)
    is_lost = bool(waiting) or (is_over and not has_left)
    differs = first_mismatch({each.rank: each.starts for each in job}) if is_lost else None
    if stuck:
        worst = max(stuck, key=lambda each: (_BLAME.index(each.presence), each.unmoved_s))
        # A rank that has left the order of the others may wait for nobody: its error says so, in its program.
        is_odd = differs is not None and differs.odd == worst.rank and worst.presence is Presence.ANSWERS
        if not is_odd:
            return _named("hung", worst, waiting, _words_of(worst), worst.unmoved_s)
    if differs is not None:
        return _of_mismatch(job, waiting, differs)
    if roots:
        slow = max(roots, key=lambda each: each.unmoved_s)
        return _named("slow", slow, waiting, _words_of(slow), max(each.waited_s for each in waiting))
    # A job that has ended may have ended before a wait was long.
    held = waiting or [each for each in job if is_lost and each.answer.waits]
    skipped = skipped_call(
        {each.rank: each.answer.awaited for each in held}, {each.rank: each.starts for each in job}
    )
    if skipped is not None:
        return _of_skipped(job, held, skipped)
    if waiting:
        return _of_all_waiting(waiting)
    return _of_untroubled(job, is_over)


_BLAME = [
    Presence.LEFT,
    Presence.UNSEEN,
    Presence.ANSWERS,
    Presence.SILENT,
    Presence.ENDED,
    Presence.STOPPED,
]
"""What is known of ranks that others wait for, the surest cause last."""


def _roots(
    job: Sequence[RankEvidence], waiting: Sequence[RankEvidence], patience_s: float, is_over: bool
) -> list[RankEvidence]:
    """Return the ranks that others wait for and that wait for nobody, and those that are stopped or gone."""
    by_rank = {each.rank: each for each in job}
    awaited = {
        member
        for each in waiting
        for member in each.answer.awaited.members
        if member != each.rank and member in by_rank and not _has_come(by_rank[member], each.answer.awaited)
    }
    for each in job:
        gone = each.presence is Presence.ENDED and each.silent_s > 0
        silent = each.presence is Presence.SILENT and each.silent_s > patience_s
        if each.presence is Presence.STOPPED or gone or silent:
            awaited.add(each.rank)
    return [
        by_rank[rank]
        for rank in sorted(awaited)
        if not (by_rank[rank].presence is Presence.ANSWERS and by_rank[rank].answer.waits)
    ]


def _has_come(member: RankEvidence, wait: AwaitedCall) -> bool:
    """Return whether a rank has started what another one waits for."""
    return any(call.group == wait.group and call.number >= wait.number for call in member.starts)


def _is_stuck(each: RankEvidence, patience_s: float) -> bool:
    if each.presence is Presence.ANSWERS:
        return each.unmoved_s > patience_s and not any(work.is_main for work in each.answer.works)
    return each.presence is not Presence.SILENT or not each.is_computing


def _words_of(each: RankEvidence) -> str:
    """Return what a rank does, as the rest of a sentence that begins with the rank."""
    if each.presence is Presence.UNSEEN:
        return f"gives no sign: {each.seen}" if each.seen else "gives no sign"
    if each.presence is Presence.LEFT:
        return f"left the job {each.silent_s:.0f} s ago"
    if each.presence is not Presence.ANSWERS:
        return f"has not answered for {each.silent_s:.0f} s: {each.seen}"
    for work in each.answer.works:
        if work.is_main:
            return f"is at work on its own for {work.seconds:.0f} s: {work.what}"
    if each.unmoved_s > SOON_S:
        return f"has not moved for {each.unmoved_s:.0f} s: no line, no computing, no reading or writing"
    return "is alive and at work"


def _named(
    state: JobState, each: RankEvidence, waiting: Sequence[RankEvidence], words: str, seconds: float | None
) -> JobVerdict:
    """Return a verdict that names one rank."""
    said = f"rank {each.rank} on host {each.host} {words}. It is in {_place_of(each)}"
    if waiting:
        longest = max(waiting, key=lambda other: other.waited_s)
        names = named_ranks([other.rank for other in waiting])
        verb = "waits" if len(waiting) == 1 else "wait"
        said += f". {names} {verb} for it: {longest.answer.waits}, for {longest.waited_s:.0f} s"
    return JobVerdict(
        state,
        said,
        each.rank,
        each.host,
        each.step,
        each.action or None,
        each.where or (each.starts[-1].site if each.starts else None),
        seconds,
        each.stack or None,
        [other.rank for other in waiting],
        each.phase,
    )


def _place_of(each: RankEvidence) -> str:
    """Return the step, the Action and the place in the code that a rank was last seen at."""
    said = f"step {each.step}"
    if each.is_between_steps:
        said = f"front of step {each.step + 1}"
    elif each.action:
        said += f", {each.action}"
    at = each.where or (f"its last exchange was called at {each.starts[-1].site}" if each.starts else "")
    return said + (f", {at}" if at else "")


def _of_mismatch(
    job: Sequence[RankEvidence], waiting: Sequence[RankEvidence], differs: CallMismatch
) -> JobVerdict:
    named = min(differs.calls) if differs.odd is None else differs.odd
    each = next(each for each in job if each.rank == named)
    said = str(differs)
    if waiting:
        said += f"; {named_ranks([other.rank for other in waiting])} wait"
    if differs.odd is not None:
        said += f". Rank {differs.odd} has left the order of the others"
    found = _named("mismatch", each, waiting, "", max((other.waited_s for other in waiting), default=None))
    return found._replace(sentence=said, where=differs.calls[named].site or found.where, rank=differs.odd)


def _of_skipped(
    job: Sequence[RankEvidence], waiting: Sequence[RankEvidence], skipped: SkippedCall
) -> JobVerdict:
    """Return the verdict on a rank that has not made a call that the others wait for."""
    each = next(each for each in job if each.rank == skipped.rank)
    found = _named("mismatch", each, waiting, "", max(other.waited_s for other in waiting))
    said = f"{skipped}. Rank {skipped.rank} has left the order of the others"
    return found._replace(sentence=said, where=skipped.instead.site or found.where)


def _of_all_waiting(waiting: Sequence[RankEvidence]) -> JobVerdict:
    """Return the verdict on ranks that all wait although their records do not differ."""
    longest = max(waiting, key=lambda other: other.waited_s)
    said = "; ".join(f"{each.answer.waits}, for {each.waited_s:.0f} s" for each in waiting)
    calls = sorted({each.answer.call for each in waiting} - {""})
    more = f". {advice(' and '.join(calls))}" if calls else ""
    found = _named("hung", longest, waiting, "", longest.waited_s)
    return found._replace(sentence=f"all ranks wait for one another: {said}{more}", rank=None)


def _of_watch(job: Sequence[RankEvidence], told: str) -> JobVerdict:
    """Return the verdict that a watch has written before it ended the job."""
    named = blamed_in(told)
    each = next((each for each in job if each.rank == named), None)
    state: JobState = "mismatch" if named is None else "hung"
    waiting = [other.rank for other in job if other.answer.waits and other.rank != named]
    if each is None:
        return JobVerdict(state, told, waiting=waiting)
    found = _named(state, each, [], "", each.unmoved_s)
    return found._replace(sentence=told, waiting=waiting)


_BLAMED = re.compile(
    r"(?:^|[ ;:])rank (\d+) (?:does not answer|has not moved|is alive and|is at work)", re.MULTILINE
)


def blamed_in(text: str) -> int | None:
    """Return the rank that a sentence of a watch names as the one that others wait for; None if there is none."""
    found = _BLAMED.search(text)
    return None if found is None else int(found[1])


_PHASES: Mapping[str, RankPhase] = {"reading": "reading", "computing": "computing", "waiting": "waiting"}
_RECENT_S = 120.0
"""Seconds for which a rank counts as slow after it was found to be."""


def _of_slow(job: Sequence[RankEvidence]) -> JobVerdict | None:
    """Return the verdict on a rank that the ranks have lately found to be slow in its own work; None without one."""
    for each in job:
        slow = each.answer.slow
        age_s = 0.0 if slow is None else each.age_s + (each.answer.time_ns - slow.time_ns) * 1e-9
        late = next((other for other in job if slow is not None and other.rank == slow.rank), None)
        if slow is not None and late is not None and age_s < _RECENT_S:
            found = _named("slow", late, [], "", age_s)
            said = f"{slow.words} (found {age_s:.0f} s ago)"
            return found._replace(sentence=said, phase=_PHASES.get(slow.phase, "computing"))
    return None


def _of_untroubled(job: Sequence[RankEvidence], is_over: bool) -> JobVerdict:
    """Return the verdict on a job in which no rank waits long."""
    step = max(each.step for each in job)
    if is_over:
        left = all(each.presence is Presence.LEFT for each in job)
        how = (
            "in order"
            if left
            else "without a word of any rank: killed, or out of memory; no rank had waited long"
        )
        return JobVerdict("ended", f"the job has ended {how}, in step {step}", step=step)
    slow = _of_slow(job)
    if slow is not None:
        return slow
    ahead = max(job, key=lambda each: each.step)
    said = f"the job of {len(job)} ranks runs: step {step}" + (f", {ahead.action}" if ahead.action else "")
    unseen = [each.rank for each in job if each.presence is Presence.UNSEEN]
    if unseen:
        said += f"; nothing is known of {named_ranks(unseen)}: on another host, or without records here"
    return JobVerdict("running", said, step=step, action=ahead.action or None)
