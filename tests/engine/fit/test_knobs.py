"""The table of knobs gives values that the rules allow, and overrides that set them."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.knobs import (
    KNOBS,
    Copies,
    KnobScope,
    RecomputeChoice,
    assignments,
    data_ranks,
    divisors,
    freed,
    knob_of,
    overrides_of,
)

GIVEN: dict[str, Any] = {"batch": {"global_size": 4, "micro_size": 2}}


def scope_of(given: dict[str, Any], **more: Any) -> KnobScope:
    facts = {"ranks": 8, "per_host": 4, "global_size": 8, "micro_size": 2, "blocks": 4, "experts": 0}
    return KnobScope(load(given), **{**facts, "has_tables": False, "is_cpu": True, **more})


def test_axes_of_the_model_leave_samples_and_ranks_as_they_are() -> None:
    scope = scope_of(GIVEN)
    keys = frozenset({"mesh.pp", "mesh.tp", "batch.micro_size", "zero.stage", "mesh.dp", "pipeline.schedule"})
    seen = set()
    for shape in assignments(scope, "shape", {}, keys):
        for chosen in assignments(scope, "state", shape, keys):
            dp = data_ranks(scope, chosen)
            copies: Copies = chosen["mesh.dp"]
            assert copies.replicate * copies.shard == dp and dp * chosen["mesh.pp"] * chosen["mesh.tp"] == 8
            seen.add((chosen["mesh.pp"], chosen["mesh.tp"], copies, chosen["pipeline.schedule"]))
    assert (1, 1, Copies(2, 4), "1f1b") in seen and (4, 2, Copies(1, 1), "gpipe") in seen


def test_every_value_is_set_by_its_overrides() -> None:
    """What the overrides make of the configuration are the values that were chosen."""
    scope = scope_of({"batch": {"global_size": 8, "micro_size": 2}}, ranks=4)
    keys = frozenset({"recompute", "tiles.mlp", "zero.stage", "mesh.dp", "batch.micro_size"})
    for shape in assignments(scope, "shape", {}, keys):
        for chosen in assignments(scope, "state", shape, keys):
            config: RunConfig = load(scope.given, overrides_of(scope, chosen))
            assert config.zero.stage == chosen["zero.stage"] and config.tiles.mlp == chosen["tiles.mlp"]
            mesh = config.mesh.mesh(4)
            assert Copies(mesh.dp_replicate, mesh.dp_shard) == chosen["mesh.dp"]
            now = config.recompute
            assert RecomputeChoice(now.scope, now.select, now.blocks) == chosen["recompute"]
            batch = config.batch.derived(mesh.size("dp"))
            assert (batch.micro_size, batch.global_size) == (chosen["batch.micro_size"], 8)


def test_the_configuration_itself_needs_no_override() -> None:
    scope = scope_of({"batch": {"global_size": 8, "micro_size": 2}, "mesh": {"tp": 2}, "recompute": "full"})
    [shape] = assignments(scope, "shape", {}, ())
    [chosen] = assignments(scope, "state", shape, ())
    assert overrides_of(scope, chosen) == () and chosen["mesh.dp"] == Copies(1, 4)


def test_keys_that_change_numbers_are_freed_by_name_or_block() -> None:
    assert freed(["precision"]) == {"precision.compute", "precision.reduce"}
    assert freed(["batch.global_size"]) == {"batch.global_size"} and freed([]) == frozenset()
    with pytest.raises(ConfigError, match="'zero.stage' changes no numbers"):
        freed(["zero.stage"])
    with pytest.raises(ConfigError, match="did you mean 'tiles.mlp'"):
        knob_of("tiles.ml")


def test_two_levels_are_tried_where_ranks_lie_on_several_hosts() -> None:
    chosen = {"zero.stage": 1, "mesh.dp": Copies(1, 8)}
    exchange = knob_of("zero.exchange")
    assert exchange.values(scope_of(GIVEN), chosen) == ["auto", "sum", "all_to_all"]
    assert "two_level" in exchange.values(scope_of(GIVEN, hosts=2), chosen)
    assert not exchange.values(scope_of(GIVEN, hosts=2), {**chosen, "zero.stage": 0})


def test_tables_are_placed_one_by_one_from_the_planners_choice() -> None:
    """All combinations of few tables; of many, those in which all tables, or one, lie elsewhere than they are put."""
    placement = knob_of("tables.placement")
    few = placement.values(scope_of(GIVEN, has_tables=True, tables=("a", "b")), {})
    assert few[0] == {} and len(few) == 5**2 and {"a": "row", "b": "table"} in few
    many = placement.values(scope_of(GIVEN, has_tables=True, tables=tuple("abcdefgh")), {})
    assert many[0] == {} and len(many) == 1 + 4 + 8 * 4
    given = GIVEN | {"tables": {"placement": {"a": "row", "*": "column"}}}
    [first, *others] = placement.values(scope_of(given, has_tables=True, tables=("a", "b")), {})
    assert first == {"a": "row", "*": "column"}
    assert [*first] == ["a", "*"] and {"*": "column", "a": "table"} in others
    assert placement.overrides(scope_of(GIVEN), {"tables.placement": {"a": "row"}}) == (
        'tables.placement={"a": "row"}',
    )
    assert load(GIVEN, ['tables.placement={"a": "row"}']).tables.placement == {"a": "row"}


def test_delayed_updates_are_tried_if_they_are_freed() -> None:
    step, moved = knob_of("offload.step"), {"offload.optimizer": "host"}
    assert step.values(scope_of(GIVEN), moved) == ["before_use", "at_end"]
    assert "delayed" in step.values(scope_of(GIVEN, freed=freed(["offload.step"])), moved)
    assert not step.values(scope_of(GIVEN), {"offload.optimizer": "device"})


def test_rows_travel_in_blocks_where_a_capacity_bounds_them() -> None:
    exchange = knob_of("experts.exchange")
    assert not exchange.values(scope_of(GIVEN), {"experts.rows": None})
    assert "blocks" in exchange.values(scope_of(GIVEN, is_capped=True), {"experts.rows": None})
    assert not exchange.values(scope_of(GIVEN, is_capped=True), {"experts.rows": 64})


def test_every_key_of_a_layout_is_a_knob() -> None:
    wanted = """mesh.pp mesh.tp mesh.ep mesh.etp mesh.dp zero.stage zero.reduce zero.exchange batch.micro_size
        pipeline.schedule pipeline.virtual_stages recompute tiles.logits tiles.mlp experts.rows experts.exchange
        offload.optimizer offload.parameters offload.activations offload.fraction offload.step tables.placement"""
    assert {*wanted.split()} <= {knob.key for knob in KNOBS}


def test_every_knob_says_what_it_changes() -> None:
    keys = [knob.key for knob in KNOBS]
    assert len(keys) == len(set(keys)) and all({"memory", "time"} <= knob.changes for knob in KNOBS)
    assert {knob.key for knob in KNOBS if knob.order} == {
        "batch.micro_size",
        "experts.rows",
        "offload.fraction",
    }
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(12, 4) == [1, 2, 3, 4]
