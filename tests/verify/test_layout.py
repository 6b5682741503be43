"""A layout in words becomes values of a configuration, and what is impossible is refused by the existing rules."""

import pytest

from shardwise.base.errors import ConfigError, MeshError
from shardwise.config.auto import resolve
from shardwise.config.run import load
from shardwise.plan.mesh import Mesh
from shardwise.verify.layout import VerifiedLayout, layout_of, parse_layout, with_layout


def test_every_word_sets_its_key() -> None:
    layout = parse_layout("pp=2, tp=2,dp=2x4,zero=3,ep=4,etp=2,virtual=2,recompute=full")
    assert layout.ranks == 32 and layout.stages == 4
    config = with_layout({"zero": {"stage": 1, "debug": True}}, layout)
    assert config.mesh.mesh(32) == Mesh(pp=2, dp_replicate=2, dp_shard=4, tp=2, ep=4, etp=2)
    assert (config.zero.stage, config.zero.debug) == (3, True)
    assert (config.pipeline.schedule, config.pipeline.virtual_stages) == ("interleaved_1f1b", 2)
    assert config.recompute.scope == "full"


def test_sizes_that_are_left_out_are_one_and_techniques_stay() -> None:
    own = {
        "mesh": {"pp": 4, "dp": 8, "tp": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        "zero": {"stage": 2},
        "recompute": "selective",
    }
    config = with_layout(own, parse_layout("tp=2"))
    assert config.mesh.mesh(2) == Mesh(tp=2)
    assert (config.pipeline.schedule, config.pipeline.virtual_stages) == ("1f1b", 1)
    assert (config.zero.stage, config.recompute.scope) == (2, "selective")


@pytest.mark.parametrize("text", ["pp=2,dp=2x3,tp=4,zero=3", "dp=4,ep=2,zero=0", "pp=2,virtual=3", "dp=1"])
def test_a_layout_as_text_reads_as_itself(text: str) -> None:
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pq=2", "unknown word 'pq'; known here: cp, dp, ep"),
        ("zro=2", "did you mean 'zero'"),
        ("tp", "expected word=value between commas, found 'tp'"),
        ("tp=", "expected word=value"),
        ("tp=2,tp=4", "tp is given twice, as 2 and 4"),
        ("tp=0", "tp is '0'; expected a whole number of at least 1"),
        ("dp=2x2x2", "dp is '2x2'"),
        ("dp=2x", "replicate x shard"),
        ("dp=-1", "dp is '-1'"),
        ("zero=4", "zero is '4'; expected one of 0, 1, 2, 3"),
        ("recompute=ful", "did you mean 'full'"),
        ("virtual=1.5", "virtual is '1.5'"),
    ],
)
def test_a_word_or_value_that_is_not_known_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text)
    assert sentence in str(caught.value) and repr(text) in str(caught.value)


def test_impossible_layouts_meet_the_existing_rules() -> None:
    with pytest.raises(MeshError, match="ep=3 .* does not divide the 2 ranks"):
        parse_layout("dp=2,ep=3")
    with pytest.raises(ConfigError, match="virtual_stages 2 deals several stages .* mesh.pp is 1"):
        with_layout({}, parse_layout("virtual=2"))
    assert parse_layout("dp=2,cp=2").mesh == Mesh(dp_shard=4, cp=2)
    assert str(parse_layout("dp=2,cp=2")) == "dp=2,cp=2"
    assert with_layout({}, parse_layout("dp=2,cp=2")).mesh.mesh(4) == Mesh(dp_shard=4, cp=2)
    with pytest.raises(ConfigError, match="batch_norm"):
        with_layout({"batch_norm": "synchronized"}, parse_layout("pp=2"))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({}, Mesh(dp_shard=2)),
        ({"tp": 2, "ep": 4}, Mesh(dp_shard=2, tp=2, ep=4)),
        ({"ep": 3}, Mesh(dp_shard=3, ep=3)),
        ({"dp": {"replicate": "auto", "shard": 4}}, Mesh(dp_replicate=2, dp_shard=4)),
        ({"pp": 2, "dp": 3}, Mesh(pp=2, dp_shard=3)),
    ],
)
def test_the_layout_of_a_configuration(mesh: dict[str, object], expected: Mesh) -> None:
    layout = layout_of(load({"mesh": mesh, "zero": {"stage": 1}}))
    assert (layout.mesh, layout.zero_stage) == (expected, 1)
    assert layout_of(load({"mesh": {"tp": 2}}), ranks=8).mesh == Mesh(dp_shard=4, tp=2)


def test_a_configuration_with_its_own_layout_stays_the_same() -> None:
    own = load({"mesh": {"pp": 2, "dp": 2}, "zero": {"stage": 2}, "recompute": {"scope": "full"}})
    changed = with_layout(own, layout_of(own))
    assert resolve(changed, 4, "cpu") == resolve(own, 4, "cpu")
    assert with_layout({}, VerifiedLayout()).mesh.mesh(1) == Mesh()
