"""Kernels of a device in a pass on shapes, on a machine without the device.

A build of torch for the CPU cannot compute gradients of tensors that say they lie on another device, so the tensors of
the pass lie on the CPU, and operations that have other kernels on the device are replaced by these:

    F.scaled_dot_product_attention    flash in 16 bits without a mask, else memory-efficient, else plain products, in
                                      the order of ``attention.backend``; the first two keep no T x T scores
    F.rms_norm                        one kernel, which keeps one number a row
    F.dropout                         one kernel, which keeps a mask of one byte an element
    kernels of this package           their forms for the device                                (kernels/choice.py)

All of them have results of the same shapes, so a pass holds on the device what it holds here. Assumed and not measured
on a device: workspaces that a kernel allocates and frees inside itself (cuDNN's convolutions), padding of head sizes,
and branches of a model's own code on ``x.device``.

Cost: one function call for each operation.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import TorchFunctionMode

from shardwise.kernels.choice import kernels_of
from shardwise.kernels.operation import KIND

_ATEN = torch.ops.aten
_LARGEST_HEAD = 256
"""Largest head size of flash attention."""


@contextmanager
def kernels_like(device_type: str, attention: Collection[str] = ()) -> Iterator[None]:
    """Run the kernels of a device type on tensors without numbers inside the ``with`` block.

    Args:
        device_type: Type of the device; other types than ``cuda`` change nothing.
        attention: Names of the attention kernels to choose from, as in ``attention.backend``; empty: all.
    """
    if device_type != "cuda":
        yield
        return
    with kernels_of(device_type), DeviceOperations(attention):
        yield


class DeviceOperations(TorchFunctionMode):
    """Replaces torch's operations that have other kernels on a CUDA device; see the module's docstring.

    Args:
        attention: Names of the attention kernels to choose from; empty: all.
    """

    def __init__(self, attention: Collection[str] = ()) -> None:
        super().__init__()
        self._attention = frozenset(attention)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.rms_norm:
            return _normed(*args, **kwargs)
        if func is F.dropout and not kwargs.get("inplace"):
            return _dropped(*args, **kwargs)
        if hasattr(func, KIND):  # a function of this package, whose own operations are replaced too
            with self:
                return func.__wrapped__(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        is_narrow = query.dtype in (torch.float16, torch.bfloat16)
        fits = is_narrow and attn_mask is None and query.shape[-1] <= _LARGEST_HEAD and query.dim() == 4
        if fits and self._has("flash", "flash3", "cudnn"):
            flash = _ATEN._scaled_dot_product_flash_attention
            found: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return found
        is_grouped = enable_gqa and query.shape[1] != key.shape[1]
        if query.dim() == 4 and not is_grouped and query.dtype != torch.float64 and self._has("efficient"):
            bias = None if attn_mask is None else _bias(query, key, attn_mask)
            keeps = torch.is_grad_enabled() and query.requires_grad
            efficient = _ATEN._scaled_dot_product_efficient_attention
            out: Tensor = efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
            return out
        plain = _ATEN._scaled_dot_product_attention_math
        scores: Tensor = plain(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return scores

    def _has(self, *names: str) -> bool:
        return not self._attention or not self._attention.isdisjoint(names)


def _bias(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """Return the mask as addends of the scores, [B, H, T, S]."""
    if mask.dtype == torch.bool:
        mask = torch.empty(mask.shape, dtype=query.dtype, device=query.device)
    return mask.expand(*query.shape[:3], key.shape[2])


def _normed(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    found: Tensor = _NormShapes.apply(input, weight, len(normalized_shape))
    return found


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return F.dropout(input, p, training, inplace)
    found: Tensor = _ATEN.native_dropout(input, p, True)[0]
    return found


class _NormShapes(torch.autograd.Function):
    """Shapes of torch's RMSNorm on a device: the forward pass keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.new_empty(x.shape[: x.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return x * 1.0  # as the kernel, reads and writes each element once

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, _, *weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad + x, torch.empty_like(weight[0]) if weight else None, None  # reads two, writes one
