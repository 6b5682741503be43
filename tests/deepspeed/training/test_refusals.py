"""Methods of DeepSpeed's engine that are not here: each says what to do instead."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.training.pipeline_engine import PipelineEngine
from shardwise.deepspeed.training.refusals import INSTEAD

STEPS, PARTS, MICRO = 3, 2, 2


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


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


def test_methods_that_are_not_here_say_what_to_do() -> None:
    engine, *_ = made(config=configuration(0))
    for name, instead in INSTEAD.items():
        assert not hasattr(engine, name) and not hasattr(PipelineEngine, name), name
        with pytest.raises(AttributeError, match=re.escape(f"engine.{name}: not here: {instead}")):
            getattr(engine, name)
    engine.destroy()
