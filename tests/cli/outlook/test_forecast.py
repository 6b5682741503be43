"""A forecast neither ends a run nor changes its random numbers, whatever the user's model does when it is built."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.cli.outlook.forecast import RunOutlook, forecast_of
from shardwise.cli.outlook.outcome import read_outcome
from shardwise.config.run import RunConfig

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """A model that draws from every generator when it is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        random.random()
        np.random.rand()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def states() -> list[str]:
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), str(random.getstate())]


def test_generators_stand_where_they_stood() -> None:
    config = RunConfig.parse({"batch": {"global_size": 2, "micro_size": 2}})
    torch.rand(1)
    before = states()
    found = forecast_of(Drawing, config, 1, CPU, torch.zeros(2, 4))
    assert found is not None and found.rows["weights"] > 0 and found.step_s > 0
    assert states() == before


@pytest.mark.parametrize("kind", [AssertionError, KeyError, AttributeError, OSError])
def test_a_model_that_cannot_be_built_again_has_no_forecast(kind: type[Exception]) -> None:
    def build() -> nn.Module:
        raise kind("only once")

    config = RunConfig.parse({"batch": {"global_size": 2, "micro_size": 2}})
    assert forecast_of(build, config, 1, CPU, torch.zeros(2, 4)) is None


def test_rows_of_a_run_are_foreseen_and_held(tmp_path: Path) -> None:
    engine = shardwise.initialize(Drawing(), {"batch": {"global_size": 2, "micro_size": 2}})
    outlook, batch = RunOutlook(engine, tmp_path / "outcome.json"), torch.zeros(2, 4)
    engine.count_batches_ahead(lambda: 3 * batch.nbytes)
    outlook.foresee(Drawing, RunConfig.parse({"batch": {"global_size": 2, "micro_size": 2}}), batch, 3)
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
