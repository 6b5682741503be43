"""The validator says no: real Plans, each broken in one place. What it cannot see, parity tests see.

Every Action of a list is left out, doubled and swapped with its neighbour, too; what passes all the same is harmless,
and listed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.plan.described import plan
from tests.plan.planted import MICROBATCHES, QKV, good, registered

from shardwise.base.errors import PlanError
from shardwise.plan.action import (
    ALL_TO_ALL,
    BALANCE,
    NORM,
    RECV,
    SCALE,
    SEND,
    SUM,
    TRUST_RATIO,
    Action,
    B,
    F,
    Kind,
)
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.registry import TensorInfo, UpdateRule
from shardwise.plan.validate import validate_plan

Rows = dict[str, list[Action]]


def with_rows(whole: Plan, rows: Mapping[str, list[Action]]) -> Plan:
    classes = {name: replace(each, actions=tuple(rows[name])) for name, each in whole.classes.items()}
    return replace(whole, classes=classes)


def row_of(whole: Plan) -> Rows:
    return {name: list(actions) for name, actions in whole.actions.items()}


def unit(kind: Kind, number: int, microbatch: int = -1) -> Action:
    return Action(kind, number, microbatch)


def drop(name: str, action: Action) -> Callable[[Rows], None]:
    return lambda rows: rows[name].remove(action)


def double(name: str, action: Action) -> Callable[[Rows], None]:
    return lambda rows: rows[name].insert(rows[name].index(action), action)


def add(name: str, action: Action) -> Callable[[Rows], None]:
    return lambda rows: rows[name].append(action)


def swap(name: str, one: Action, other: Action) -> Callable[[Rows], None]:
    def broken(rows: Rows) -> None:
        row = rows[name]
        i, j = row.index(one), row.index(other)
        row[i], row[j] = row[j], row[i]

    return broken


def before(name: str, action: Action, other: Action) -> Callable[[Rows], None]:
    """The last ``action`` moves to just before the first ``other``."""

    def broken(rows: Rows) -> None:
        row = rows[name]
        del row[len(row) - 1 - row[::-1].index(action)]
        row.insert(row.index(other), action)

    return broken


def both(name: str, change: Any, kind: Kind, number: int, microbatch: int) -> Callable[[Rows], None]:
    """The same change to a REDUCE and to the ARRIVE that waits for it."""

    def broken(rows: Rows) -> None:
        change(name, unit(kind, number, microbatch))(rows)
        change(name, unit(Kind.ARRIVE, number, microbatch))(rows)

    return broken


def later(name: str, number: int, microbatch: int, other: Action) -> Callable[[Rows], None]:
    """A reduction and its wait move to just behind ``other``."""

    def broken(rows: Rows) -> None:
        row, pair = rows[name], [unit(kind, number, microbatch) for kind in (Kind.REDUCE, Kind.ARRIVE)]
        rows[name] = [each for each in row if each not in pair]
        place = rows[name].index(other) + 1
        rows[name][place:place] = pair

    return broken


STEP0, STEP1 = unit(Kind.STEP, 0), unit(Kind.STEP, 1)
PLANTED = [
    (
        "zero0",
        drop("all", unit(Kind.REDUCE, 1, 1)),
        r"ARRIVE\(u1,1\) though no reduction of Unit 1",
    ),
    (
        "zero0",
        double("all", unit(Kind.REDUCE, 1, 1)),
        r"REDUCE\(u1,1\) while the reductions of 1 Units are under way",
    ),
    (
        "zero2",
        both("all", drop, Kind.REDUCE, 1, 0),
        r"REDUCE of Unit 1 in microbatches \[1\]; .* asks for \[0, 1\]",
    ),
    (
        "zero0",
        both("all", drop, Kind.REDUCE, 1, 1),
        r"REDUCE of Unit 1 in microbatches \[\]; .* asks for \[1\]",
    ),
    (
        "zero2",
        drop("all", unit(Kind.REDUCE, 1, 0)),
        r"ARRIVE\(u1,0\) though no reduction of Unit 1",
    ),
    ("zero1", before("all", unit(Kind.REDUCE, 1, 1), unit(Kind.B, 1, 1)), r"REDUCE\(u1,1\) before B\(u1,1\)"),
    (
        "zero1",
        before("all", unit(Kind.REDUCE, 1, 1), unit(Kind.F, 1, 1)),
        r"inside F\(0,1\); expected inside B",
    ),
    ("zero1", drop("all", STEP1), r"UNSHARD\(u1\) before STEP\(u1\)"),
    ("zero0", drop("all", STEP1), r"no STEP\(u1\) though the Unit trains"),
    ("zero1", double("all", STEP0), r"STEP\(u0\) twice"),
    ("frozen", add("all", unit(Kind.STEP, 2)), r"STEP\(u2\) of a Unit in which nothing trains"),
    ("frozen", add("all", unit(Kind.UNSHARD, 2)), r"UNSHARD\(u2\) at the end of the step"),
    ("zero1", before("all", STEP0, NORM), r"STEP\(u0\) before NORM"),
    ("zero1", drop("all", NORM), r"STEP\(u0\) before NORM"),
    ("zero1", double("all", NORM), "NORM twice"),
    ("zero2", before("all", NORM, unit(Kind.REDUCE, 0, 1)), r"REDUCE\(u0,1\) after NORM"),
    ("zero1", drop("all", unit(Kind.UNSHARD, 1)), r"no UNSHARD\(u1\) after its update"),
    ("zero1", double("all", unit(Kind.UNSHARD, 1)), r"UNSHARD\(u1\) twice; expected once"),
    ("zero1", swap("all", STEP1, unit(Kind.UNSHARD, 1)), r"UNSHARD\(u1\) before STEP\(u1\)"),
    ("zero1", drop("all", unit(Kind.F, 2, 0)), "0 F and 1 B of Unit 2 in microbatch 0"),
    ("zero1", drop("all", unit(Kind.B, 2, 0)), "1 F and 0 B of Unit 2 in microbatch 0"),
    ("zero1", add("all", F(0, 0)), r"runs F\(0,0\) 2 times"),
    ("zero3", drop("all", unit(Kind.UNSHARD, 2, 0)), r"F\(u2,0\) while its weights are not gathered"),
    (
        "zero3",
        double("all", unit(Kind.UNSHARD, 2, 0)),
        r"UNSHARD\(u2,0\) while its weights are gathered already",
    ),
    (
        "zero3",
        swap("all", unit(Kind.UNSHARD, 1, 0), unit(Kind.UNSHARD, 2, 0)),
        r"F\(u1,0\) while its weights are not",
    ),
    (
        "zero3",
        before("all", unit(Kind.RESHARD, 2, 1), unit(Kind.B, 2, 1)),
        r"B\(u2,1\) while its weights are not",
    ),
    (
        "zero3",
        before("all", unit(Kind.RESHARD, 0, 1), unit(Kind.B, 1, 1)),
        "weights of its root, Unit 0, are not",
    ),
    (
        "zero3",
        drop("all", unit(Kind.RESHARD, 2, 0)),
        r"UNSHARD\(u2,0\) while its weights are gathered already",
    ),
    ("zero3", add("all", unit(Kind.RESHARD, 1)), r"RESHARD\(u1\) after STEP"),
    ("zero2", lambda rows: rows["all"].insert(1, unit(Kind.UNSHARD, 0, 0)), "weights every rank keeps whole"),
    ("hsdp", drop("all", unit(Kind.UNSHARD, 3, 1)), r"F\(u3,1\) while its weights are not gathered"),
    ("tp", drop("all", SUM), "NORM before SUM, but hold addends"),
    ("tp", double("all", SUM), "SUM twice"),
    ("tp", swap("all", SUM, NORM), "NORM before SUM"),
    ("tp", before("all", SUM, unit(Kind.REDUCE, 0, 1)), r"REDUCE\(u0,1\) after SUM"),
    (
        "zero1",
        lambda rows: rows["all"].insert(rows["all"].index(NORM), SUM),
        "SUM though they hold no gradient",
    ),
    ("tied", drop("pp 0", SUM), "pp 0 ranks have NORM before SUM"),
    ("tied", drop("pp 1", SUM), "pp 1 ranks have NORM before SUM"),
    ("norms", drop("pp 1", TRUST_RATIO), r"pp 1 ranks have STEP\(u0\) before TRUST_RATIO"),
    ("norms", double("pp 0", TRUST_RATIO), "TRUST_RATIO twice"),
    ("norms", before("pp 0", TRUST_RATIO, unit(Kind.DIRECTION, 1)), r"TRUST_RATIO before DIRECTION\(u1\)"),
    ("norms", drop("pp 0", unit(Kind.DIRECTION, 1)), r"TRUST_RATIO before DIRECTION\(u1\)"),
    ("norms", double("pp 0", unit(Kind.DIRECTION, 1)), r"DIRECTION\(u1\) twice"),
    ("norms", before("pp 0", unit(Kind.DIRECTION, 1), NORM), r"DIRECTION\(u1\) before NORM"),
    ("norms", before("pp 0", STEP1, TRUST_RATIO), r"STEP\(u1\) before TRUST_RATIO"),
    ("norms", add("pp 0", ALL_TO_ALL), "ALL_TO_ALL though no update here needs it"),
    ("routers", drop("pp 1", BALANCE), "pp 1 ranks have no BALANCE though buffers of routers follow"),
    ("routers", double("pp 1", BALANCE), "BALANCE twice"),
    ("routers", add("pp 0", BALANCE), "BALANCE though no buffer here follows the loads of experts"),
    ("routers", before("pp 1", BALANCE, NORM), "BALANCE before NORM"),
    (
        "fp8",
        drop("pp 0", SCALE),
        "pp 0 ranks have no SCALE though weights that are gathered in fp8 were updated",
    ),
    ("fp8", double("pp 0", SCALE), "SCALE twice"),
    ("fp8", add("pp 1", SCALE), "SCALE though no weight here is gathered in fp8"),
    ("fp8", before("pp 0", SCALE, STEP1), r"SCALE before STEP\(u1\), which changes the weights"),
    ("matrices", drop("all", ALL_TO_ALL), r"STEP\(u0\) before ALL_TO_ALL"),
    ("matrices", add("all", TRUST_RATIO), "TRUST_RATIO though no update here needs it"),
    (
        "matrices",
        add("all", unit(Kind.DIRECTION, 0)),
        r"DIRECTION\(u0\) of a Unit whose updates look at each element",
    ),
    ("disk", before("all", unit(Kind.STEP, 4), unit(Kind.LOAD, 4)), r"STEP\(u4\) before LOAD\(u4\)"),
    ("disk", before("all", unit(Kind.STORE, 3), unit(Kind.STEP, 3)), r"STORE\(u3\) before STEP\(u3\)"),
    ("disk", before("all", unit(Kind.LOAD, 3), NORM), r"LOAD\(u3\) before NORM"),
    ("disk", drop("all", unit(Kind.STORE, 4)), r"no STORE\(u4\) though its updated state belongs on a disk"),
    ("disk", double("all", unit(Kind.LOAD, 4)), r"LOAD\(u4\) twice"),
    ("zero1", add("all", unit(Kind.STORE, 1)), r"STORE\(u1\) of a Unit whose state stays in memory"),
    (
        "leaving",
        drop("all", unit(Kind.REDUCE, 1, 0)),
        r"ARRIVE\(u1,0\) though no reduction of Unit 1",
    ),
    ("delayed", drop("all", unit(Kind.SWAP_WEIGHT, 4)), r"UNSHARD\(u4\) before SWAP_WEIGHT\(u4\)"),
    ("delayed", before("all", unit(Kind.SWAP_WEIGHT, 4), NORM), r"SWAP_WEIGHT\(u4\) before NORM"),
    ("delayed", swap("all", unit(Kind.SWAP_WEIGHT, 4), unit(Kind.STEP, 4)), r"STEP\(u4\) before LOAD\(u4\)"),
    (
        "delayed",
        swap("all", unit(Kind.UNSHARD, 4), unit(Kind.STORE, 4)),
        r"STORE\(u4\) before STEP\(u4\)",
    ),
    ("delayed", add("all", unit(Kind.UNSHARD, 4)), r"UNSHARD\(u4\) twice"),
    (
        "disk",
        add("all", unit(Kind.SWAP_WEIGHT, 4)),
        r"SWAP_WEIGHT\(u4\) of a Unit whose updates count at once",
    ),
    (
        "weights on disk",
        double("all", unit(Kind.LOAD_WEIGHT, 3, 0)),
        r"LOAD_WEIGHT\(u3,0\) while .* or on their way",
    ),
    (
        "weights on disk",
        swap("all", unit(Kind.LOAD_WEIGHT, 4, 1), unit(Kind.UNSHARD, 4, 1)),
        r"UNSHARD\(u4,1\) without LOAD_WEIGHT\(u4,1\) before it",
    ),
    (
        "weights on disk",
        before("all", unit(Kind.LOAD_WEIGHT, 4, 1), unit(Kind.B, 4, 0)),
        r"LOAD_WEIGHT\(u4,1\) outside a pass of stage 0 with microbatch 1",
    ),
    (
        "weights on disk",
        lambda rows: rows["all"].insert(rows["all"].index(B(0, 1)), unit(Kind.LOAD_WEIGHT, 4, 1)),
        r"LOAD_WEIGHT\(u4\) without UNSHARD\(u4\) behind it in its pass",
    ),
    (
        "weights on disk",
        lambda rows: rows["all"].insert(1, unit(Kind.LOAD_WEIGHT, 1, 0)),
        r"LOAD_WEIGHT\(u1,0\) of a Unit whose shard lies on the device",
    ),
    ("halves", drop("pp 1", unit(Kind.W, 1, 0)), r"REDUCE\(u1,0\) before W\(u1,0\)"),
    ("halves", double("pp 1", unit(Kind.W, 1, 0)), "2 W of Unit 1 in microbatch 0; expected 1"),
    (
        "halves",
        before("pp 1", unit(Kind.REDUCE, 1, 0), unit(Kind.W, 1, 0)),
        r"REDUCE\(u1,0\) before W\(u1,0\)",
    ),
    (
        "halves",
        swap("pp 1", unit(Kind.W, 1, 0), unit(Kind.W, 1, 1)),
        r"W\(u1,1\) outside a pass of stage 1 with",
    ),
    (
        "halves",
        before("pp 1", unit(Kind.REDUCE, 0, 0), unit(Kind.I, 0, 0)),
        r"REDUCE\(u0,0\) before W\(u0,0\)",
    ),
    ("halves", drop("pp 1", unit(Kind.I, 2, 1)), r"W\(u2,1\) before I\(u2,1\)"),
    ("saved", drop("pp 0", unit(Kind.OFFLOAD, 1, 0)), r"no OFFLOAD\(u1\) before the end of F\(0,0\)"),
    ("saved", drop("pp 0", unit(Kind.OFFLOAD, 2, 1)), r"F\(u2,1\) before OFFLOAD\(u2\), while what 2 Units"),
    (
        "saved",
        double("pp 0", unit(Kind.OFFLOAD, 1, 0)),
        r"OFFLOAD\(u1,0\) though nothing that Unit 1 has saved",
    ),
    (
        "saved",
        before("pp 0", unit(Kind.OFFLOAD, 1, 0), unit(Kind.F, 1, 0)),
        r"OFFLOAD\(u1,0\) though nothing that Unit 1 has saved is on the device",
    ),
    ("saved", drop("pp 0", unit(Kind.RELOAD, 1, 1)), "0 RELOAD and 1 B of Unit 1 in microbatch 1"),
    ("saved", double("pp 0", unit(Kind.RELOAD, 1, 1)), r"RELOAD\(u1,1\) more often than F\(u1,1\)"),
    (
        "saved",
        swap("pp 0", unit(Kind.RELOAD, 2, 0), unit(Kind.B, 2, 0)),
        r"RELOAD\(u2,0\) behind B\(u2,0\), which needs it",
    ),
    (
        "saved",
        before("pp 0", unit(Kind.RELOAD, 2, 1), unit(Kind.B, 2, 0)),
        r"RELOAD\(u2,1\) outside a pass of stage 0 with microbatch 1",
    ),
    (
        "saved",
        swap("pp 0", unit(Kind.RELOAD, 1, 1), unit(Kind.F, 1, 1)),
        r"RELOAD\(u1,1\) inside F\(0,1\); expected inside B",
    ),
    ("pp", drop("pp 0", SEND(0, 1, 1)), r"rank 0 has F\(0,1\) without SEND\(0,1,1\) after it"),
    ("pp", double("pp 0", SEND(0, 1, 1)), r"rank 0 has SEND\(0,1,1\) twice"),
    ("pp", drop("pp 1", RECV(1, 0, 0)), r"rank 1 has F\(1,0\) without RECV\(1,0,0\) before it"),
    ("pp", double("pp 1", RECV(1, 0, 0)), r"rank 1 has RECV\(1,0,0\) twice"),
    ("pp", swap("pp 0", SEND(0, 0, 1), SEND(0, 1, 1)), r"SEND\(0,1,1\) without F\(0,1\) before it"),
    ("pp", drop("pp 1", B(1, 1)), r"SEND\(1,1,0\) without B\(1,1\) before it|microbatch 1 has F"),
    (
        "pp",
        before("pp 0", unit(Kind.F, 1, 1), B(0, 0)),
        r"F\(u1,1\) .*(not gathered|outside a pass|was sent)",
    ),
    ("interleaved", before("pp 0", unit(Kind.F, 3, 1), F(0, 1)), r"F\(u3,1\) outside a pass of stage 2"),
    ("step", drop("pp 0", unit(Kind.UNSHARD, 1)), r"F\(u1,0\) while its weights are not gathered"),
    ("step", drop("pp 0", unit(Kind.RESHARD, 1, 1)), "Unit 1 gathered to the end"),
    ("zero0", lambda rows: rows["all"].clear(), "0 stages on 1 ranks"),
    (
        "zero0",
        swap("all", unit(Kind.F, 0, 1), unit(Kind.F, 1, 1)),
        r"F\(u1,1\) before F\(u0,1\), inside of",
    ),
    (
        "zero0",
        swap("all", unit(Kind.B, 0, 1), unit(Kind.B, 4, 1)),
        r"B\(u4,1\) before B\(u0,1\), inside of",
    ),
    (
        "step",
        swap("pp 0", unit(Kind.F, 1, 0), SEND(0, 0, 1)),
        r"F\(u1,0\) after the result of F\(0,0\) was sent",
    ),
    ("tables", drop("all", unit(Kind.FETCH, 5, 0)), "0 FETCH of Unit 5 in microbatch 0; expected one"),
    ("tables", double("all", unit(Kind.FETCH, 6, 1)), "2 FETCH of Unit 6 in microbatch 1; expected one"),
    (
        "tables",
        before("all", unit(Kind.FETCH, 5, 1), unit(Kind.F, 0, 1)),
        r"FETCH\(u5,1\) before F\(u0,1\), inside of which",
    ),
    (
        "tables",
        before("all", unit(Kind.FETCH, 5, 1), unit(Kind.B, 0, 1)),
        r"FETCH\(u5,1\) inside B\(0,1\); expected inside F",
    ),
    ("tables", before("all", unit(Kind.FETCH, 5, 1), B(0, 0)), "outside a pass of stage 0 with microbatch 1"),
    ("tables", drop("all", unit(Kind.DELIVER, 5)), r"no DELIVER\(u5\) though the Unit's rows get gradients"),
    ("tables", double("all", unit(Kind.DELIVER, 6)), r"DELIVER\(u6\) twice"),
    ("tables", before("all", unit(Kind.DELIVER, 5), B(0, 1)), r"B\(0,1\) after DELIVER\(u5\)"),
    (
        "tables",
        before("all", unit(Kind.DELIVER, 5), unit(Kind.REDUCE, 0, 1)),
        r"REDUCE\(u0,1\) after DELIVER\(u5\)",
    ),
    ("tables", swap("all", unit(Kind.DELIVER, 6), NORM), r"DELIVER\(u6\) after NORM, which would leave out"),
    ("tables", drop("all", unit(Kind.STEP, 5)), r"no STEP\(u5\) though the Unit trains"),
    ("tables", double("all", unit(Kind.STEP, 6)), r"STEP\(u6\) twice"),
    ("tables", before("all", unit(Kind.STEP, 5), NORM), r"STEP\(u5\) before NORM"),
    ("tables", add("all", unit(Kind.FETCH, 1, 0)), r"FETCH\(u1,0\) of a Unit of parameters"),
    ("tables", add("all", unit(Kind.DELIVER, 1)), r"DELIVER\(u1\) of a Unit of parameters"),
    (
        "tables",
        lambda rows: rows["all"].insert(1, unit(Kind.INPUT_DIST, 5, 0)),
        r"INPUT_DIST\(u5,0\) in the list of a step",
    ),
    (
        "tables",
        lambda rows: rows["all"].insert(2, unit(Kind.F, 5, 0)),
        r"F\(u5,0\) of a Unit of embedding tables",
    ),
    ("tables tp", drop("all", SUM), "NORM before SUM"),
    ("tables tp", swap("all", unit(Kind.DELIVER, 6), SUM), r"DELIVER\(u6\) after SUM"),
    ("tables pp", drop("pp 1", unit(Kind.FETCH, 3, 1)), "pp 1 ranks have 0 FETCH of Unit 3 in microbatch 1"),
    (
        "tables pp",
        before("pp 0", unit(Kind.FETCH, 3, 0), F(0, 1)),
        r"FETCH\(u3,0\) after the result of F\(0,0\) was sent",
    ),
    ("tables pp", drop("pp 1", unit(Kind.DELIVER, 3)), r"pp 1 ranks have no DELIVER\(u3\)"),
]


@pytest.mark.parametrize(
    "name, broken, says", PLANTED, ids=[f"{i}-{each[0]}" for i, each in enumerate(PLANTED)]
)
def test_planted_faults(name: str, broken: Callable[[Rows], None], says: str) -> None:
    rows = row_of(good(name))
    broken(rows)
    with pytest.raises(PlanError, match=says):
        validate_plan(with_rows(good(name), rows), MICROBATCHES)


@pytest.mark.parametrize(
    "name",
    [
        "zero1",
        "zero3",
        "tp",
        "frozen",
        "step",
        "tables",
        "norms",
        "matrices",
        "fp8",
        "disk",
        "delayed",
        "weights on disk",
        "saved",
    ],
)
def test_no_action_may_be_left_out_or_doubled(name: str) -> None:
    """Of every list, all of its Actions."""
    whole = good(name)
    for key, row in row_of(whole).items():
        for i in range(len(row)):
            for kept in (row[:i] + row[i + 1 :], row[: i + 1] + row[i:]):
                with pytest.raises(PlanError):
                    validate_plan(with_rows(whole, row_of(whole) | {key: kept}), MICROBATCHES)


@pytest.mark.parametrize(
    "name",
    [
        "zero1",
        "zero3",
        "tp",
        "pp",
        "norms",
        "matrices",
        "disk",
        "delayed",
        "weights on disk",
        "saved",
        "tables",
    ],
)
def test_no_kind_may_be_left_out(name: str) -> None:
    """Of every list, all Actions of a Kind, of one Unit and of all Units."""
    whole = good(name)
    for key, row in row_of(whole).items():
        left_out = [[each for each in row if each.kind is not kind] for kind in {each.kind for each in row}]
        pairs = {each[:2] for each in row if each.unit >= 0}
        left_out += [[each for each in row if each[:2] != pair] for pair in pairs]
        for kept in left_out:
            with pytest.raises(PlanError):
                validate_plan(with_rows(whole, row_of(whole) | {key: kept}), MICROBATCHES)


# What the validator lets pass ----------------------------------------------------------------------------------------

UNSEEN = {
    "blocks in another order": ("zero0", swap("all", unit(Kind.F, 1, 0), unit(Kind.F, 2, 0))),
    "reductions in another order": ("zero2", later("all", 1, 1, unit(Kind.ARRIVE, 0, 1))),
    "a reduction that waits": ("zero2", later("all", 4, 0, unit(Kind.B, 3, 0))),
    "steps in another order": ("zero0", swap("all", STEP0, STEP1)),
    "a gather ahead": ("zero3", swap("all", unit(Kind.F, 0, 0), unit(Kind.UNSHARD, 1, 0))),
    "a gather before the release": ("zero3", swap("all", unit(Kind.RESHARD, 1, 0), unit(Kind.UNSHARD, 2, 0))),
    "what was saved comes earlier": ("saved", swap("pp 0", unit(Kind.B, 0, 0), unit(Kind.RELOAD, 2, 0))),
    "rows that wait for a block": ("tables", swap("all", unit(Kind.FETCH, 5, 0), unit(Kind.F, 1, 0))),
    "a message that waits for a reduction": ("pp", later("pp 0", 0, 0, RECV(0, 1, 1))),
}
"""Other lists that make the same numbers: what ran differs from them, which the trace shows."""


@pytest.mark.parametrize("what", UNSEEN)
def test_lists_that_are_as_good(what: str) -> None:
    """Where one of these is refused some day, it belongs to the faults above."""
    name, broken = UNSEEN[what]
    rows = row_of(good(name))
    broken(rows)
    validate_plan(with_rows(good(name), rows), MICROBATCHES)


# Registry ------------------------------------------------------------------------------------------------------------


# Tables --------------------------------------------------------------------------------------------------------------


def with_registered_tables(name: str, tables: Mapping[str, int]) -> Plan:
    """``tables``: the stage of each."""
    whole = good(name)
    registry = registered(whole, "table", "").registry
    for table, stage in tables.items():
        for label in ("", "momentum"):
            registry.add(TensorInfo(table, (9, 4), torch.float32, "table", label=label, stages=(stage,)))
    return replace(whole, registry=registry)


TABLES = {"tables": {"users.a": 0, "users.b": 0, "blocks.2.items.c": 0}}
TABLES["tables pp"] = TABLES["tables"] | {"blocks.2.items.c": 1}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_no_unit_has(name: str) -> None:
    """The Unit is gone with all its Actions, so that nothing is missing in the list; or it never was there."""
    whole = with_registered_tables(name, TABLES[name])
    validate_plan(whole, MICROBATCHES)
    for key, each in whole.classes.items():
        last = len(each.units) - 1
        fewer = replace(
            each,
            units=each.units[:-1],
            unit_stages=each.unit_stages[:-1],
            strategies=each.strategies[:-1],
            actions=tuple(action for action in each.actions if action.unit != last),
        )
        with pytest.raises(PlanError, match="table '(users.a|blocks.2.items.c)' is in 0 Units on stage"):
            validate_plan(replace(whole, classes={**whole.classes, key: fewer}), MICROBATCHES)
    with pytest.raises(PlanError, match="table 'ads.a' is in 0 Units on stage 0"):
        validate_plan(with_registered_tables(name, TABLES[name] | {"ads.a": 0}), MICROBATCHES)
    with pytest.raises(PlanError, match="Unit blocks.2.items on stage . has rows of no table"):
        validate_plan(with_registered_tables(name, {"users.a": 0}), MICROBATCHES)


def test_a_table_on_another_stage_than_its_unit() -> None:
    with pytest.raises(PlanError, match="table 'users.a' is in 0 Units on stage 1"):
        validate_plan(with_registered_tables("tables pp", TABLES["tables pp"] | {"users.a": 1}), MICROBATCHES)


def test_an_update_that_needs_a_matrix_gets_one() -> None:
    with pytest.raises(
        PlanError, match=r"'blocks.0.norm.weight' has the shape \[16\], but its rule updates matrices"
    ):
        plan(Mesh(dp_shard=2), updates=[UpdateRule(("b",), "matrix")], group_of=lambda name: 0)


def test_bytes_and_moments_are_those_of_each_group() -> None:
    whole = good("matrices")
    kept = {(info.name, info.label) for info in whole.registry.of_kind("moment")}
    assert {label for name, label in kept if name == QKV} == {"momentum_buffer"}
    assert {label for name, label in kept if name == "norm.weight"} == {"exp_avg", "exp_avg_sq"}
    kinds = [[row.kind for row in whole.own.buffers[1, place]] for place in (0, 1)]
    assert sorted(kinds) == [
        ["weight", "grad", "exp_avg", "exp_avg_sq"],
        ["weight", "grad", "momentum_buffer"],
    ]
    assert " ".join(map(str, whole.actions["all"])).endswith(
        "NORM DIRECTION(u1) DIRECTION(u2) DIRECTION(u3) DIRECTION(u4) ALL_TO_ALL STEP(u0) UNSHARD(u0) "
        "STEP(u1) UNSHARD(u1) STEP(u2) "
        "UNSHARD(u2) STEP(u3) UNSHARD(u3) STEP(u4) UNSHARD(u4)"
    )
