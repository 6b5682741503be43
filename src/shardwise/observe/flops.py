"""Floating-point operations: the need of a model, the peak of a device, and the share between them.

    needed per token, forward and backward    F = 6·P + 12·L·T·D
    model FLOP/s utilisation                  mfu = F · tokens / (step_s · sum of the devices' peaks)
    compute so far                            pf_days = FLOPs / (1e15 · 86400)

If no formula for a model is known, ``FlopsCounter`` counts the products of one real step instead. A processor has no
data sheet: its peak is the best of a few matrix products that ``measured_peak`` runs.

P counts the weights that take part in a matrix product (an embedding that is only looked up does not, a head does,
also when it is tied to the embedding); each costs one multiplication and one addition forward and twice that
backward. The second term is the attention scores and their use; it is counted as if not causal, as the literature
does, so that figures compare. Recomputation is not counted: the figure is the work that the model needs, not the work
that was executed.

Papers: Kaplan et al. 2020, arXiv:2001.08361 (6·P); Chowdhery et al. 2022, arXiv:2204.02311, appendix B (mfu).
Shapes: L layers, T tokens in a sequence, D width of the attention (heads times head size).
"""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise.base.hardware_files import shipped_tables

_VENDOR = re.compile(r"^(NVIDIA|Tesla|AMD|Quadro)\s+")
_SECONDS_PER_DAY = 86_400
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of one device for matrix products, in FLOP/s.

    Args:
        device_name: Name of the device, as torch reports it.
        dtype: Dtype of the products.

    Returns:
        FLOP/s from the vendor's data sheet (base/devices.json); None if unknown, or if the device has no matrix units
        for a 16-bit dtype.
    """
    name, kept = hardware_name(device_name), _DTYPES.get(dtype)
    if name is None or kept is None:
        return None
    return shipped_tables()[name].figures.get(f"peaks.{kept}")  # type: ignore[return-value]


def hardware_name(device_name: str) -> str | None:
    """Return the name of the shipped table that describes a device; None if there is none.

    Args:
        device_name: Name of the device, as torch reports it.
    """
    short = device_name.strip()
    while (shorter := _VENDOR.sub("", short)) != short:
        short = shorter
    for name, table in shipped_tables().items():
        if any(re.fullmatch(pattern, short) for pattern in table.devices):
            return name
    return None


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the :func:`peak` of a torch device; None for a processor, and for fp32 with TF32."""
    if device.type != "cuda" or (
        dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    ):
        return None
    return peak(torch.cuda.get_device_name(device), dtype)


def needed_per_token(matmul_parameters: int, layers: int, sequence: int, attention_width: int) -> int:
    """Return the FLOPs of one token in a transformer, forward and backward.

    Args:
        matmul_parameters: Weights that take part in a matrix product.
        layers: Number of layers.
        sequence: Tokens of a sequence.
        attention_width: Heads times head size.
    """
    return 6 * matmul_parameters + 12 * layers * sequence * attention_width


def mfu(flops: float, step_s: float, peaks: float | None) -> float | None:
    """Return the share of the peak that a step reached; None if unknown.

    Args:
        flops: FLOPs of the step.
        step_s: Seconds of the step.
        peaks: Peak of all devices together, in FLOP/s.
    """
    return None if peaks is None or step_s <= 0 else flops / (step_s * peaks)


def flops_text(flops: float) -> str:
    """Return FLOPs as text: ``45.2 GFLOP``."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= factor:
            return f"{flops / factor:.3g} {letter}FLOP"
    return f"{flops:.3g} FLOP"


def pf_days(flops: float) -> float:
    """Return FLOPs in petaflop/s-days."""
    return flops / (1e15 * _SECONDS_PER_DAY)


_PRODUCT = 512
"""Rows and columns of the matrices with which the peak is measured."""
_MEASURE_S = 0.05


def measured_peak(dtype: torch.dtype) -> float:
    """Return the FLOP/s of this process's threads in matrix products.

    The figure is the best of the products of two 512 x 512 matrices that run in 50 ms.
    """
    a, b = (torch.ones(_PRODUCT, _PRODUCT, dtype=dtype) for _ in range(2))
    best_s, end = math.inf, time.perf_counter() + _MEASURE_S
    torch.mm(a, b)
    while True:
        begin = time.perf_counter()
        torch.mm(a, b)
        now = time.perf_counter()
        best_s = min(best_s, now - begin)
        if now >= end:
            return 2 * _PRODUCT**3 / best_s


class FlopsCounter(TorchDispatchMode):
    """Counter of floating-point operations of matrix products, convolutions and attention inside ``with counter:``.

    Operations that the backward pass recomputes are left out: they run with gradients enabled, while a backward pass
    itself runs with gradients disabled. ``flops`` is the work that the model needs, not the work that was executed.
    Attention counts as if not causal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_repeated():
            self.flops += flops_of(func, args, kwargs, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call of a dispatcher operation; 0 if the operation is no product.

    Args:
        func: The operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        out: Its result.
    """
    name = str(getattr(func, "_overloadpacket", func))
    count = _COUNTS.get(name.removesuffix("_"))  # an in-place operation counts as its plain form
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if passes := _CPU_ATTENTION.get(name):
        query, key = (args[0], args[1]) if passes == 1 else (args[1], args[2])
        return passes * _attention(query, key)
    return 0


_COUNTS = {str(packet): count for packet, count in flop_registry.items()}
_CPU_ATTENTION: Mapping[str, int] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 1,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 2,
}
"""Number of times two products, by operation that torch's own table leaves out."""


def _attention(query: Tensor, key: Tensor) -> int:
    """Return the FLOPs of scores and their use: 4·B·H·T·S·K."""
    return 4 * query.numel() * key.shape[-2]


def is_repeated() -> bool:
    """Return True inside a forward pass that a backward pass recomputes."""
    return torch._C._current_autograd_node() is not None and torch.is_grad_enabled()
