"""Choice between the two forms of a kernel: Triton's on an accelerator that it serves, else the plain one.

A kernel has a plain form, in torch operations, which is the reference and runs everywhere; some have a second form,
one launch on a device (``fused/``). This file alone decides which form runs:

    on the CPU           the plain form
    fp64                 the plain form, on every device: checks in fp64 check the reference itself
    Triton is missing    the plain form: pip install triton
    a compiler traces    the plain form, which the compiler fuses; only dropout stays one operation

Without any name in ``DEVICES`` the plain form runs everywhere, which shows whether a kernel is at fault.

[Note: compiled once]
Triton compiles a kernel again for each integer argument that is 1, or newly divisible by 16. Numbers of rows change
from batch to batch, and a compilation takes 0.3 to 2 s in which all other ranks wait. So the kernels name their numbers
of rows in ``do_not_specialize``.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICES: frozenset[str] = frozenset({"cuda"} if importlib.util.find_spec("triton") else ())
"""Device types that the kernels serve; torch calls AMD's "cuda" too."""


class KernelTarget:
    """The type of the device for which kernels are chosen."""

    type: str | None = None
    """Type of the device; None: that on which the tensors lie."""


_TARGET = KernelTarget()


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Choose the kernels of another device inside the ``with`` block, for a pass on shapes (simulate/passes.py).

    Tensors with numbers must not be used inside. Triton counts as installed.

    Args:
        device_type: Type of the device, such as ``cuda``.
    """
    before, _TARGET.type = _TARGET.type, device_type
    try:
        yield
    finally:
        _TARGET.type = before


def kernel_device(tensor: Tensor) -> str:
    """Return the type of the device for which a kernel on ``tensor`` is chosen."""
    return _TARGET.type or tensor.device.type


def fused(*tensors: Tensor) -> bool:
    """Return whether Triton's form serves these tensors."""
    devices = DEVICES if _TARGET.type is None else {"cuda"}
    return all(kernel_device(tensor) in devices and tensor.dtype != torch.float64 for tensor in tensors)


@cache
def has_grouped_mm(device: torch.device) -> bool:
    """Return whether torch multiplies groups of bf16 rows in one launch on this device, without waiting for the host.

    On other devices, and on Windows, ``torch.nn.functional.grouped_mm`` reads the groups' sizes and loops.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and sys.platform != "win32"
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(device)[0] in _MAJORS_OF_GROUPED_MM
    )


_MAJORS_OF_GROUPED_MM = (9, 10)
"""Major compute capabilities of torch's kernel: Hopper, and Blackwell of data centers."""
