"""A forecast neither ends a run nor changes its random numbers, whatever the user's model does when it is built."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.cli.outlook.forecast import forecast_of
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
