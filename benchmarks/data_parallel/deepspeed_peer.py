"""The ``deepspeed`` package at stages 0 to 3 on its CPU accelerator.

Settings, and why:
  - torch's fused AdamW (``torch_adam``): the package's own CPU kernel is compiled on first use, and is only
    taken together with offload.
  - bucket sizes fit the model (its defaults, 5e8 elements, are made for models a hundred times larger).
  - ``compute_grad_norm: false`` where it exists (stages 1 and 2), and no clipping: no contender clips.
  - stage 3 comes twice. By default nothing is released below 1e9 live parameters, so on a small model the
    weights stay whole after the first use; "resident" is that default. The plain row is told to keep about
    three blocks, which is what sharding the weights is for.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from rows import Row
from setting import Running, Setting
from torch import Tensor
from workload import build_model

# What ``initialize`` imports late. Done here, before memory is measured: about 50 MB of code and tables that
# are the package's, not the model's.
_LATE = (
    "deepspeed",
    "deepspeed.module_inject",
    "deepspeed.ops.op_builder",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "setuptools",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)
for _name in _LATE:
    with contextlib.suppress(ImportError):  # another release may have moved it
        importlib.import_module(_name)


class DeepSpeedLoop(Running):
    """forward, backward, step through its engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


def _zero(row: Row, block_elements: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": row.stage}
    if row.stage in (1, 2):
        zero |= {
            "overlap_comm": False,
            "reduce_bucket_size": 4 * block_elements,
            "allgather_bucket_size": 4 * block_elements,
            "compute_grad_norm": False,
        }
    if row.stage == 3:
        zero |= {"overlap_comm": False, "reduce_bucket_size": 4 * block_elements}
        if "resident" not in row.options:
            zero |= {
                "stage3_max_live_parameters": 3 * block_elements,
                "stage3_max_reuse_distance": block_elements,
                "stage3_prefetch_bucket_size": block_elements,
            }
    return zero


def build(row: Row, setting: Setting) -> Running:
    """An engine over the plain model."""
    model = build_model(setting.workload)
    block_elements = sum(p.numel() for p in model.get_submodule("blocks.0").parameters())
    config = {
        "train_micro_batch_size_per_gpu": setting.workload.micro_batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {**setting.workload.adamw, "torch_adam": True, "fused": True},
        },
        "zero_optimization": _zero(row, block_elements),
        "bf16": {"enabled": setting.dtype == "bf16"},
    }
    deepspeed = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    return DeepSpeedLoop(engine)
