"""The static part finds the seeded bugs that show in placements, in sums of gradients or in masks, and nothing else."""

from functools import cache

import pytest

from shardwise.verify.static import StaticPart, static_problems
from tests.verify.bugs import BUGS, BY_NAME, Bug
from tests.verify.cases import Case

FOUND = {
    # Placements of activations and gradients along tp
    "norm gradients not summed",
    "sequence gradient not summed",
    "column gradient not summed",
    "row output not summed",
    "norm declared replicate",
    "norm before attention declared replicate",
    "last norm declared replicate",
    "last norm declared whole",
    "norm gradients not summed in a pipeline",
    # Sums of gradients along tp, over ties, and counts in the norm
    "averaged over tp",
    "replicas not reduced",
    "copies in the norm, tp",
    "tied gradient lost on tp",
    "tied gradient lost",
    "tied gradient doubled",
    "ties in the norm, pp",
    # Sums of gradients over data-parallel ranks and the ranks of experts
    "not summed over dp",
    "averaged over dp",
    "summed twice over dp",
    "norm addend missing",
    "norm addend doubled",
    "rows of the embedding lost",
    "copies not summed",
    "summed over the wrong group",
    "gradient off by one",
    "gradient range of the neighbour",
    "microbatch overwrites",
    "expert gradients ep times",
    "router addend missing",
    # Masks of dropouts
    "first mask on a cut sequence",
    "part of the first",
    "parts where it is whole",
    "whole where it is cut",
}
QUICK = (
    "norm declared replicate",
    "copies not summed",
    "tied gradient doubled",
    "ties in the norm, pp",
    "part of the first",
)


def check(case: Case, bug: Bug | None = None) -> StaticPart:
    """The static part of a case, with a bug's keys."""
    tokens, targets = case.batch(0)
    rows = max(len(tokens) // (case.microbatches * 2), 1)
    example = case.arranged(tokens[:rows], targets[:rows])
    return static_problems(case.make, case.config(dict(bug.keys) if bug else {}), case.size, example)


def is_found(bug: Bug) -> bool:
    """True if the static part has a problem on the first or the second rank."""
    for rank in (0, 1):
        with bug.plant(rank):
            if check(bug.case, bug).problems:
                return True
    return False


@cache
def without_bug(case: Case) -> StaticPart:
    return check(case)


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_is_found(name: str) -> None:
    bug = BY_NAME[name]
    assert is_found(bug)
    clean = without_bug(bug.case)
    assert not clean.problems, [*map(str, clean.problems)]
    assert not clean.unknown, clean.unknown


@pytest.mark.soak
def test_the_list_of_bugs_that_are_found() -> None:
    """Counts what is found: 33 of the list, at least the 25 that the static part is to find."""
    found = {bug.name for bug in BUGS if is_found(bug)}
    assert found == FOUND
    assert len(found) >= 25


@pytest.mark.soak
def test_no_case_has_a_problem_without_its_bug() -> None:
    for case in {bug.case for bug in BUGS}:
        clean = without_bug(case)
        assert not clean.problems, (case, [*map(str, clean.problems)])
        assert not clean.unknown, (case, clean.unknown)
