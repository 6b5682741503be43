"""torch's own tensor parallelism: DTensor, ``parallelize_module`` and ``loss_parallel`` over gloo.

    sequence  without it the activations between the blocks are whole on every rank; with it they are cut along the
              sequence and the norms run under ``SequenceParallel``
    matrices  "separate": q, k, v, gate and up projections are each a matrix, as in the models of torch's tutorials;
              "fused": our fused ones, their rows laid out so that an even cut gives each rank its heads

Attention, rotation and residuals are our modules and kernels on local tensors. Norms are our kernel on local tensors
where the sequence is whole; under ``SequenceParallel`` the weight is a DTensor, and the norm is torch's ``nn.RMSNorm``.
The loss is ``F.cross_entropy`` under ``loss_parallel``, which knows no other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from contenders import Contender
from setting import Running, Setting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer
from workload import build_model

from shardwise.kernels.rotary import rotate
from shardwise.models.gpt import Gpt
from shardwise.models.layers import Attention, SwiGlu, TransformerBlock


class Several(nn.Module):
    """Matrices that read the same input, their outputs side by side: a fused matrix taken apart."""

    def __init__(self, fused: nn.Linear, sizes: list[int]) -> None:
        super().__init__()
        pieces = fused.weight.detach().split(sizes)
        self.each = nn.ModuleList(nn.Linear(fused.in_features, size, bias=False) for size in sizes)
        for linear, piece in zip(self.each, pieces, strict=True):
            cast(nn.Linear, linear).weight = nn.Parameter(piece.clone())


class SeparateAttention(nn.Module):
    """Our attention with q, k and v as matrices of their own."""

    def __init__(self, fused: Attention) -> None:
        super().__init__()
        sizes = [heads * fused.head_size for heads in fused.head_counts]
        self.q, self.k, self.v = Several(fused.qkv, sizes).each
        self.out = fused.out
        self.head_size = fused.head_size
        self.attention = fused.attention

    def forward(self, x: Tensor, at: Any = None, cache: None = None) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = self.attention(rotate(q, at), rotate(k, at), v)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class SeparateSwiGlu(nn.Module):
    """Our feed-forward part with gate and up as matrices of their own."""

    def __init__(self, fused: SwiGlu) -> None:
        super().__init__()
        hidden = fused.down.in_features
        self.gate, self.up = Several(fused.gate_up, [hidden, hidden]).each
        self.down = fused.down

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


def cut_fused(linear: nn.Linear, blocks: list[int], ranks: int) -> None:
    """Lay the rows out so that the r-th of ``ranks`` equal pieces holds the r-th piece of every block."""
    cut = [block.chunk(ranks) for block in linear.weight.detach().split(blocks)]
    linear.weight = nn.Parameter(torch.cat([block[r] for r in range(ranks) for block in cut]))


def prepare(model: Gpt, ranks: int, *, fused: bool, torch_norms: bool) -> None:
    """Our modules in the shape that ``parallelize_module`` takes."""
    for module in model.blocks:
        block = cast(TransformerBlock, module)
        attention, mlp = block.attention, cast(SwiGlu, block.mlp)
        if fused:
            counts = attention.head_counts
            cut_fused(attention.qkv, [heads * attention.head_size for heads in counts], ranks)
            cut_fused(mlp.gate_up, [mlp.down.in_features] * 2, ranks)
            attention.head_counts = cast(Any, tuple(heads // ranks for heads in counts))
        else:
            block.attention = cast(Any, SeparateAttention(attention))
            block.mlp = SeparateSwiGlu(mlp)
        if torch_norms:
            block.attention_norm, block.mlp_norm = (
                plain_norm(block.attention_norm),
                plain_norm(block.mlp_norm),
            )
    if torch_norms:
        model.norm = plain_norm(model.norm)


def plain_norm(ours: nn.Module) -> nn.Module:
    """torch's module with the weight of ours."""
    norm = cast(nn.RMSNorm, ours)
    plain = nn.RMSNorm(norm.normalized_shape, eps=norm.eps)
    plain.weight = norm.weight
    return plain


def plan(*, sequence: bool, fused: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is done to the modules around the blocks, and to those of each block."""
    between = Shard(1) if sequence else Replicate()
    around = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, Any] = {
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if fused:
        block |= {name: ColwiseParallel(input_layouts=between) for name in ("attention.qkv", "mlp.gate_up")}
    else:
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        block |= {name: ColwiseParallel() for name in columns}
    if sequence:
        around["norm"] = SequenceParallel(use_local_output=True)
        block |= {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")}
    if not fused:  # One gather, or one sum of gradients, for the matrices that read the same input.
        for name, others in (("attention", (None, None)), ("mlp", ())):
            block[name] = PrepareModuleInput(
                input_layouts=cast(Any, (between, *others)),
                desired_input_layouts=cast(Any, (Replicate(), *others)),
            )
    return around, block


class DTensorLoop(Running):
    """Forward and backward under ``loss_parallel``, then the optimizer's step."""

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        with loss_parallel():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        return float(loss.to_local() if isinstance(loss, DTensor) else loss)


def build(row: Contender, setting: Setting) -> Running:
    """Whole on every rank, then cut in place."""
    sequence, fused = row.options["sequence"] == "yes", row.options["matrices"] == "fused"
    model = cast(Gpt, build_model(setting.workload))
    prepare(model, row.ranks, fused=fused, torch_norms=sequence)
    mesh: DeviceMesh = init_device_mesh("cpu", (row.ranks,))
    around, block = plan(sequence=sequence, fused=fused)
    for module in model.blocks:
        parallelize_module(module, mesh, block)
    parallelize_module(model, mesh, around)
    # The fused optimizer takes no mixture of DTensors and others.
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) is wanted] for wanted in (True, False)]
    adamw = setting.workload.adamw
    return DTensorLoop(model, [AdamW(kind, fused=True, **adamw) for kind in kinds if kind])
