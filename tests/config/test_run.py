"""Configuration files: unknown keys, wrong types, keys given twice, overrides."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.base.errors import ConfigError
from shardwise.config.run import RunConfig, load, read_file
from shardwise.optim.policy import OptimizerPolicy
from shardwise.parallel.zero.policy import ZeroPolicy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zeroo": {}}, r"^config: unknown key 'zeroo'; did you mean 'zero'"),
        ({"zero": {"stge": 1}}, "zero: unknown key 'stge'; did you mean 'stage'"),
        (
            {"precision": {"loss_scale": {"init_scal": 1}}},
            "precision.loss_scale: unknown key 'init_scal'.*'init_scale'",
        ),
        ({"mesh": {"dp": {"replicat": 1}}}, "unknown key 'replicat'; did you mean 'replicate'"),
        ({"zero": {"stage": 4}}, r"zero.stage: .*0, 1, 2 or 3.*given 4"),
        ({"zero": {"stage": "three"}}, "zero.stage: .*given 'three'"),
        ({"zero": 3}, "zero: "),
        ({"batch": {"global_size": 0}}, "batch.global_size: .*greater than 0.*given 0"),
        ({"batch": {"global_size": 2.5}}, "batch.global_size"),
        ({"max_grad_norm": -1}, "max_grad_norm: .*greater than 0"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: .*given 'fast'"),
        ({"compile": "everything"}, "compile.scope"),
        ({"train": {"steps": 0}}, "train.steps"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(given)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"zero": {"stge": 1}, "batch": {"globl_size": 8}})
    assert "stge" in str(caught.value) and "globl_size" in str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "zero: {stage: 2}\nprecision: bf16\n"),
        ("a.json", '{"zero": {"stage": 2}, "precision": "bf16"}'),
        ("a.jsonc", '{\n  // half the memory\n  "zero": {"stage": 2},\n  "precision": "bf16",\n}'),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    config = load(write(tmp_path, name, text))
    assert config.zero.stage == 2 and config.precision.compute == "bf16"
    assert load(str(tmp_path / name)) == config


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "a.yaml", "")) == RunConfig()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "zero: {stage: 1}\nzero: {stage: 2}\n", "key 'zero' is given twice"),
        ("a.yaml", "zero:\n  stage: 1\n  stage: 2\n", "key 'stage' is given twice"),
        ("a.json", '{"max_grad_norm": 1, "max_grad_norm": 2}', "does not parse.*max_grad_norm"),
        ("a.yaml", "zero: [stage\n", "does not parse"),
        ("a.json", "{", "does not parse"),
        ("a.yaml", "- 1\n- 2\n", "holds a list; expected keys and values"),
        ("a.yaml", "zero: !!python/object/apply:os.system ['true']\n", "does not parse"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, name, text))
    assert name in str(caught.value), "the file is named"


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere.yaml"):
        read_file(Path("nowhere.yaml"))


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "{[1]: 2}\n", "? {a: 1}\n: 2\n", "1: 2\n", "\x00"])
def test_strange_yaml_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(write(tmp_path, "a.yaml", text))


def test_overrides() -> None:
    config = load(
        {"zero": {"stage": 1}},
        ["zero.stage=3", "optimizer.betas=[0.8, 0.9]", "max_grad_norm=0.5", "output_dir=x=y"],
    )
    assert config.zero.stage == 3
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.max_grad_norm == 0.5 and config.output_dir == "x=y"
    assert load({"precision": "bf16"}, ["precision.grad=bf16"]).precision.compute == "bf16"
    assert load({}, ["precision=fp16"]).precision.compute == "fp16"
    assert load(RunConfig(max_grad_norm=1.0), ["zero.stage=2"]).max_grad_norm == 1.0
    assert load({"max_grad_norm": 1.0}, ["max_grad_norm=null"]).max_grad_norm is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("zero.stage", "expected key=value, as in zero.stage=3"),
        ("=3", "expected key=value"),
        ("zero.stge=3", "unknown key 'stge'; did you mean 'stage'"),
        ("max_grad_norm.max=1", "'max_grad_norm' is 1.0, which has no keys of its own"),
        ("zero=[", "the value does not parse"),
        ("zero..stage=3", "zero"),
    ],
)
def test_overrides_that_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"max_grad_norm": 1.0}, [override])


def test_an_override_does_not_reach_into_what_was_given() -> None:
    given = {"zero": {"stage": 1}}
    load(given, ["zero.stage=3"])
    assert given == {"zero": {"stage": 1}}


def test_policies_inside_a_dictionary() -> None:
    config = load({"zero": ZeroPolicy(stage=2), "optimizer": OptimizerPolicy(lr=0.5)})
    assert config.zero.stage == 2 and config.optimizer.lr == 0.5


def test_yaml_and_back(tmp_path: Path) -> None:
    config = load({"zero": {"stage": 2}, "precision": "bf16", "optimizer": {"groups": [{"match": "*b"}]}})
    path = write(tmp_path, "a.yaml", config.to_yaml())
    assert load(path) == config
    assert yaml.safe_load(config.to_yaml())["zero"]["stage"] == 2


def test_all_unknown_keys_are_named_at_once_with_what_else_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(
            {
                "max_iters": 5,
                "learning_rate": 1e-3,
                "train": {"eval_interval": 2, "stepz": 3, "seed": "x"},
                "zero": {"stage": 7, "stag": 1},
            }
        )
    said = str(caught.value)
    for part in (
        "'max_iters'; here it is train.steps",
        "'learning_rate'; here it is optimizer.lr",
        "train: unknown key 'eval_interval'; here it is train.eval_every",
        "train: unknown key 'stepz'; did you mean 'steps'?",
        "train.seed: ",
        "zero: unknown key 'stag'; did you mean 'stage'?",
        "zero.stage: ",
    ):
        assert part in said, part
