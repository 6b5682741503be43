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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class DevicePeak(NamedTuple):
    """Dense peak of one device in FLOP/s, from its vendor's data sheet."""

    name: str
    """Regular expression for the whole device name, without the vendor's name at its start."""
    fp32: float
    """Peak without TF32, as torch computes by default."""
    fp16: float
    bf16: float | None
    """Peak in bf16; None if the hardware has no matrix units for the type."""


# Matrix units with 32-bit accumulation, without sparsity. Data sheets often print the figure with 2:4 sparsity, or
# (GeForce) with 16-bit accumulation: both are twice what a training step can reach. Whole names only: a slice of a
# device (MIG), a laptop part or an export variant shares the beginning of the name and not the peak.
PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak(r"GB200", 80e12, 2500e12, 2500e12),
    DevicePeak(r"B200", 75e12, 2250e12, 2250e12),
    DevicePeak(r"GH200 \d+GB", 67e12, 989.4e12, 989.4e12),
    DevicePeak(r"H200", 67e12, 989.4e12, 989.4e12),
    DevicePeak(r"H[12]00 NVL", 60e12, 835.5e12, 835.5e12),
    DevicePeak(r"H100 PCIe", 51e12, 756e12, 756e12),
    DevicePeak(r"H100 (80GB HBM3|SXM5 80GB)", 67e12, 989.4e12, 989.4e12),
    DevicePeak(r"A100(-SXM4?|-PCIE| 80GB PCIe)(-[48]0GB)?", 19.5e12, 312e12, 312e12),
    DevicePeak(r"A40", 37.4e12, 149.7e12, 149.7e12),
    DevicePeak(r"A30", 10.3e12, 165e12, 165e12),
    DevicePeak(r"A10", 31.2e12, 125e12, 125e12),
    DevicePeak(r"V100S-PCIE-32GB", 16.4e12, 130e12, None),
    DevicePeak(r"V100-PCIE-(16|32)GB", 14e12, 112e12, None),
    DevicePeak(r"V100-SXM2-(16|32)GB", 15.7e12, 125e12, None),
    DevicePeak(r"T4", 8.1e12, 65e12, None),
    DevicePeak(r"L40S", 91.6e12, 362.05e12, 362.05e12),
    DevicePeak(r"L40", 90.5e12, 181.05e12, 181.05e12),
    DevicePeak(r"L4", 30.3e12, 121e12, 121e12),
    DevicePeak(r"GeForce RTX 5090", 104.8e12, 209.5e12, 209.5e12),
    DevicePeak(r"GeForce RTX 4090", 82.6e12, 165.2e12, 165.2e12),
    DevicePeak(r"GeForce RTX 3090 Ti", 40e12, 80e12, 80e12),
    DevicePeak(r"GeForce RTX 3090", 35.6e12, 71e12, 71e12),
    DevicePeak(r"Instinct MI3[02][05]X", 163.4e12, 1307.4e12, 1307.4e12),
)
_VENDOR = re.compile(r"^(NVIDIA|Tesla|AMD|Quadro)\s+")
_SECONDS_PER_DAY = 86_400


def peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of one device for matrix products, in FLOP/s.

    Args:
        device_name: Name of the device, as torch reports it.
        dtype: Dtype of the products.

    Returns:
        FLOP/s from the vendor's data sheet; None if unknown.
    """
    short = device_name.strip()
    while (shorter := _VENDOR.sub("", short)) != short:
        short = shorter
    for entry in PEAKS:
        if re.fullmatch(entry.name, short):
            known = {torch.float32: entry.fp32, torch.float16: entry.fp16, torch.bfloat16: entry.bf16}
            return known.get(dtype)
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
