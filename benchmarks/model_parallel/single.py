"""One process: the bare loop over the whole model, its microbatches accumulated."""

from __future__ import annotations

from contenders import Contender
from setting import Running, Setting
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from workload import build_model


class BareLoop(Running):
    """Forward, backward, step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, microbatches: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.microbatches = microbatches

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        for x, y in zip(tokens.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            loss = self.model(x, y) / self.microbatches
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def build(row: Contender, setting: Setting) -> Running:
    """The model as everywhere, whole."""
    model = build_model(setting.workload)
    optimizer = AdamW(model.parameters(), fused=True, **setting.workload.adamw)
    return BareLoop(model, optimizer, row.microbatches)
