"""Getters of DeepSpeed's engine: each answers with the configuration's number."""

from typing import Any

import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.training import getters

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


def test_every_getter_answers() -> None:
    """Each is the value of a key, given or its default."""
    engine, *_ = made(config=configuration(2, zero_optimization={"stage": 2, "reduce_bucket_size": 7}))
    found = {name: getattr(engine, name)() for name in getters.NAMES}
    assert found["zero_reduce_bucket_size"] == 7 and found["zero_allgather_bucket_size"] == 5e8
    assert found["zero_optimization_partition_gradients"] and not found["zero_optimization_partition_weights"]
    assert found["optimizer_params"]["lr"] == 0.01 and found["scheduler_name"] == "WarmupLR"
    assert found["zero_offload_optimizer"] is None and found["dynamic_loss_scale"] is True
    assert engine.dynamic_loss_scale_args()["init_scale"] == 2**16 and not found["is_compiled"]
    assert engine._config.zero_config.stage == engine._config.zero_optimization_stage == 2
    engine.destroy()
