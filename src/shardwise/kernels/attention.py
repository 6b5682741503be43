"""Causal attention on the CPU in blocks of queries, so that the upper triangle is never computed.

    for each block [a, e) of queries:
        P   = softmax(Q[a:e] K[:e]ᵀ / √K, with the diagonal block masked)
        out[a:e] = P V[:e]

torch's fused kernel computes the whole square of a short sequence on the CPU and does not use 16-bit matrix
instructions. Half the work and large matrix products: at 256 positions, forward and backward took 0.7 of its time in
fp32 and 0.3 in bf16 (one thread of a Zen 5 core). In bf16 the scores are rounded before the softmax, as in a model
written with plain matrix products: the error against fp64 is 1 to 2 times that of the fused kernel. Heads that share
their keys and values (N < H) are stacked as rows of the same product: nothing is repeated.

Short sequences keep P for the backward pass; longer ones compute it again, at one product in seven.

On a device torch's kernels for 16 bits and on the CPU its flash kernel take grouped heads as they are. In fp32 a device
has the memory-efficient kernel alone, which takes grouped heads only in some releases and not on AMD; torch would fall
back to plain products, and keep T x S scores of every head. There the keys and values are repeated for each head,
unless the copies would be larger than the scores. Measured on the CPU, forward and backward, B = 1, H = 8, N = 2,
T = S = 4096, K = 64, fp32: 1,618 MB with plain products, 89 MB with repeated keys and values, 57 MB with grouped ones.

Cost:  B·H·T²/2 elements kept if T <= ``_KEEP_UP_TO``, else only Q, K, V.
Shapes: B batch, H heads, N key and value heads, G = H/N, T queries, S keys, K head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx, once_differentiable

from shardwise.kernels.attention_view import AttentionView, seen_by_last
from shardwise.kernels.choice import kernel_device
from shardwise.kernels.operation import operation
from shardwise.kernels.viewed_attention import OwnKeys, attend_to_seen

_KEEP_UP_TO = 512
"""Length of the longest sequence whose attention weights are kept: they are then a fifth of a block's activations."""

_BLOCKED_UP_TO = {torch.float64: 1024, torch.float32: 1024, torch.bfloat16: 1 << 20}
"""Length of the longest sequence, by dtype, at which blocks beat torch's kernel, which skips parts of the triangle
only for long sequences. fp16 is left to torch: its matrix product on the CPU has no fast kernel.
"""


@operation("product")
def causal_attention(q: Tensor, k: Tensor, v: Tensor, view: AttentionView | None = None) -> Tensor:
    """Return the attention of each query to the keys up to its own position.

    The T queries are the last of the S positions.
    This is the contract of every attention function that a model can be given. A function without ``view`` serves
    models and batches without documents, windows and sinks.

    Args:
        q: queries, [B, H, T, K].
        k: keys, [B, N, S, K].
        v: values, [B, N, S, K].
        view: documents, window and sink; None: each query sees all earlier keys.

    Returns:
        [B, H, T, K], whose transpose [B, T, H, K] is contiguous on the CPU if there is no ``view``.
    """
    if view is not None:
        return _viewed(q, k, v, view)
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys <= _BLOCKED_UP_TO.get(q.dtype, 0) and kernel_device(q) == "cpu" and _chooses_freely():
        return _BlockedAttention.apply(q, k, v).transpose(1, 2)
    shared = q.shape[1] != k.shape[1]
    if shared and _repeats_keys(q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v, shared = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
    if queries == 1 or queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=shared)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_visible(q, k), enable_gqa=shared)


@_disable_dynamo
def _viewed(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    if view.sink is None and not view.hides(k.shape[2]):
        return causal_attention(q, k, v)
    groups = seen_by_last(q.shape[2], k.shape[2], view.starts(len(q)), view.window)
    return attend_to_seen(q, k, v, view.sink, OwnKeys(groups))


def _repeats_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if repeated keys and values keep torch from plain products, and take less memory than scores."""
    if kernel_device(q) != "cuda" or q.dtype != torch.float32 or 2 * q.shape[3] >= q.shape[2]:
        return False
    return not _takes_groups(q, k, v)


def _takes_groups(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if the memory-efficient kernel of a device takes keys and values that several heads share."""
    masked, dropout, causal, grouped = None, 0.0, True, True
    given = torch.backends.cuda.SDPAParams(q, k, v, masked, dropout, causal, grouped)
    return bool(torch.backends.cuda.can_use_efficient_attention(given))


def _chooses_freely() -> bool:
    """Return True unless ``attention.backend`` or ``sdpa_kernel`` leaves torch less than its two kernels on the CPU."""
    # A compiler breaks its graph at torch.backends.cuda.flash_sdp_enabled(), and computes these two while it traces.
    return torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, view: AttentionView | None = None) -> Tensor:
    """Return the attention in plain torch operations, with scores in fp32 at least: the reference."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    visible = _visible(q, k) if view is None else _visible_in(view, q, k)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~visible, float("-inf"))
    if view is None or view.sink is None:
        return scores.softmax(-1).to(q.dtype) @ v
    sink = view.sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(q.dtype) @ v


def _visible_in(view: AttentionView, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask of the keys that each of the last T positions may see: bool [B, 1, T, S]."""
    queries, keys = q.shape[2], k.shape[2]
    places = torch.arange(keys, device=q.device)
    distance = places[keys - queries :, None] - places
    seen = (distance >= 0).expand(len(q), 1, queries, keys)
    if view.window is not None:
        seen = seen & (distance < view.window)
    if view.documents is None:
        return seen
    first = places - view.documents.positions().to(
        q.device
    )  # [B, S], the first token of each token's document
    return seen & (first[:, None, keys - queries :, None] == first[:, None, None])


def _visible(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask of the keys [S] that each of the last T positions may see: bool [T, S]."""
    queries, keys = q.shape[2], k.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


class _BlockedAttention(torch.autograd.Function):
    """Attention in blocks of queries: [B, H, T, K] and twice [B, N, T, K] -> [B, T, H, K]."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, t, size = q.shape
        n = k.shape[1]
        q, k, v = q.reshape(b * n, h // n, t, size), k.reshape(b * n, t, size), v.reshape(b * n, t, size)
        out = q.new_empty(b, t, n, h // n, size)
        keep = t <= _KEEP_UP_TO and any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        kept = []
        for start, stop in _blocks(t):
            weights = _weights(q[:, :, start:stop].flatten(1, 2), k, start, stop)  # [BN, G·Q, stop]
            block = torch.bmm(weights, v[:, :stop]).view(b, n, h // n, stop - start, size)
            out[:, start:stop] = block.permute(0, 3, 1, 2, 4)
            if keep:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        return out.view(b, t, h, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        rows, group, t, size = q.shape
        b = grad.shape[0]
        grad = grad.view(b, t, rows // b, group, size).permute(0, 2, 3, 1, 4)  # [B, N, G, T, K]
        d_q = torch.empty_like(q)
        # Every block adds to the gradients of earlier keys: in 16 bits the sum would lose the later addends.
        d_k = torch.zeros(k.shape, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        d_v = torch.zeros_like(d_k)
        for i, (start, stop) in enumerate(_blocks(t)):
            q_i = q[:, :, start:stop].flatten(1, 2)  # [BN, G·Q, K]
            g_i = grad[:, :, :, start:stop].reshape(rows, -1, size)
            weights = kept[i] if kept else _weights(q_i, k, start, stop)
            d_weights = torch.bmm(g_i, v[:, :stop].mT)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(size**-0.5)
            d_q[:, :, start:stop] = torch.bmm(d_scores, k[:, :stop]).view(rows, group, -1, size)
            _add_product(d_k[:, :stop], d_scores.mT, q_i)
            _add_product(d_v[:, :stop], weights.mT, g_i)
        n = rows // b
        d_k, d_v = d_k.to(k.dtype), d_v.to(v.dtype)
        return d_q.view(b, n * group, t, size), d_k.view(b, n, t, size), d_v.view(b, n, t, size)


def _blocks(t: int) -> list[tuple[int, int]]:
    """Return the ranges of queries taken at once: short enough to skip the triangle, long enough for a fast product."""
    size = 64 if t <= 256 else 128
    return [(start, min(start + size, t)) for start in range(0, t, size)]


def _weights(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """Return the attention weights of queries [start, stop), groups stacked: [BN, G·Q, K] -> [BN, G·Q, stop]."""
    scores = torch.bmm(q, k[:, :stop].mT).mul_(q.shape[-1] ** -0.5)
    queries = stop - start
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1)
    scores.view(len(q), -1, queries, stop)[..., start:].masked_fill_(later, float("-inf"))
    return scores.softmax(-1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)
