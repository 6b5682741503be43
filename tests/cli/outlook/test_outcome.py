"""``outcome.json`` is read back as it was written, and damaged files are refused by name."""

import json
from pathlib import Path

import pytest

from shardwise.base.errors import DataError, UsageError
from shardwise.cli.outlook.outcome import RunOutcome, outcome_of, read_outcome, write_outcome


def made() -> RunOutcome:
    phases = [{"compute": 1.0, "dp": 0.5}, {"compute": 1.2, "dp": 0.3}]
    forecast = {"rows": {"weights": 80}, "lanes": {"compute": 1.0}, "peak_bytes": 100, "step_s": 1.5}
    return outcome_of(
        ranks=2, device="cpu", forecast=forecast, held={"weights": 80}, peak_bytes=120, phases=phases, steps=7
    )


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_outcome(tmp_path / "outcome.json", made())
    found = read_outcome(tmp_path / "outcome.json")
    assert found == made()
    assert found.plain()["step_s"] == {"foreseen": 1.5, "actual": pytest.approx(1.5)}
    assert any(line.startswith("peak") and line.endswith("1.20") for line in found.lines())


def test_a_run_without_one_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="writes it behind the first save"):
        read_outcome(tmp_path / "outcome.json")


@pytest.mark.parametrize(
    "change", [{"ranks": 0}, {"ranks": "2"}, {"phases": [{"dp": "x"}]}, {"version": None}]
)
def test_a_damaged_one_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps(made().model_dump() | change))
    with pytest.raises(DataError, match=next(iter(change))):
        read_outcome(path)
