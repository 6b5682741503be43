"""``train --check`` says what the ranks would hold without starting one, and refuses what the run would refuse."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import shardwise
from shardwise.cli.main import main
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.step.end import StepResult
from shardwise.models import GptPolicy
from shardwise.models import build as build_model
from shardwise.plan.action import Kind

MODEL = {"layers": 4, "width": 32, "heads": 4, "context": 16, "vocab": 50}
MESHES: list[dict[str, Any]] = [
    *({"mesh": {"dp": 2}, "zero": {"stage": stage}} for stage in (0, 1, 2, 3)),
    {"mesh": {"tp": 2}, "precision": "bf16"},
    {"mesh": {"pp": 2}, "zero": {"stage": 1}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
    {"optimizer": {"type": "sgd", "momentum": 0.9}},
]


def gpt() -> nn.Module:
    with torch.device("meta"):
        return build_model(GptPolicy(**MODEL))


def sparse() -> nn.Module:
    with torch.device("meta"):
        return build_model(GptPolicy.model_validate(MODEL | {"experts": {"count": 4, "first": 2}}))


def held(world: World, given: dict[str, Any], make: Callable[[], nn.Module] = gpt) -> dict[str, int]:
    """What a rank really holds, by the buffers of its engine's Plan."""
    engine = shardwise.initialize(make(), given, world=world)
    found = engine.plan.bytes_per_rank()
    engine.close()
    return found


@pytest.mark.parametrize("given", MESHES, ids=str)
def test_what_is_foreseen_is_what_the_ranks_hold(ranks: Any, given: dict[str, Any]) -> None:
    given = given | {"batch": {"global_size": 8, "micro_size": 2}}
    config = RunConfig.parse(given)
    plan = foresee(gpt, config, 2, torch.device("cpu")).plan
    real = ranks(2).run(held, given)
    each = [plan.bytes_per_rank(rank) for rank in plan.mesh.ranks("pp", 0)]
    assert each == real[:: 2 // len(each)]


def test_experts_are_foreseen(ranks: Any) -> None:
    given = {"mesh": {"ep": 2}, "zero": {"stage": 3}, "batch": {"global_size": 8, "micro_size": 2}}
    plan = foresee(sparse, RunConfig.parse(given), 2, torch.device("cpu")).plan
    assert [plan.bytes_per_rank(0)] * 2 == ranks(2).run(held, given, sparse)
    model = {"name": "gpt", "experts": {"count": 4, "first": 2}} | MODEL
    told = foresee(sparse, RunConfig.parse(given | {"model": model}), 2, torch.device("cpu")).plan
    assert told.tokens == 8 * 16 and plan.tokens is None
    assert "blocks.2.mlp .. blocks.3.mlp, each: 2 of 4 over ep=2" in str(told)


def test_tables_are_counted_on_the_rank_that_holds_most(ranks: Any) -> None:
    config = RunConfig.parse({"batch": {"global_size": 8}})
    outlook = foresee(table_model, config, 2, torch.device("cpu"))
    assert outlook.bytes_per_rank()["tables"] == max(ranks(2).run(held_by_tables))
    (table,) = outlook.plan.own.tables
    did = [action.kind for action in outlook.plan.own.actions if action.unit == table.index]
    assert did == [Kind.FETCH, Kind.DELIVER, Kind.STEP]


def table_model() -> nn.Module:
    """One table by rows, one by columns, one as a copy."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = shardwise.EmbeddingCollection(
                [
                    shardwise.TablePolicy(name="a", rows=2048, width=8, placement="row"),
                    shardwise.TablePolicy(name="b", rows=64, width=8, placement="column"),
                    shardwise.TablePolicy(name="c", rows=4, width=8, placement="data_parallel"),
                ],
                optimizer=shardwise.RowOptimizerPolicy(type="adagrad"),
            )
            self.head = nn.Linear(8, 1)

    return Model()


def held_by_tables(world: World) -> int:
    """Bytes of tables on this rank."""
    engine = shardwise.initialize(table_model(), {"batch": {"global_size": 8}}, world=world)
    found = sum(collection.bytes_here for collection in engine.tables.values())
    engine.close()
    return found


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    given = {
        "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 8},
        "data": {"source": str(tmp_path / "text.txt")},
        "batch": {"global_size": 4},
        "train": {"steps": 1},
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def test_a_check_starts_nothing_and_answers_in_json(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(config), "--ranks", "4", "--set", "mesh.pp=2", "--check"]
    assert call(monkeypatch, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 4 and found["samples"] > 100 and found["start"] == "afresh"
    assert found["config"]["batch"]["accumulation"] == 1 and found["bytes_per_rank"]["weights"] > 0
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "Plan over pp=2 × dp=2" in said and "pp 1: stages 1" in said and "on a rank" in said
    assert {path.name for path in (config.parent / "run").iterdir()} == {"cache"}, "no rank was started"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("zero.stag=3", "did you mean 'stage'?"),
        ("batch.global_size=5", "does not divide"),
        ("data.source=/no/such/file", "/no/such/file"),
        ("mesh.tp=4", "do not divide over tp=4"),
        ("mesh.pp=4", "2 blocks cannot make 4 stages"),
        (
            "optimizer.groups=[{match: '*nrom*'}]",
            "optimizer.groups: group 0 matches no parameter; the model's are",
        ),
        (
            "optimizer.groups=[{match: '*'}, {match: '*norm*'}]",
            "group 1 matches only parameters of groups before it",
        ),
        ("precision.keep_fp32=[haed]", "precision.keep_fp32: pattern 'haed' matches no parameter"),
        (
            "zero={stage: 3, forward_methods: [nothing.encode]}",
            "zero.forward_methods: 'nothing.encode' names no method of a Unit",
        ),
        ("init_from=/no/such/file", "init_from: /no/such/file is neither a file nor a folder"),
        ("offload={optimizer: disk, disk_path: /no/such}", "offload.disk_path: /no/such does not exist"),
    ],
)
def test_a_check_refuses_what_the_run_would_refuse(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    sentence: str,
) -> None:
    code = call(monkeypatch, "train", str(config), "--ranks", "4", "--check", "--set", override)
    assert code in (1, 2)
    assert sentence in capsys.readouterr().err


def test_the_folders_of_tables_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "model": {"name": "deepfm", "width": 4, "hidden": [8]},
        "data": {
            "synthetic": {"samples": 400, "validation_samples": 150, "tables": 3, "rows": 40, "dense": 2}
        },
        "tables": {"defaults": {"tiers": {"host_rows": 30, "disk": "/no/such"}}},
        "batch": {"global_size": 8},
        "train": {"steps": 2},
    }
    file = tmp_path / "clicks.yaml"
    file.write_text(yaml.safe_dump(given))
    assert call(monkeypatch, "train", str(file), "--check") in (1, 2)
    assert "tables.defaults.tiers.disk: /no/such does not exist" in capsys.readouterr().err


def test_json_without_a_check_is_answered(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "train", str(config), "--json") == 2
    assert "--check" in capsys.readouterr().err


def test_a_check_says_what_makes_a_run_fit(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(config), "--check", "--memory"]
    assert call(monkeypatch, *words, "64GiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["classes"][0]["memory"]["rows"]["kept"] > 0 and not found["changes"]
    assert call(monkeypatch, *words, "1MiB") == 2, "so that a script can ask"
    said = capsys.readouterr()
    assert "missing" in said.out and "nothing known makes it fit" in said.out and not said.err
    assert call(monkeypatch, *words, "lots") == 2
    assert "memory: 'lots' of device is no size" in capsys.readouterr().err
    assert call(monkeypatch, "train", str(config), "--memory", "1GiB") == 2
    assert "--memory goes with --check" in capsys.readouterr().err


def test_the_note_on_units_counts_repeated_blocks() -> None:
    plan = foresee(gpt, RunConfig.parse({"batch": {"global_size": 8}}), 1, torch.device("cpu")).plan
    (note,) = (each for each in plan.notes if "became Units" in each)
    assert note.startswith("4 repeated blocks and ")


def test_a_result_prints_as_a_line() -> None:
    result = StepResult(128, 1.18044, 0.25, 1e-3, 32.0, False)
    assert f"{result}" == "step 128  loss 1.1804  grad norm 0.25  lr 0.001"
    assert str(result._replace(skipped=True, skipped_steps=2)).endswith("skipped (2 so far)")
    assert repr(result).startswith("StepResult(step=128")
