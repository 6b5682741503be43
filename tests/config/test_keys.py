"""Keys of the configuration as a table: each with its sentence, found by its name."""

import json
from pathlib import Path

import pytest
import yaml

import shardwise
from shardwise.config import keys
from shardwise.config.run import RunConfig

ROOT = Path(__file__).parent.parent.parent


FOLDER = ROOT / "docs" / "reference"


def test_every_key_has_a_sentence_and_a_line() -> None:
    page = (FOLDER / "configuration.md").read_text(encoding="utf-8")
    for key in keys.all_keys():
        assert key.sentence, f"{key.path} has no docstring"
        assert f"| `{key.path.rpartition('.')[2]}` |" in page, key.path


def test_keys_are_those_of_the_schema() -> None:
    """Two walks over the policies, ours and pydantic's, find the same keys in the same blocks."""
    definitions = RunConfig.model_json_schema()["$defs"]
    found: dict[str, set[str]] = {}
    for key in keys.all_keys():
        found.setdefault(key.owner.__name__, set()).add(key.path.rpartition(".")[2])
    assert set(found) - {"RunConfig"} == {name for name, part in definitions.items() if "properties" in part}
    for name, names in found.items():
        part = definitions[name] if name != "RunConfig" else RunConfig.model_json_schema()
        assert names == set(part["properties"]), name


def test_one_key_is_found_with_its_block_and_a_wrong_one_is_answered() -> None:
    assert [key.path for key in keys.find("zero.stage")] == ["zero.stage"]
    assert [key.path for key in keys.find("tables.named.C9.rows")] == ["tables.named.NAME.rows"]
    assert {"optimizer", "optimizer.lr", "optimizer.groups[].match"} <= {
        k.path for k in keys.find("optimizer")
    }
    with pytest.raises(shardwise.ShardwiseError, match="did you mean 'zero.stage'"):
        keys.find("stage")
    with pytest.raises(shardwise.ShardwiseError, match="prints them all"):
        keys.find("xyzzy")


def test_numbers_read_back_as_numbers() -> None:
    """YAML takes 1e-08 for text."""
    for value in (1e-8, 1e-05, 0.1, 65536.0, 1e300, -2.5, 3, (0.9, 0.999), "1e-8", "none", True):
        back = yaml.safe_load(keys.as_yaml(value))
        assert (
            back == (list(value) if isinstance(value, tuple) else value)
            and type(back) is not str
            or value == back
        )


def test_keys_as_json() -> None:
    (found,) = json.loads(keys.as_json(keys.find("comm.join_timeout_s")))
    assert found["type"] == "number > 0" and found["unit"] == "seconds" and found["default"] == 60.0
