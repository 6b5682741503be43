"""A small model and its engine in DeepSpeed's names."""

from typing import Any

import torch
from torch import nn

import shardwise.deepspeed as deepspeed


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]
