"""``shardwise config``: one key, a block, or all of them, in the forms that it prints."""

import json

import pytest
import yaml

from shardwise.base.errors import UsageError
from shardwise.cli.config import command
from shardwise.config.keys import all_keys, find
from shardwise.config.run import RunConfig


def test_a_key_is_printed_with_its_default_and_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    command("zero.stage")
    head, *sentence = capsys.readouterr().out.splitlines()
    assert head.startswith("zero.stage: 0  one of 0, 1, 2, 3")
    said = find("zero.stage")[0].sentence.replace("`", "")
    assert " ".join(" ".join(sentence).split()) == " ".join(said.split())


def test_a_block_is_all_of_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    command("zero", as_json=True)
    paths = [row["key"] for row in json.loads(capsys.readouterr().out)]
    assert "zero.stage" in paths and all(path.startswith("zero") for path in paths)


def test_all_keys_start_a_run_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    command(as_yaml=True)
    assert RunConfig.parse(yaml.safe_load(capsys.readouterr().out)).zero == RunConfig.parse({}).zero


def test_all_keys_as_json_and_as_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    command(as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == len(all_keys())
    command(as_schema=True)
    assert "zero" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize("forms", [{"as_yaml": True, "as_json": True}, {"key": "zero", "as_schema": True}])
def test_forms_that_exclude_each_other(forms: dict) -> None:
    with pytest.raises(UsageError, match="KEY goes with --json or alone"):
        command(**forms)
