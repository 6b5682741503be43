"""What torch itself brings: DDP, ZeroRedundancyOptimizer and FSDP2, each as its documentation advises.

All use the fused AdamW. In bf16 DDP and ZeroRedundancyOptimizer appear twice, as their users run them: with
bf16 parameters (no fp32 master) and with fp32 parameters under autocast. FSDP2 has its own mixed precision:
sharded fp32 parameters, bf16 compute, gradients reduced in fp32.
"""

from __future__ import annotations

import contextlib
import fnmatch
from typing import Any, cast

import torch
from rows import Row
from setting import Running, Setting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from workload import build_model


class TorchLoop(Running):
    """The plain training loop around a wrapped module."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, autocast: bool = False) -> None:
        self.model = model
        self.optimizer = optimizer
        self.autocast = autocast

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        lower = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with lower:
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _replica(row: Row, setting: Setting) -> DistributedDataParallel:
    model = build_model(setting.workload)
    if setting.dtype == "bf16" and "autocast" not in row.options:
        model = model.to(torch.bfloat16)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def build_ddp(row: Row, setting: Setting) -> Running:
    """Replicated weights and optimizer; buckets of gradients are summed while backward runs."""
    model = _replica(row, setting)
    optimizer = AdamW(model.parameters(), fused=True, **setting.workload.adamw)
    return TorchLoop(model, optimizer, autocast="autocast" in row.options)


def build_zero1(row: Row, setting: Setting) -> Running:
    """DDP's gradients; each rank steps the parameters it owns and broadcasts them."""
    model = _replica(row, setting)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=True, fused=True, **setting.workload.adamw
    )
    return TorchLoop(model, optimizer, autocast="autocast" in row.options)


def build_fsdp2(row: Row, setting: Setting) -> Running:
    """``fully_shard`` on every block and on the root."""
    model = build_model(setting.workload)
    mesh = init_device_mesh("cpu", (setting.world_size,))
    mixed = MixedPrecisionPolicy()
    if setting.dtype == "bf16":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed,
        "reshard_after_forward": row.options["reshard"] == "yes",
    }
    for name, module in model.named_modules():
        if fnmatch.fnmatch(name, "blocks.*") and name.count(".") == 1:
            fully_shard(module, **options)
    fully_shard(model, **options)
    return TorchLoop(model, AdamW(cast(Any, model.parameters()), fused=True, **setting.workload.adamw))
