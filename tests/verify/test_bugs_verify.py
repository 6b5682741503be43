"""The seeded bugs under ``shardwise verify``: each is found, named and explained as verdicts.py has it.

No case without a bug is an alarm. A bug that verify does not find, name or explain yet is listed; one that leaves its
list fails too, so that the lists only shrink.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from shardwise.verify import run
from shardwise.verify.record import LayoutJob, run_rank
from shardwise.verify.verdict import Verdict
from tests.verify.bugs import BUGS, Bug
from tests.verify.cases import Case
from tests.verify.verdicts import UNSEEN, VERDICTS

QUICK = ("averaged over tp", "rows of the embedding lost", "second moments forgotten")


def planted(bug: Bug) -> Callable[[LayoutJob, str], int]:
    """The function of the ranks with the bug in it; the plain process runs without it."""

    def with_bug(job: LayoutJob, folder: str) -> int:
        with bug.plant(int(os.environ["RANK"])):
            return run_rank(job, folder)

    return with_bug


def verdict_on(case: Case, more: dict[str, Any], function: Callable[[LayoutJob, str], int]) -> Verdict:
    with patch.object(run, "run_rank", function):
        return run.verify(
            case.make, case.config(more), case.arranged(*case.batch(0)), layout=case.layout, steps=2
        )


def complaints(bug: Bug, found: Verdict) -> list[str]:
    """What the verdict does not have as verdicts.py has it."""
    wanted, first = VERDICTS[bug.name], found.first
    if bug.name in UNSEEN:
        return [] if found.verdict == "pass" else ["it is found now: take it out of UNSEEN"]
    said = [] if found.verdict == "fail" else ["it is not found"]
    said += [] if wanted.is_named(first) else [f"named: {first}"]
    if wanted.sentence:
        said += [] if wanted.is_explained(first) else [f"explained: {first}"]
    elif first is not None and first.explanation:
        said += [f"it is explained now, so it needs a sentence: {first.explanation}"]
    return said


def test_each_bug_has_one_verdict() -> None:
    assert set(VERDICTS) == {bug.name for bug in BUGS}
    assert set(UNSEEN) <= set(VERDICTS)
    for name, wanted in VERDICTS.items():
        assert bool(wanted.sentence) is not bool(wanted.unexplained), name


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in QUICK], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_named_and_explained(bug: Bug) -> None:
    found = verdict_on(bug.case, dict(bug.keys), planted(bug))
    assert found.failed_in == "fp64", found.lines()
    assert not complaints(bug, found)


@pytest.mark.soak
def test_masters_that_16_bits_have_rounded_are_found() -> None:
    """In fp64 nothing is rounded; in bf16 two correct runs drift apart by more than a lost master changes."""
    (bug,) = (bug for bug in BUGS if bug.name == "masters lost")
    found = verdict_on(bug.case, dict(bug.keys), planted(bug))
    assert (found.verdict, found.failed_in) == ("fail", "own"), found.lines()
    assert found.first is not None and found.first.kind == "master", found.lines()


@pytest.mark.soak
def test_an_isolated_run_of_cut_sequences_is_left_out() -> None:
    (bug,) = (bug for bug in BUGS if bug.name == "keys of other ranks are not seen")
    case = bug.case
    with patch.object(run, "run_rank", planted(bug)):
        found = run.verify(
            case.make, case.config(), case.arranged(*case.batch(0)), layout=case.layout, steps=2, isolate=True
        )
    assert found.verdict == "fail" and not found.isolated
    assert any("isolated run" in line and "cp" in line for line in found.lines()), found.lines()


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_is_found_named_and_explained(bug: Bug) -> None:
    found = verdict_on(bug.case, dict(bug.keys), planted(bug))
    assert not complaints(bug, found), found.lines()


@pytest.mark.soak
@pytest.mark.parametrize("case", dict.fromkeys(bug.case for bug in BUGS), ids=str)
def test_no_layout_without_a_bug_is_an_alarm(case: Case) -> None:
    found = verdict_on(case, {}, run_rank)
    assert found.verdict == "pass" and not (found.static or {}).get("problems"), found.lines()
