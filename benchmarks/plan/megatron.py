"""Kernels and messages of Megatron-LM of 2021 and 2022, whose published steps ``published.py`` foresees.

    attention       baddbmm of queries and keys, one kernel for scale, causal mask and softmax (which reads the lower
                    triangle and writes the whole square), dropout of the weights, bmm with the values. No flash
                    attention: it came later.
    recomputation   of a whole block, its last product included; torch's own stops before that product
    messages        between stages, each rank along "tp" sends its part of an activation, and the ranks of the next
                    stage gather the parts (arXiv:2104.04473, section 4.1)
    loss            logits in fp32, with a kernel for each of: cast, largest, difference, exponential, sum, division,
                    and on the way back product and cast
    update          a kernel for each of: gradients to fp32, division by the loss scale, norm, clipping, Adam, weights
                    to 16 bits, zeros

Files at commit e156d2fe: megatron/model/transformer.py, megatron/fused_kernels/scaled_upper_triang_masked_softmax.h,
megatron/p2p_communication.py, megatron/mpu/cross_entropy.py, megatron/optimizer/optimizer.py.

Shapes: B batch, H heads, T tokens, K head size.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardwise.plan.action import Kind
from shardwise.simulate.exchanges import ExchangeCall
from shardwise.simulate.passes import NOTHING, MeasuredPass
from shardwise.simulate.work import NO_WORK

LOSS_BYTES = {Kind.F: 6 + 4 + 8 + 8 + 4 + 8, Kind.B: 8 + 6}
"""Bytes that the loss reads and writes for each logit of a rank, forward and backward."""
OUR_LOSS_BYTES = {Kind.F: 2, Kind.B: 4}
"""The same of this package's loss on 16-bit logits, which a pass on shapes counts."""
UPDATE_BYTES = {"fp16": 6 + 8 + 4 + 8 + 28 + 6 + 2, "fp32": 8 + 4 + 8 + 28 + 6 + 4}
"""Bytes that the update reads and writes for each parameter of a rank, by the dtype of gradients."""
ATTENTION_DROPOUT = 0.1
"""Share of attention weights that are zeroed: the default of Megatron-LM, which all sources use."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a tensor of the shape of causal attention, made by operations that touch what Megatron-LM's kernels touch.

    For passes on shapes only: the numbers are not those of attention.

    Args:
        q: queries, [B, H, T, K].
        k: keys, [B, H, T, K].
        v: values, [B, H, T, K].
    """
    batch, heads, tokens, size = q.shape
    q, k, v = (each.reshape(batch * heads, tokens, size) for each in (q, k, v))
    scores = torch.baddbmm(q.new_empty(batch * heads, tokens, tokens), q, k.mT, beta=0.0, alpha=size**-0.5)
    weights = F.dropout(_SoftmaxShapes.apply(scores), ATTENTION_DROPOUT)  # [BH, T, T]
    return torch.bmm(weights, v).view(batch, heads, tokens, size)


class _SoftmaxShapes(torch.autograd.Function):
    """Shapes and bytes of the fused kernel for scale, causal mask and softmax: [BH, T, T] -> [BH, T, T]."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor) -> Tensor:
        half = scores.shape[-1] // 2
        out = F.pad(scores[..., :half], (0, scores.shape[-1] - half))  # reads half, writes all
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors  # type: ignore[attr-defined]
        half = out.shape[-1] // 2
        return torch.cat([grad[..., :half], out[..., half:]], -1)  # reads half of each, writes all


def with_parts_sent(passed: Mapping[int, MeasuredPass], tp: int) -> dict[int, MeasuredPass]:
    """Return the passes of stages whose messages are cut into parts along "tp" and gathered by their receivers.

    Args:
        passed: Measured pass of one microbatch, by stage.
        tp: Ranks along "tp".
    """

    def parts(calls: Iterable[ExchangeCall]) -> tuple[ExchangeCall, ...]:
        found: list[ExchangeCall] = []
        for call in calls:
            part = -(-call.elements // tp)
            found.append(call._replace(elements=part))
            found.append(call._replace(operation="all_gather", axis="tp", elements=part * (tp - 1)))
        return tuple(found)

    if tp == 1:
        return dict(passed)
    return {
        stage: each._replace(leaves=parts(each.leaves), answered=parts(each.answered))
        for stage, each in passed.items()
    }


def without_stand_ins(passed: Mapping[int, MeasuredPass]) -> dict[int, MeasuredPass]:
    """Return the passes of stages without the answers for blocks of earlier stages, which Megatron-LM does not run.

    Args:
        passed: Measured pass of one microbatch, by stage.
    """
    found = dict(passed)
    for stage, each in passed.items():
        if stage and (Kind.F, "") in each.shares:
            own = each.shares[Kind.F, ""]._replace(touched_bytes=0, work=NO_WORK)
            found[stage] = each._replace(shares={**each.shares, (Kind.F, ""): own})
    return found


def with_loss(passed: Mapping[int, MeasuredPass], logits: int) -> dict[int, MeasuredPass]:
    """Return the passes of stages with the loss of the last one as Megatron-LM computes it.

    Args:
        passed: Measured pass of one microbatch, by stage.
        logits: Logits of a microbatch on a rank.
    """
    last = max(passed)
    shares = dict(passed[last].shares)
    for kind, touched in LOSS_BYTES.items():
        share = shares.get((kind, ""), NOTHING)
        more = (touched - OUR_LOSS_BYTES[kind]) * logits
        shares[kind, ""] = share._replace(touched_bytes=share.touched_bytes + more)
    return {**passed, last: passed[last]._replace(shares=shares)}
