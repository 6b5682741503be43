"""What a rank sends in a step, and what it holds between steps, are foreseen to the byte and call.

The foreseen side is the Plan with one pass on shapes; the other side are ``Traffic`` and the ledger of an engine that
has run two real steps.
"""

from typing import Any

import pytest
import torch

from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.plan.action import Action, Kind
from shardwise.plan.kinds import AnyKind, Definition
from shardwise.simulate.exchanges import rows_of, totals
from shardwise.simulate.quantities import Quantities
from shardwise.simulate.sent import CALLS, sent
from tests.simulate.layouts import LAYOUTS, MODELS, THIN, Counted, Layout, count_all, settings

ELSEWHERE = ("rings", "save", "loaded", "dynamic tables")
"""Rows of the ledger that are not compared: rings of shared memory between ranks and copies of saves behind training
are foreseen by nobody here, blocks of state on their way to or from a disk by their most, with the threads' own, and
dynamic tables as full, without their index."""


def facts(layout: Layout) -> JobFacts:
    make, batch = MODELS[layout.model]
    return read(make, settings(layout), layout.ranks, torch.device("cpu"), batch())


def compare(layout: Layout, real: list[Counted]) -> None:
    known = facts(layout)
    foreseen = known.outlook(known.settings.offload)
    for rank, counted in enumerate(real):
        calls = totals(sent(foreseen.plan, known.passed, rank))
        told = {key: tuple(count) for key, count in calls.items()}
        if layout.is_exact:
            assert told == counted.sent, f"{layout.name}, rank {rank}; sent {counted.said}"
        else:  # the numbers decide how many rows are sent, but not in how many calls
            assert {key: count[0] for key, count in told.items()} == {
                key: count[0] for key, count in counted.sent.items()
            }, f"{layout.name}, rank {rank}; sent {counted.said}"
            assert foreseen.assumes or known.tables
        held = {row: size for row, size in counted.held.items() if size and row not in ELSEWHERE}
        first = foreseen.plan.mesh.index("pp", rank)
        at_peak = foreseen.steps[first].peak.rows
        state = foreseen.plan.bytes_per_rank(rank)
        # The ledger has slots of shards that come from another tier in the row of gathered weights.
        state["gathered"] = at_peak.get("gathered", 0) + at_peak.get("brought", 0)
        state["staging"] = at_peak.get("staging", 0)
        state = {row: size for row, size in state.items() if size and row not in ELSEWHERE}
        assert state == held, f"{layout.name}, rank {rank}"


@pytest.mark.parametrize("size", [2])
def test_what_is_sent_is_foreseen(ranks: Any, size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.name in THIN]
    assert len(layouts) == len(THIN)
    for layout, real in zip(layouts, zip(*ranks(size).run(count_all, layouts), strict=True), strict=True):
        compare(layout, list(real))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}: {layout.ranks}")
def test_what_every_layout_sends_is_foreseen(ranks: Any, layout: Layout) -> None:
    compare(layout, [each for (each,) in ranks(layout.ranks).run(count_all, [layout])])


def test_the_sum_of_all_actions_is_what_is_sent() -> None:
    layout = next(each for each in LAYOUTS if each.name == "pp, tied")
    known = facts(layout)
    plan = known.outlook(known.settings.offload).plan
    quantities = Quantities(plan, known.passed, 0)
    by_action = [call for action in plan.own.actions for call in quantities.exchanges(action)]
    assert totals(by_action) == totals(sent(plan, known.passed, 0))
    rows = rows_of(by_action)
    assert [*rows[0]] == ["operation", "purpose", "axis", "calls", "elements", "bytes"]
    assert {(row["operation"], row["axis"]) for row in rows} == {
        ("all_reduce", "model"),
        ("all_reduce", "shared"),
        ("send", "pp"),
    }


def test_a_click_model_in_a_pipeline_is_foreseen() -> None:
    """The last stage multiplies values of the first one, which have no memory there; it was refused as uncuttable."""
    known = facts(next(each for each in LAYOUTS if each.name == "dlrm, pp"))
    assert {*known.passed} == {0, 1} and known.passed[1].flops > 0


def test_every_kind_says_what_it_sends() -> None:
    """A Kind without a word for it would be left out of what a step sends."""
    assert [kind.name for kind in Kind if kind.row.sends not in (*CALLS, "nothing")] == []
    assert {kind.row.sends for kind in Kind} == {*CALLS, "nothing"}

    class Further(AnyKind):
        POST = Definition("send what nobody foresees")

    known = facts(LAYOUTS[0])
    quantities = Quantities(known.outlook(known.settings.offload).plan, known.passed, 0)
    with pytest.raises(KeyError):
        quantities.exchanges(Action(Further.POST))  # type: ignore[arg-type]
