"""Each seeded bug changes the tensor that it is said to change, and today's finders find what they must.

A bug that did nothing would say nothing about what looks for it: its figures are at least 10^4 times the noise, which
is the largest difference from the truth that the same layout has without the bug.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from shardwise.comm.world import join
from shardwise.engine.engine import Engine
from tests.verify.bugs import BUGS, BY_NAME, TIED, Bug, activation_to_the_stage_before
from tests.verify.cases import Case
from tests.verify.facts import (
    KINDS,
    REFUSED,
    Difference,
    RunFacts,
    differences,
    first_wrong,
    laid_out,
    plainly,
)

MARGIN = 1e4
LEAST_NOISE = 1e-16
"""Where two runs are equal to the bit."""
LIMIT = 1e-10
"""Of all figures of a run without a bug."""


class Measured(NamedTuple):
    """What a bug changes, and who finds it today."""

    figures: dict[str, Difference]
    noise: dict[str, Difference]
    first: tuple[str, tuple[str, ...]]
    """The first kind that has wrong tensors, and these."""
    check: str = ""
    """What the check of the first step says; empty: it finds nothing."""
    guard: str = ""
    """What ``guard`` says of the copies; empty: it finds nothing."""


@cache
def clean(world: Any, case: Case) -> tuple[RunFacts, dict[str, Difference]]:
    """The truth of a case, and the noise of its layout."""
    here = laid_out(world, case)
    assert not here.refusal, (case, here.refusal)
    truth = plainly(case) if case.reference == "plain" else here
    return truth, differences(laid_out(world, case) if case.reference == "layout" else here, truth)


def measure(world: Any, names: list[str], finders: bool) -> dict[str, Measured]:
    """What each bug changes; with ``finders`` also who finds it, in further runs."""
    return {name: _measure(world, BY_NAME[name], finders) for name in names}


def _measure(world: Any, bug: Bug, finders: bool) -> Measured:
    truth, noise = clean(world, bug.case)
    keys = dict(bug.keys)

    def planted(**more: Any) -> RunFacts:
        return laid_out(world, bug.case, bug.plant(world.rank), {**keys, **more})

    got = planted()
    figures, first = differences(got, truth), first_wrong(got, truth)
    check = guard = ""
    if finders or "check" in bug.found_by:
        check = _said(planted(check_first_step="auto").refusal, "PlanError: check: the model cut by mesh.")
    if finders or "guard" in bug.found_by or "copy" in bug.shows:
        guard = _said(planted(guard={"every": 1}).refusal, "DivergedError")
    return Measured(figures, noise, first, check, guard)


def _said(refusal: str, start: str) -> str:
    return refusal if refusal.startswith(start) else ""


def worst(rows: list[Measured]) -> Measured:
    """The ranks' figures as one: the largest of each kind, and what all of them say alike."""
    figures: dict[str, Difference] = {}
    for row in rows:
        for kind, figure in row.figures.items():
            if kind not in figures or not figure.error <= figures[kind].error:
                figures[kind] = figure
    checks = {row.check for row in rows}
    seen = [row.first for row in rows if row.first[0]]
    kind = min((kind for kind, _ in seen), key=KINDS.index, default="")
    names = tuple(dict.fromkeys(name for each, some in seen if each == kind for name in some))
    return rows[0]._replace(
        figures=figures, first=(kind, names), check=checks.pop() if len(checks) == 1 else ""
    )


def measured_on(pools: Any, names: list[str], finders: bool = False) -> dict[str, Measured]:
    """Measure bugs, a pool of ranks for each size."""
    by_size: Mapping[int, list[str]] = defaultdict(list)
    for name in names:
        by_size[BY_NAME[name].case.size].append(name)
    found = {}
    for size, some in by_size.items():
        rows = pools(size).run(measure, some, finders, timeout_s=600.0)
        found |= {name: worst([row[name] for row in rows]) for name in some}
    return found


def complaints(bug: Bug, found: Measured) -> list[str]:
    """What is not as the list says."""
    said = []
    if REFUSED not in found.figures:
        for kind in bug.shows:
            if kind == "copy":
                said += [] if found.guard else ["no copy differs"]
                continue
            figure, noise = found.figures[kind], max(found.noise[kind].error, LEAST_NOISE)
            if not figure.error >= MARGIN * noise:
                said.append(f"{kind} moves by {figure.error:.2g} ({figure.name}), noise {noise:.2g}")
        said += unlike(bug, *found.first)
    for kind, figure in found.noise.items():
        if bug.case.reference == "plain" and not figure.error <= LIMIT:
            said.append(f"without the bug {kind} is wrong by {figure.error:.2g} ({figure.name})")
    for finder in ("check", "guard"):
        if finder in bug.found_by and not getattr(found, finder):
            said.append(f"{finder} does not find it")
    return said


def unlike(bug: Bug, kind: str, names: tuple[str, ...]) -> list[str]:
    """How what is wrong first differs from the list, which has activations too."""
    if bug.kind == "copy":
        return []
    alike = {
        "activation": ("loss", "gradient"),
        "master": ("master", "weight"),
        "weight": ("master", "weight"),
    }
    if kind not in alike.get(bug.kind, (bug.kind,)):
        return [f"first wrong is {kind} ({', '.join(names[:3])})"]
    if bug.kind == kind and kind not in ("loss", "norm", "moment"):
        others = [name for name in names if not bug.may_name(name)]
        return [f"wrong too: {', '.join(others[:3])}"] if others else []
    return []


SUITE = [bug.name for bug in BUGS[::40]]
"""One in forty; the soak has all of them."""


def test_the_list_is_long_and_of_every_kind() -> None:
    assert len(BUGS) >= 60
    kinds = {bug.kind for bug in BUGS}
    assert kinds >= {
        "start weight",
        "activation",
        "loss",
        "gradient",
        "norm",
        "moment",
        "master",
        "weight",
        "copy",
    }
    assert sum(bug.in_one_process for bug in BUGS) >= 3
    assert all(bug.shows for bug in BUGS)


def test_some_bugs_change_what_they_are_said_to_change(ranks: Any) -> None:
    found = measured_on(ranks, SUITE)
    assert not {name: said for name in SUITE if (said := complaints(BY_NAME[name], found[name]))}


@pytest.mark.soak
def test_every_bug_changes_what_it_is_said_to_change(ranks: Any) -> None:
    names = [bug.name for bug in BUGS]
    found = measured_on(ranks, names)
    assert not {name: said for name in names if (said := complaints(BY_NAME[name], found[name]))}


@pytest.mark.soak
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.in_one_process], ids=lambda bug: bug.name)
def test_a_bug_of_one_process_too_is_seen_by_an_independent_reference_alone(bug: Bug) -> None:
    world, alone = join(quiet=True), bug.case._replace(layout="dp=1")
    with bug.plant(0):
        ours = laid_out(world, alone)
    figures = differences(ours, plainly(alone))
    for kind in bug.shows:
        assert figures[kind].error > MARGIN * LIMIT, kind


# Messages to the wrong rank ----------------------------------------------------------------------------------------


def misdirected(world: Any) -> str:
    """What the engine says when a message goes to the wrong neighbour."""
    train_step = Engine.train_step

    def impatient(self: Engine, *args: Any) -> Any:
        self.clock._timeout_s = 0.3  # ten times as much in the first step
        return train_step(self, *args)

    with patch.object(Engine, "train_step", impatient):
        return laid_out(world, TIED, activation_to_the_stage_before(world.rank)).refusal


def test_a_message_to_the_wrong_neighbour_is_an_error(ranks: Any) -> None:
    """The rank that it reaches says what it got instead of what; the one that it was for, that it got nothing."""
    pool = ranks(3)
    try:
        first, _, last = pool.run(misdirected)
    finally:
        pool.close()  # ranks that have failed so are out of step for good
    assert "expects 'gradient of stage 1, microbatch 0'" in first
    assert "is 'activation of stage 1, microbatch 0'" in first
    assert "receive of activation of stage 1, microbatch 0 from rank 1" in last
    # Ranks 1 and 2 wait for one another, equally long: either its own deadline ends it, or rank 1 gives up before.
    assert "did not arrive within" in last
    assert "the other rank did not arrive" in last or "rank 1 gave up" in last
