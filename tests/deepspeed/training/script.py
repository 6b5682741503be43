"""The model and the configuration of a script in DeepSpeed's names."""

from typing import Any

import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed

STEPS, PARTS, MICRO = 3, 2, 2


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples() -> list[tuple[Tensor, int]]:
    drawn = torch.Generator().manual_seed(5)
    return [(torch.randn(4, generator=drawn, dtype=torch.float64), place % 3) for place in range(24)]


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    """A None leaves a key out."""
    keys: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_num_steps": 2}},
        **more,
    }
    return {key: value for key, value in keys.items() if value is not None}


def made(**arguments: Any) -> Any:
    model = net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), **arguments)
