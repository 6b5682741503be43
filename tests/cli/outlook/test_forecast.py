"""A forecast neither ends a run nor changes its random numbers, whatever the user's model does when it is built."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import shardwise
from shardwise.cli.outlook.forecast import RunOutlook, forecast_of
from shardwise.cli.outlook.model_copy import ModelCopy
from shardwise.cli.outlook.outcome import read_outcome
from shardwise.cli.rank import train
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.config.run import RunConfig

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """A model that draws from every generator when it is built and when it runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        random.random()
        np.random.rand()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        torch.rand(1)
        return self.layer(x).square().mean()


def states() -> list[str]:
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), str(random.getstate())]


def test_generators_stand_where_they_stood() -> None:
    config = RunConfig.parse({"batch": {"global_size": 2, "micro_size": 2}})
    copied = ModelCopy.of(Drawing())
    torch.rand(1)
    before = states()
    found = forecast_of(copied, config, 1, CPU, torch.zeros(2, 4))
    assert found is not None and found.rows["weights"] > 0 and found.step_s > 0
    assert states() == before


@pytest.mark.parametrize("kind", [AssertionError, KeyError, AttributeError, OSError])
def test_a_model_that_fails_on_shapes_has_no_forecast(kind: type[Exception]) -> None:
    class Failing(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            raise kind("only with numbers")

    config = RunConfig.parse({"batch": {"global_size": 2, "micro_size": 2}})
    assert forecast_of(ModelCopy.of(Failing()), config, 1, CPU, torch.zeros(2, 4)) is None


BUILT: list[int] = []


class Counted(nn.Module):
    """A user's model whose builder must run once."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.line(x)[:, 0] - y).square().mean()


def build() -> nn.Module:
    BUILT.append(1)
    return Counted()


def points() -> list[dict[str, Tensor]]:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row.sum()} for row in x]


def test_a_run_builds_a_users_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_module", sys.modules[__name__])
    BUILT.clear()
    config = {
        "model": {"target": "their_module:build"},
        "data": {"target": "their_module:points"},
        "batch": {"global_size": 4, "micro_size": 2},
        "train": {"steps": 3},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert train(CommandRequest(str(tmp_path / "config.yaml"))) == 0
    assert BUILT == [1]
    outcome = read_outcome(tmp_path / "run" / "outcome.json")
    assert outcome.peak_bytes.foreseen and outcome.rows["weights"].foreseen == outcome.rows["weights"].actual


def test_rows_of_a_run_are_foreseen_and_held(tmp_path: Path) -> None:
    given = {"batch": {"global_size": 2, "micro_size": 2}}
    model = Drawing()
    copied = ModelCopy.of(model)
    engine = shardwise.initialize(model, given)
    outlook = RunOutlook(engine, RunFolder(tmp_path), RunConfig.parse(given), copied)
    batch = torch.zeros(2, 4)
    engine.count_batches_ahead(lambda: 3 * batch.nbytes)
    outlook.foresee(batch, 3, predictions_bytes=1 << 40)
    assert outlook.forecast is not None and outlook.forecast.rows["predictions"] == 1 << 40
    assert outlook.forecast.peak_bytes == outlook.forecast.resting_bytes + (1 << 40)
    fewer = outlook.forecast._replace(peak_bytes=1 << 41).with_predictions(1, is_cpu=True)
    assert fewer.peak_bytes == 1 << 41, "predictions are not held beside a step"
    for _ in range(2):
        with outlook.measuring([batch]):
            engine.train_step([batch])
    outlook.keep()
    rows = read_outcome(tmp_path / "outcome.json").rows
    for row in ("weights", "gradients", "moments", "batches ahead"):
        assert rows[row].foreseen == rows[row].actual != 0, row
    assert rows["kept"].actual == pytest.approx(rows["kept"].foreseen, abs=16)
    assert dict(engine._parts.site.ledger.foreseen) == outlook.forecast.rows  # type: ignore[union-attr]
    engine.close()
