"""Lists of Units, as pure data."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.parallel.pipeline.passes import add_sharding
from shardwise.parallel.zero.layout import strategy_of
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.action import Action, Kind
from shardwise.plan.lists import (
    PrefetchLimits,
    UnitBoundary,
    backward_actions,
    forward_actions,
    is_inside,
    keys_ahead,
    registration_boundaries,
    update_actions,
    with_absent,
    with_fetches,
)
from shardwise.plan.mesh import Mesh

ZERO1, ZERO2, ZERO3 = ([strategy_of(ZeroPolicy(stage=stage), Mesh(dp_shard=2))] * 8 for stage in (1, 2, 3))


def text(actions: list[Action]) -> str:
    return " ".join(str(action) for action in actions)


def opens(*units: int) -> list[UnitBoundary]:
    """Units of a row inside the root 0."""
    inner = [boundary for unit in units for boundary in (UnitBoundary(True, unit), UnitBoundary(False, unit))]
    return [UnitBoundary(True, 0), *inner, UnitBoundary(False, 0)]


def test_rows_are_fetched_once_behind_a_unit_that_runs_twice() -> None:
    made = with_fetches(forward_actions(opens(1, 2, 1), ZERO1), {5: 1, 4: 1, 3: 0})
    assert text(made) == "F(u0) FETCH(u3) F(u1) FETCH(u5) FETCH(u4) F(u2) F(u1)"
    assert text(keys_ahead(made)) == "INPUT_DIST(u3) INPUT_DIST(u5) INPUT_DIST(u4)"


def test_lists_of_a_row() -> None:
    row = opens(1, 2)
    assert text(forward_actions(row, ZERO3)) == (
        "UNSHARD(u0) F(u0) UNSHARD(u1) F(u1) RESHARD(u1) UNSHARD(u2) F(u2) RESHARD(u2) RESHARD(u0)"
    )
    assert text(backward_actions(row, ZERO3, [True] * 3, last=False)) == (
        "UNSHARD(u0) B(u0) UNSHARD(u2) B(u2) RESHARD(u2) REDUCE(u2) ARRIVE(u2) "
        "UNSHARD(u1) B(u1) RESHARD(u1) REDUCE(u1) ARRIVE(u1) RESHARD(u0) REDUCE(u0) ARRIVE(u0)"
    )
    assert text(backward_actions(row, ZERO2, [True, False, True], last=False)) == (
        "B(u0) B(u2) REDUCE(u2) ARRIVE(u2) B(u1) REDUCE(u0) ARRIVE(u0)"
    )
    assert text(backward_actions(row, ZERO1, [True] * 3, last=False)) == "B(u0) B(u2) B(u1)"
    assert text(backward_actions(row, ZERO1, [True] * 3, last=True)) == (
        "B(u0) B(u2) REDUCE(u2) ARRIVE(u2) B(u1) REDUCE(u1) ARRIVE(u1) REDUCE(u0) ARRIVE(u0)"
    )


def test_gathers_run_ahead_of_their_use() -> None:
    row = opens(1, 2, 3)
    one_at_a_time = PrefetchLimits(1, [10] * 4)
    assert text(forward_actions(row, ZERO3, one_at_a_time)) == (
        "UNSHARD(u0) UNSHARD(u1) F(u0) UNSHARD(u2) F(u1) RESHARD(u1) "
        "UNSHARD(u3) F(u2) RESHARD(u2) F(u3) RESHARD(u3) RESHARD(u0)"
    )


def test_gathers_run_ahead_by_bytes() -> None:
    """Small ones many at once; a large one alone, where nothing else waits."""
    row = opens(1, 2, 3, 4)
    assert text(forward_actions(row, ZERO3, PrefetchLimits(10, [1, 3, 3, 3, 11]))) == (
        "UNSHARD(u0) UNSHARD(u1) UNSHARD(u2) UNSHARD(u3) F(u0) F(u1) RESHARD(u1) F(u2) RESHARD(u2) "
        "UNSHARD(u4) F(u3) RESHARD(u3) F(u4) RESHARD(u4) RESHARD(u0)"
    )
    assert text(forward_actions(row, ZERO3, PrefetchLimits(10, [1, 3, 20, 3, 4]))) == (
        "UNSHARD(u0) UNSHARD(u1) F(u0) UNSHARD(u2) F(u1) RESHARD(u1) UNSHARD(u3) UNSHARD(u4) F(u2) RESHARD(u2) "
        "F(u3) RESHARD(u3) F(u4) RESHARD(u4) RESHARD(u0)"
    )


def test_what_a_gather_sends_comes_as_far_ahead_of_it() -> None:
    """Where nothing goes ahead it comes directly in front of the gather."""
    away = [replace(each, tier="disk", weight_tier="disk") for each in ZERO3]
    strategies = [ZERO3[0], *away[1:]]
    row = opens(1, 2, 3)
    assert text(forward_actions(row, strategies, PrefetchLimits(1, [10] * 4))) == (
        "LOAD_WEIGHT(u1) LOAD_WEIGHT(u2) UNSHARD(u0) UNSHARD(u1) F(u0) LOAD_WEIGHT(u3) UNSHARD(u2) F(u1) RESHARD(u1) "
        "UNSHARD(u3) F(u2) RESHARD(u2) F(u3) RESHARD(u3) RESHARD(u0)"
    )
    assert text(forward_actions(row, strategies)) == (
        "UNSHARD(u0) F(u0) LOAD_WEIGHT(u1) UNSHARD(u1) F(u1) RESHARD(u1) LOAD_WEIGHT(u2) UNSHARD(u2) F(u2) RESHARD(u2) "
        "LOAD_WEIGHT(u3) UNSHARD(u3) F(u3) RESHARD(u3) RESHARD(u0)"
    )
    assert not strategies[0].brings_shard and not replace(ZERO1[0], tier="disk").brings_shard


def test_saved_tensors_leave_behind_the_next_unit_that_runs() -> None:
    """Those of a pass's last Unit leave in the next pass; a Unit around others does not count as the next one."""
    saving = [replace(each, saved_tier="host") for each in ZERO1]
    strategies = [ZERO1[0], *saving[1:3], ZERO1[3]]
    assert text(forward_actions(opens(1, 2, 3), strategies)) == (
        "F(u0) F(u1) F(u2) OFFLOAD(u1) F(u3) OFFLOAD(u2)"
    )
    assert text(forward_actions(opens(1, 2), strategies)) == "F(u0) F(u1) F(u2) OFFLOAD(u1)"
    assert text(forward_actions(opens(1, 2), strategies, first=False)) == (
        "F(u0) F(u1) OFFLOAD(u2) F(u2) OFFLOAD(u1)"
    )
    assert text(forward_actions(opens(1, 2), strategies, saves=False)) == "F(u0) F(u1) F(u2)"
    cut = [ZERO3[0], *(replace(each, saved_tier="host") for each in ZERO3[1:])]
    assert text(forward_actions(opens(1, 2), cut)) == (
        "UNSHARD(u0) F(u0) UNSHARD(u1) F(u1) RESHARD(u1) UNSHARD(u2) F(u2) RESHARD(u2) OFFLOAD(u1) RESHARD(u0)"
    )


def test_what_was_saved_elsewhere_comes_one_such_unit_ahead() -> None:
    """Once for each time that the Unit ran; the first of all behind the Unit before it."""
    saving = [replace(each, saved_tier="host") for each in ZERO1]
    strategies = [ZERO1[0], *saving[1:3], ZERO1[3], *saving[4:]]
    assert text(backward_actions(opens(1, 2, 3, 4), strategies, [True] * 5, last=False)) == (
        "B(u0) RELOAD(u4) RELOAD(u2) B(u4) B(u3) RELOAD(u1) B(u2) B(u1)"
    )
    assert text(backward_actions(opens(1, 2, 3), strategies, [True] * 5, last=False)) == (
        "B(u0) RELOAD(u2) B(u3) RELOAD(u1) B(u2) B(u1)"
    )
    assert text(backward_actions(opens(1, 2, 1), strategies, [True] * 5, last=False)) == (
        "B(u0) RELOAD(u1) RELOAD(u2) B(u1) RELOAD(u1) B(u2) B(u1)"
    )
    cut = [replace(each, saved_tier="host") for each in ZERO3]
    row = backward_actions(opens(1, 2), [ZERO3[0], *cut[1:]], [True] * 3, False, PrefetchLimits(1, [10] * 3))
    assert text(row) == (
        "UNSHARD(u0) UNSHARD(u2) B(u0) RELOAD(u2) RELOAD(u1) UNSHARD(u1) B(u2) RESHARD(u2) REDUCE(u2) ARRIVE(u2) "
        "B(u1) RESHARD(u1) REDUCE(u1) ARRIVE(u1) RESHARD(u0) REDUCE(u0) ARRIVE(u0)"
    )


def test_first_gathers_of_a_step_stay_behind_the_compute_in_front() -> None:
    """Of Units whose updates run beside it; what is on the device, or frozen, or adopted late, has no such update."""
    row, ahead, trained = opens(1, 2, 3, 4, 5), PrefetchLimits(1, [10] * 6), [True] * 6
    away = [replace(each, tier="host") for each in ZERO3]
    assert text(forward_actions(row, away, ahead.behind_updates(row, away, trained))) == (
        "UNSHARD(u0) F(u0) UNSHARD(u1) F(u1) RESHARD(u1) UNSHARD(u2) F(u2) RESHARD(u2) UNSHARD(u3) UNSHARD(u4) F(u3) "
        "RESHARD(u3) UNSHARD(u5) F(u4) RESHARD(u4) F(u5) RESHARD(u5) RESHARD(u0)"
    )
    assert ahead.behind_updates(row, [*ZERO3[:2], *away[2:]], [*trained[:3], False, True, True]).held == [
        2,
        4,
        5,
    ]
    late = [replace(each, tier="host", is_delayed=True) for each in ZERO3]
    whole = [replace(each, tier="host") for each in ZERO2]
    for none in (ZERO3, late, whole):
        assert ahead.behind_updates(row, none, trained) == ahead._replace(held=[])


def test_only_the_first_pass_of_a_step_gathers_behind_updates() -> None:
    away = [replace(each, tier="host") for each in ZERO3]
    row, ahead = opens(1, 2), PrefetchLimits(1, [10] * 3)

    def units(kind: Kind, stage: int, first: bool, last: bool) -> list[Action]:
        if kind is not Kind.F:
            return []
        return forward_actions(row, away, ahead.behind_updates(row, away, [True] * 3) if first else ahead)

    passes = [Action(kind, stage=0, microbatch=each) for each in range(2) for kind in (Kind.F, Kind.B)]
    made = add_sharding({0: passes}, units)[0]
    assert [text(made).count(each) for each in ("UNSHARD(u1,0) F(u0,0)", "UNSHARD(u1,1) F(u0,1)")] == [0, 1]


def test_an_update_that_counts_a_step_late() -> None:
    """Weights become the last one's before this one begins, which goes from the last Unit on, as gradients come."""
    late = [replace(each, tier="disk", is_delayed=True) for each in ZERO1]
    assert text(update_actions([True, False, True], late)) == (
        "SWAP_WEIGHT(u0) UNSHARD(u0) SWAP_WEIGHT(u2) UNSHARD(u2) LOAD(u2) STEP(u2) STORE(u2) "
        "LOAD(u0) STEP(u0) STORE(u0)"
    )


def test_a_unit_that_runs_twice() -> None:
    """It stays where nothing comes in between, opens again where something does, and is reduced once."""
    assert text(forward_actions(opens(1, 1), ZERO3)) == (
        "UNSHARD(u0) F(u0) UNSHARD(u1) F(u1) F(u1) RESHARD(u1) RESHARD(u0)"
    )
    assert text(backward_actions(opens(1, 2, 1), ZERO3, [True] * 3, last=True)) == (
        "UNSHARD(u0) B(u0) UNSHARD(u1) B(u1) RESHARD(u1) UNSHARD(u2) B(u2) RESHARD(u2) REDUCE(u2) ARRIVE(u2) "
        "UNSHARD(u1) B(u1) RESHARD(u1) REDUCE(u1) ARRIVE(u1) RESHARD(u0) REDUCE(u0) ARRIVE(u0)"
    )


def test_order_of_registration() -> None:
    names = ["", "a", "a.b", "a.c", "ab", "d"]
    assert registration_boundaries(names) == [
        UnitBoundary(True, 0),
        UnitBoundary(True, 1),
        UnitBoundary(True, 2),
        UnitBoundary(False, 2),
        UnitBoundary(True, 3),
        UnitBoundary(False, 3),
        UnitBoundary(False, 1),
        UnitBoundary(True, 4),
        UnitBoundary(False, 4),
        UnitBoundary(True, 5),
        UnitBoundary(False, 5),
        UnitBoundary(False, 0),
    ]
    assert is_inside("a.b", "a") and is_inside("a", "") and not is_inside("ab", "a")


@st.composite
def windows(draw: st.DrawFn) -> list[UnitBoundary]:
    """Any nesting and repetition of up to six Units inside the root."""

    def some(depth: int) -> list[UnitBoundary]:
        found: list[UnitBoundary] = []
        for unit in draw(st.lists(st.integers(1, 6), max_size=4 - depth)):
            found += [
                UnitBoundary(True, unit),
                *(some(depth + 1) if depth < 2 else []),
                UnitBoundary(False, unit),
            ]
        return found

    return [UnitBoundary(True, 0), *some(0), UnitBoundary(False, 0)]


@given(windows(), st.integers(0, 9), st.lists(st.integers(0, 8), min_size=7, max_size=7), st.integers(1, 3))
def test_every_list_can_be_run(
    boundaries: list[UnitBoundary], limit: int, sizes: list[int], passes: int
) -> None:
    """A Unit is gathered whenever it computes, never twice at once, and released and reduced once at the end. What
    waits for its use is within the limit, or one Unit, and gathers keep their order."""
    trained, ahead = [True] * 7, PrefetchLimits(limit, sizes)
    for actions, plain, reduces in (
        (forward_actions(boundaries, ZERO3, ahead), forward_actions(boundaries, ZERO3), False),
        (
            backward_actions(boundaries * passes, ZERO3, trained, True, ahead),
            backward_actions(boundaries * passes, ZERO3, trained, True),
            True,
        ),
    ):
        assert [a for a in actions if a.kind is Kind.UNSHARD] == [a for a in plain if a.kind is Kind.UNSHARD]
        assert [a for a in actions if a.kind is not Kind.UNSHARD] == [
            a for a in plain if a.kind is not Kind.UNSHARD
        ]
        open_units: set[int] = set()
        reduced: set[int] = set()
        waiting: set[int] = set()
        for kind, unit, *_ in actions:
            if kind.computes:
                waiting.discard(unit)
                held = [sizes[each] for each in waiting if sizes[each]]
                assert sum(held) <= limit or (limit and len(held) == 1)
            if kind is Kind.UNSHARD:
                assert unit not in open_units and unit not in reduced
                open_units.add(unit)
                waiting.add(unit)
            elif kind is Kind.RESHARD:
                open_units.discard(unit)
            elif kind is Kind.REDUCE:
                assert unit not in reduced and unit not in open_units
                reduced.add(unit)
            elif kind is Kind.ARRIVE:
                assert unit in reduced
            else:
                assert unit in open_units
        assert not open_units
        used = {boundary.unit for boundary in boundaries}
        assert reduced == (used if reduces else set())


def arrivals(under_way: int, first: bool, strategies: Any = ZERO2) -> str:
    row = backward_actions(opens(1, 2, 3), strategies, [True] * 4, True, under_way=under_way, first=first)
    return text([each for each in row if each.kind in (Kind.REDUCE, Kind.ARRIVE)])


def test_reductions_are_waited_for_behind_later_ones() -> None:
    """A pass that follows another one also waits for the reductions which that pass left under way."""
    assert arrivals(0, True) == (
        "REDUCE(u3) ARRIVE(u3) REDUCE(u2) ARRIVE(u2) REDUCE(u1) ARRIVE(u1) REDUCE(u0) ARRIVE(u0)"
    )
    assert arrivals(1, True) == "REDUCE(u3) REDUCE(u2) ARRIVE(u3) REDUCE(u1) ARRIVE(u2) REDUCE(u0) ARRIVE(u1)"
    assert arrivals(1, False) == (
        "REDUCE(u3) ARRIVE(u0) REDUCE(u2) ARRIVE(u3) REDUCE(u1) ARRIVE(u2) REDUCE(u0) ARRIVE(u1)"
    )
    assert arrivals(9, True) == "REDUCE(u3) REDUCE(u2) REDUCE(u1) REDUCE(u0)"
    whole = arrivals(1, False, ZERO1)
    assert whole == arrivals(1, True, ZERO1), "whole gradients are reduced in the last pass alone"


def test_the_end_of_a_step() -> None:
    assert text(update_actions([True, False, True], ZERO2[:3])) == "STEP(u0) UNSHARD(u0) STEP(u2) UNSHARD(u2)"
    assert text(update_actions([True], ZERO3[:1])) == "STEP(u0)"


def test_units_that_did_not_run_keep_their_places() -> None:
    """They stood behind all others, so that a step that used one again on a rank alone was out of order."""
    assert with_absent(opens(2, 3), opens(1, 2, 3)) == tuple(opens(1, 2, 3))
    assert with_absent(opens(1, 3), opens(1, 2, 3)) == tuple(opens(1, 2, 3))
    assert with_absent(opens(), opens(1, 2, 3)) == tuple(opens(1, 2, 3))
    assert with_absent(opens(3, 1), opens(3, 2, 1)) == tuple(opens(3, 2, 1))
    assert with_absent(opens(1, 2, 1), opens(1, 2, 3)) == tuple(opens(1, 2, 3, 1))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_any_units_may_be_absent(depths: list[int], data: st.DataObject) -> None:
    """The order stays a nest of boundaries with every Unit in it, what ran stays in order, and others keep theirs."""
    names, path = [""], [""]
    for i, depth in enumerate(depths):
        path = path[: min(depth, len(path) - 1) + 1]
        path.append(f"{path[-1]}.{i}".lstrip("."))
        names.append(path[-1])
    before = registration_boundaries(names)
    absent = data.draw(st.sets(st.integers(1, len(depths))))
    seen = [boundary for boundary in before if boundary.unit not in absent]
    assert with_absent(seen, seen) == tuple(seen)
    found = with_absent(seen, before)
    assert [boundary for boundary in found if boundary.unit not in absent] == seen
    assert {boundary.unit for boundary in found} == set(range(len(names)))
    around: list[int] = []
    for opened, unit in found:
        if opened:
            around.append(unit)
        else:
            assert around.pop() == unit
    if set(depths) == {0}:
        assert found == tuple(before)
