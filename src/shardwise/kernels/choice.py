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

import torch
from torch import Tensor

DEVICES: frozenset[str] = frozenset({"cuda"} if importlib.util.find_spec("triton") else ())
"""Device types that the kernels serve; torch calls AMD's "cuda" too."""


def fused(*tensors: Tensor) -> bool:
    """Return whether Triton's form serves these tensors."""
    return all(tensor.device.type in DEVICES and tensor.dtype != torch.float64 for tensor in tensors)
