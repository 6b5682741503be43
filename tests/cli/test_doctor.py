"""``shardwise doctor`` names the cause that was planted into real ranks, and refuses runs that it cannot judge."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.cli.main import main
from shardwise.cli.outlook.outcome import outcome_of, write_outcome
from shardwise.comm.collectives import Group
from shardwise.comm.watching.answers import RankAnswer
from shardwise.comm.watching.recorder import Recorder, RingOwner, ring_path
from shardwise.comm.world import World
from shardwise.launch.failure import RankFailure, kept_path
from shardwise.launch.failure import write as write_failure
from shardwise.models import Gpt, GptPolicy
from shardwise.observe.diagnosis import diagnose
from shardwise.observe.log import log_path
from shardwise.plan.action import F

STEPS = 8
PLANTED_S = 0.08


class Slowed(Gpt):
    """A language model whose forward pass sleeps."""

    seconds = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(*args, **kwargs)


def phases(world: World, mesh: dict[str, int], plant: str, late: int) -> list[dict[str, float]]:
    """Phases of all ranks in steps into which a cause was planted: of ``late``, or of all ranks for a link."""
    torch.manual_seed(0)
    model = Slowed(GptPolicy(layers=2, width=16, heads=2, context=8, vocab=32))
    is_late = world.rank == late
    model.seconds = PLANTED_S if plant == "compute" and is_late else 0.0
    given = {"mesh": mesh, "monitor": {"rank_seconds": True}, "batch": {"duplicates": "allow"}}
    engine = shardwise.initialize(model, given | {"check_first_step": "off"}, world=world)
    engine.measure_waits()
    tokens = torch.arange(16).view(2, 8)
    run = Group._run
    if plant == "link":
        Group._run = _late_start(run)  # type: ignore[method-assign]
    try:
        for _ in range(STEPS):
            wait_s = PLANTED_S if plant == "data" and is_late else 0.0
            time.sleep(wait_s)
            engine.count_seconds("data", wait_s)
            engine.train_step([{"tokens": tokens, "targets": tokens}])
    finally:
        Group._run = run  # type: ignore[method-assign]
    found = [row._asdict() for row in engine.rank_seconds()]
    engine.close()
    return found


def _late_start(run: Callable[..., Any]) -> Callable[..., Any]:
    """``Group._run`` over a link on which every collective takes longer."""

    def slow(self: Group, operation: Any, purpose: Any, full: Any, what: str, start: Any, *more: Any) -> Any:
        def late(*given: Any) -> Any:
            time.sleep(PLANTED_S / 4)
            return start(*given)

        return run(self, operation, purpose, full, what, late, *more)

    return slow


CAUSES = {"data": "data", "compute": "straggler", "link": "exchange"}


def check(ranks: Any, size: int, mesh: dict[str, int], plant: str, late: int) -> bool:
    """True if the planted cause and its rank are named."""
    found = diagnose(ranks(size).run(phases, mesh, plant, late)[0])
    assert sum(found.shares.values()) == pytest.approx(1)
    return (found.cause, found.rank) == (CAUSES[plant], None if plant == "link" else late)


@pytest.mark.parametrize(("plant", "late"), [("compute", 1), ("data", 0), ("link", 0)])
def test_the_planted_cause_is_named(ranks: Any, plant: str, late: int) -> None:
    assert check(ranks, 2, {"dp": 2}, plant, late)


@pytest.mark.soak
def test_nineteen_of_twenty_plants_are_named(ranks: Any) -> None:
    plants = [
        (size, mesh, plant, late)
        for size, mesh in ((2, {"dp": 2}), (2, {"tp": 2}), (4, {"dp": 4}), (4, {"dp": 2, "tp": 2}))
        for plant, late in (("compute", size - 1), ("compute", 0), ("data", 1), ("data", 0), ("link", 0))
    ]
    assert len(plants) == 20
    missed = [each for each in plants if not check(ranks, *each)]
    assert len(missed) <= 1, missed


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def written(folder: Path, **more: float) -> str:
    usual = {"data": 0.0, "compute": 1.0, "dp": 0.1, "tp": 0.0, "pp": 0.0, "ep": 0.0}
    usual |= {"update": 0.1, "save": 0.0, "rest": 0.0}
    folder.mkdir()
    outcome = outcome_of(
        ranks=2,
        device="cpu",
        forecast={"lanes": {"compute": 0.9}},
        held={},
        peak_bytes=1,
        phases=[usual, usual | more],
        steps=5,
    )
    write_outcome(folder / "outcome.json", outcome)
    return str(folder)


def test_the_command_prints_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, usual = written(tmp_path / "slow", compute=2.0), written(tmp_path / "usual")
    assert call(monkeypatch, "doctor", slow, "--against", usual) == 0
    said = capsys.readouterr().out
    assert "cause: straggler: rank 1 computes 1 s a step longer than the others" in said
    assert "foreseen 0.9 s" in said and f"beside {usual}, 1.2 s a step, cause: compute" in said
    assert "waiting for rank 1" in said and "this run    the other         more" in said
    assert call(monkeypatch, "doctor", slow, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["rank"]) == ("straggler", 1)


def test_the_verdict_on_the_ranks_is_printed_before_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rings of two ranks that were killed; an error of one of them that the launcher kept is the cause."""
    run = Path(written(tmp_path / "run"))
    for rank in range(2):
        made = Recorder(ring_path(run / "flight", rank), RingOwner(rank, 2, "another host"))
        made.step = 7
        made.action(F(0, 1))
        made.snapshot(RankAnswer(time_ns=time.monotonic_ns()).model_dump_json().encode())
        made.leave()
    assert call(monkeypatch, "doctor", str(run)) == 0
    said = capsys.readouterr().out
    assert said.startswith("ended: the job has ended in order, in step 7") and "cause: compute" in said
    (run / "logs").mkdir()
    failure = RankFailure(1, time.monotonic() + 1, 1, "ValueError: no such row")
    write_failure(failure, kept_path(log_path(run / "logs", 1)))
    assert call(monkeypatch, "doctor", str(run), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["rank"], found["step"], found["action"]) == ("ended", 1, 7, "F(0,1)")
    assert "ValueError: no such row" in found["sentence"] and found["cause"] == "compute"


def test_damaged_records_are_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flight").mkdir()
    ring_path(tmp_path / "flight", 0).write_bytes(b"hostile")
    assert call(monkeypatch, "doctor", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "rank_00000.ring" in said and "Traceback" not in said


def test_a_run_without_an_outcome_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", str(tmp_path)) == 2
    assert "outcome.json" in capsys.readouterr().err
    assert call(monkeypatch, "doctor", str(tmp_path / "none")) == 2
    assert "there is no folder" in capsys.readouterr().err
