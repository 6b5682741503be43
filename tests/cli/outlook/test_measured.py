"""``--measure`` runs configurations here, the fastest first, and refuses machines that are not those of the plan."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import RankError, UsageError
from shardwise.cli.main import main
from shardwise.cli.outlook import measured
from shardwise.cli.outlook.measured import Layout, check_machine, measure
from shardwise.config.run import RunConfig

CONFIG = RunConfig.parse({"model": {"name": "gpt"}, "batch": {"global_size": 4}})


def test_other_machines_are_refused_by_name() -> None:
    check_machine(1, "cpu")
    with pytest.raises(UsageError, match="4096 ranks would take turns.*at most --ranks"):
        check_machine(4096, "cpu")
    with pytest.raises(UsageError, match="the plan is for h100, and this machine has"):
        check_machine(1, "h100")


def test_the_fastest_comes_first_beside_what_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {(): [(3.0, 5), (4.0, 6)], ("zero.stage=3",): [(2.0, 9), (1.0, 4)]}

    def run(layout: Layout, ranks: int, device: str, steps: int) -> list[dict[str, Any]]:
        return [{"step_s": step_s, "peak_bytes": size} for step_s, size in took[layout.set]]

    monkeypatch.setattr(measured, "_run", run)
    monkeypatch.setattr(measured, "check_machine", lambda ranks, device: None)
    layouts = [Layout(CONFIG, (), 1.0, 7), Layout(CONFIG, ("zero.stage=3",), 1.5, 8)]
    found = measure(layouts, 2, "cpu")
    assert [each.set for each in found] == [("zero.stage=3",), ()]
    assert found[0].plain() == {
        "set": ["zero.stage=3"],
        "step_s": {"foreseen": 1.5, "actual": 2.0},
        "peak_bytes": {"foreseen": 8.0, "actual": 9.0},
    }
    assert found[1].line().startswith("as it is: 4 s a step, foreseen 1 s (0.25)")


@pytest.mark.soak
def test_ranks_that_fail_are_an_error_with_their_last_words() -> None:
    config = RunConfig.parse({"model": {"target": "no_such_module:f"}, "batch": {"global_size": 4}})
    with pytest.raises(RankError, match="as it is ended with exit code"):
        measure([Layout(config, (), 1.0, 1)], 1, "cpu", 1)


@pytest.mark.soak
def test_the_best_of_a_search_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "model": {"name": "gpt", "layers": 2, "width": 32, "heads": 4, "context": 16, "vocab": 256},
        "data": {"source": "no_such_file.txt"},
        "batch": {"global_size": 8, "micro_size": 4},
    }
    (tmp_path / "job.json").write_text(json.dumps(given))
    words = ["plan", str(tmp_path / "job.json"), "--ranks", "2", "--search", "--measure", "--json"]
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["measured"]) == len(found["search"]["best"]) == 3
    assert {tuple(each["set"]) for each in found["measured"]} == {
        tuple(each["set"]) for each in found["search"]["best"]
    }
    seconds = [each["step_s"]["actual"] for each in found["measured"]]
    assert seconds == sorted(seconds) and all(each["step_s"]["foreseen"] > 0 for each in found["measured"])
