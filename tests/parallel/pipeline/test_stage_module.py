"""A stage of a cut model: what it does when a pass takes another path than the one that was looked at."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.stage_module import kind_of
from tests.parallel.pipeline.absent_nets import TOKENS, WIDTH, Net


@pytest.mark.parametrize("values", [(0, 1), (0.0, 0.5), ("no", "yes"), ({"sink": 0}, {"sink": 2})])
def test_another_number_may_be_another_path(values: tuple[Any, Any]) -> None:
    """It was one kind with every other number, so a side loss that a flag switched on lacked blocks, unseen."""

    class Switched(Net):
        def forward(self, tokens: Tensor, flag: Any) -> Any:
            is_on = any(flag.values()) if isinstance(flag, dict) else flag not in (0, "no")
            sink: list[Tensor] = []
            x = self.begin(tokens)
            for block in self.blocks:
                x = block(x, sink if is_on else None)
            return self.end(x) + sum(y.square().mean() for y in sink)

    stages = cut(Switched().double(), ("blocks.2",), [0, 1])

    def step(flag: Any) -> None:
        for stage in stages.values():
            received = None if stage.stage == 0 else torch.randn(2, 4, WIDTH, dtype=torch.float64)
            stage.run(lambda model: model(TOKENS, flag), received, kind_of(flag))

    step(values[0])
    with pytest.raises(PlanError, match="adds to a list that block"):
        step(values[1])
