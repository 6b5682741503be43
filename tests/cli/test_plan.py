"""``shardwise plan`` says what a job needs, how long it takes and why, in text and JSON, without data or ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.hardware_files import find_hardware, write_hardware
from shardwise.cli.main import main
from shardwise.cli.outlook import hardware_tables
from shardwise.cli.outlook.outcome import outcome_of, write_outcome
from shardwise.engine.fit.foresee import read
from shardwise.simulate.refit import scaled

MODEL = {"name": "gpt", "layers": 3, "width": 32, "heads": 4, "context": 16, "vocab": 256}
GIVEN: dict[str, Any] = {
    "model": MODEL,
    "data": {"source": "no_such_file.txt"},
    "batch": {"global_size": 8, "micro_size": 2},
    "train": {"steps": 20},
}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GIVEN))
    return str(path)


def report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a plan."""
    code = call(monkeypatch, "plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_json_has_every_part(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--ranks", "4", "--device", "a100-80gb", "--set", "mesh.tp=2", "--set", "zero.stage=2", "--why")
    code, found = report(monkeypatch, capsys, config, *given)
    assert code == 0 and found["fits"] and found["margin_bytes"] > 0
    assert found["ranks"] == 4 and found["mesh"]["tp"] == 2 and found["device"] == "a100-80gb"
    (ranks,) = found["classes"]
    memory = ranks["memory"]
    assert ranks["ranks"] == 4 and memory["peak_bytes"] == max(
        memory["phases"][name] for name in ("build", "first step", "step", "evaluation", "save", "load")
    )
    assert sum(memory["peak"]["rows"].values()) == memory["peak_bytes"]
    axes = {row["axis"] for row in ranks["sent"]}
    assert any(axis.startswith("tp") for axis in axes) and any(axis.startswith("dp") for axis in axes)
    by_row: dict[str, int] = {}
    for reason in found["why"]:
        by_row[reason["row"]] = by_row.get(reason["row"], 0) + reason["bytes"]
    assert any(reason["removed_by"] and reason["saves_bytes"] > 0 for reason in found["why"])
    assert by_row == {row: size for row, size in memory["peak"]["rows"].items() if size}
    time, flops = found["time"], found["flops"]
    assert time["low_s"] <= time["step_s"] <= time["high_s"]
    assert sum(time["spent"].values()) == pytest.approx(time["step_s"])
    assert time["device_hours"] == pytest.approx(time["days"] * 24 * 4)
    assert flops["total"] == pytest.approx(flops["model_per_step"] * 20)
    assert any("assumed" in each for each in found["assumes"])


def test_text_names_rows_phases_and_seconds(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        call(monkeypatch, "plan", config, "--device", "h100", "--mfu", "0.4", "--failures-per-day", "4") == 0
    )
    said = capsys.readouterr().out
    assert "the peak is in the phase" in said and "from --mfu" in said and "MFU 40.0%" in said
    assert "checkpoints every" in said and "of the time trains" in said


def test_a_job_that_does_not_fit_exits_with_2_and_says_what_fits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = report(monkeypatch, capsys, config, "--device", "h100")[1]
    needs = whole["classes"][0]["memory"]["peak_bytes"]
    code, found = report(monkeypatch, capsys, config, "--device", "h100", "--memory", str(needs))
    assert code == 0 and found["margin_bytes"] == 0
    code, found = report(monkeypatch, capsys, config, "--device", "h100", "--memory", str(needs - 1))
    assert code == 2 and not found["fits"] and found["margin_bytes"] == -1
    assert any("recompute=full" in change["set"] for change in found["changes"])


def test_another_job_is_compared(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(GIVEN | {"zero": {"stage": 3}}))
    given = (config, "--ranks", "2", "--device", "h100", "--set", "zero.stage=0", "--against", str(other))
    diff = report(monkeypatch, capsys, *given)[1]["diff"]
    assert any(line.startswith("zero.stage: 0 -> 3") for line in diff["set"])
    assert diff["rows"]["weights"] < 0 and diff["actions"]["UNSHARD"] > 0
    gathers = [
        row for row in diff["sent"] if row["operation"] == "all_gather" and row["purpose"] == "weights"
    ]
    assert gathers and all(row["bytes"] > 0 for row in gathers)


def test_the_folder_of_a_run_is_planned_with_its_outcome(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(Path(config).read_text())
    assert call(monkeypatch, "plan", str(run), "--device", "h100") == 2
    assert "give --ranks" in capsys.readouterr().err
    (run / "run.json").write_text(json.dumps({"starts": [{"ranks": 2}]}))
    outcome = outcome_of(
        ranks=2,
        device="cpu",
        forecast={"step_s": 1.0},
        held={"weights": 5},
        peak_bytes=9,
        phases=[{"compute": 2.0}],
        steps=4,
    )
    write_outcome(run / "outcome.json", outcome)
    found = report(monkeypatch, capsys, str(run), "--device", "h100")[1]
    assert found["ranks"] == 2
    assert found["outcome"]["step_s"] == {"foreseen": 1.0, "actual": 2.0}
    assert call(monkeypatch, "plan", str(run), "--device", "h100") == 0
    assert "what came of the run" in (said := capsys.readouterr().out) and "1 s          2 s  2.00" in said
    (run / "outcome.json").unlink()
    assert call(monkeypatch, "plan", str(run), "--device", "h100") == 0
    assert "has no outcome.json: shardwise train writes it" in capsys.readouterr().out


class NeedsNumbers(nn.Module):
    """A model whose pass depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).sum() * (2.0 if x.sum().item() > 0 else 1.0)


class WithoutLoss(NeedsNumbers):
    """A model that returns no loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)  # type: ignore[no-any-return]


def points() -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(3)}] * 8


def of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Configuration of a model in this module."""
    monkeypatch.setitem(sys.modules, "their_module", sys.modules[__name__])
    given = {"model": {"target": f"their_module:{name}"}, "data": {"target": "their_module:points"}}
    path = folder / "own.json"
    path.write_text(json.dumps(given | {"batch": {"global_size": 4, "micro_size": 2}}))
    return str(path)


def test_a_pass_that_needs_numbers_leaves_model_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = of_their_own(tmp_path, monkeypatch, "NeedsNumbers")
    code, found = report(monkeypatch, capsys, own, "--device", "h100")
    assert code == 0 and found["time"] is None and found["classes"][0]["memory"]["rows"]["weights"] > 0
    assert any("NeedsNumbers" in each and "test_plan.py:" in each for each in found["assumes"])
    for option in ("--search", "--why", "--measure", "--mfu=0.4", "--draw=lanes.png"):
        device = "cpu" if option == "--measure" else "h100"
        assert call(monkeypatch, "plan", own, "--device", device, option) == 2
        assert f"{option.partition('=')[0]} needs a pass of the model on shapes" in capsys.readouterr().err


def test_another_error_of_a_pass_is_no_assumption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = of_their_own(tmp_path, monkeypatch, "WithoutLoss")
    assert call(monkeypatch, "plan", own, "--device", "h100") == 2
    assert "loss" in capsys.readouterr().err


def test_a_vocabulary_that_follows_from_nothing_is_named(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (config, "--device", "h100", "--set", "data.tokenizer=no_such.json")
    assert call(monkeypatch, "plan", *given) == 0, "the model has a vocabulary"
    assert call(monkeypatch, "plan", *given, "--set", "model.vocab=null") == 2
    assert "set model.vocab" in capsys.readouterr().err


def test_the_lanes_of_two_jobs_are_drawn(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "lanes.png"
    given = ("--ranks", "4", "--device", "h100", "--set", "mesh.pp=2", "--against", config)
    assert call(monkeypatch, "plan", config, *given, "--draw", str(picture)) == 0
    assert f"drawn in {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_is_refitted_to_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a slower device, as lines of a file, give a table that foresees them; each job is measured once."""
    slow, fitted, lines = (tmp_path / name for name in ("slow.json", "fitted.json", "lines.jsonl"))
    write_hardware(slow, scaled(find_hardware("a100-80gb"), {"product": 0.6, "memory": 0.8}))
    model = {**MODEL, "width": 2048, "layers": 2, "heads": 16, "context": 1024}
    jobs, rows = {"wide": {**GIVEN, "model": model}, "deep": {**GIVEN, "model": {**model, "layers": 4}}}, []
    jobs["deep"]["precision"] = "bf16"

    def step_s(path: Path, device: str) -> float:
        found = report(monkeypatch, capsys, str(path), "--ranks", "1", "--device", device)[1]
        return float(found["time"]["step_s"])

    for name, job in jobs.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(job))
        measured = step_s(path, str(slow))
        rows.append(
            {"config": str(path), "ranks": 1, "device": "a100-80gb", "per_host": 8, "step_s": measured}
        )
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[Any] = []
    monkeypatch.setattr(hardware_tables, "read", lambda *given: seen.append(given) or read(*given))
    given = ("--refit", str(lines), "--device", "a100-80gb", "--write", str(fitted))
    assert call(monkeypatch, "plan", *given) == 0
    assert "of the 2 measured steps" in capsys.readouterr().out and len(seen) == 2
    for row in rows:
        assert step_s(Path(row["config"]), str(fitted)) == pytest.approx(row["step_s"], rel=0.01)
        assert step_s(Path(row["config"]), "a100-80gb") < 0.9 * row["step_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "h10"), "did you mean 'h100'"),
        (("--ranks", "3", "--set", "mesh.tp=2"), "mesh"),
        (("--mfu", "0.4", "--step-s", "2"), "give one"),
        (("--set", "zero.stagee=2"), "stage"),
        (("--refit", "lines.jsonl"), "--write"),
        (("--ranks", "0"), "Invalid value for '--ranks'"),
        (("--per-host", "0"), "Invalid value for '--per-host'"),
        (("--limit-s", "3"), "give --search too"),
        (("--write", "best.yaml"), "give --search too"),
        (("--search", "--write", "/no/such/best.yaml"), "there is no folder /no/such"),
        (("--draw", "/no/such/lanes.png"), "there is no folder /no/such"),
        (("--measure", "--device", "rtx3090"), "the plan is for rtx3090"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_by_name(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert call(monkeypatch, "plan", config, *arguments) == 2
    assert said in capsys.readouterr().err


def test_hardware_is_listed_and_a_configuration_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "plan", "--devices") == 0
    assert "a100-80gb" in capsys.readouterr().out
    assert call(monkeypatch, "plan") == 2
    assert "CONFIG is missing" in capsys.readouterr().err


@pytest.mark.soak
def test_the_layout_that_a_search_writes_is_the_one_that_it_found(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    best = tmp_path / "best.yaml"
    given = (config, "--ranks", "2", "--device", "h100", "--set", "batch.micro_size=4")
    code, found = report(monkeypatch, capsys, *given, "--search", "--limit-s", "600", "--write", str(best))
    assert code == 0 and found["search"]["tried"] > 0
    fastest = found["search"]["best"][0]
    assert fastest["step_s"] <= found["time"]["step_s"]
    written = report(monkeypatch, capsys, str(best), "--ranks", "2", "--device", "h100")[1]
    assert written["classes"][0]["memory"]["peak_bytes"] == fastest["peak_bytes"]


def test_a_key_is_solved(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (config, "--ranks", "2", "--device", "h100", "--set", "batch.micro_size=4")
    code, found = report(monkeypatch, capsys, *given, "--solve", "batch.micro_size", "--memory", "80GB")
    assert code == 0 and found["solved"] == {"key": "batch.micro_size", "value": 4}
    code, found = report(monkeypatch, capsys, *given, "--solve", "batch.micro_size", "--memory", "1MB")
    assert code == 2 and found["solved"]["value"] is None
    assert call(monkeypatch, "plan", *given, "--solve", "zero.stage") == 2
    assert "no order" in capsys.readouterr().err


def test_an_axis_over_hosts_is_warned_of(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (config, "--ranks", "2", "--device", "h100", "--set", "mesh.tp=2")
    (told,) = report(monkeypatch, capsys, *given, "--per-host", "1")[1]["warnings"]
    assert told.startswith("mesh.tp: the 2 ranks along 'tp' lie on 2 hosts")
    assert report(monkeypatch, capsys, *given, "--per-host", "2")[1]["warnings"] == []


def test_ten_thousand_ranks_are_planned_as_eight(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--device", "h100", "--per-host", "8", "--set", "zero.stage=3")
    small = report(monkeypatch, capsys, config, "--ranks", "4", *given)[1]
    sized = ("--set", "batch.global_size=16384")
    large = report(monkeypatch, capsys, config, "--ranks", "8192", *given, *sized)[1]
    assert large["fits"] and large["parameters"] == small["parameters"]
    assert large["classes"][0]["memory"]["peak_bytes"] < small["classes"][0]["memory"]["peak_bytes"] * 2
