"""Which form of a kernel runs: Triton's where a tensor lies on an accelerator that it serves, else the plain one.

A kernel has a plain form, in torch operations, which is the reference and runs everywhere; some have a second one
beside it, one launch on a device (``fused/``). Whether that one runs is said here and nowhere else:

    on the CPU           the plain form
    fp64                 the plain form, on every device: what is checked in fp64 is the reference itself
    Triton is missing    the plain form: pip install triton
    a compiler traces    the plain form, which it fuses by itself; dropout alone stays one operation

``DEVICES`` without a name in it is the plain form everywhere, to find out whether a kernel is at fault.
"""

import importlib.util

import torch
from torch import Tensor

DEVICES: frozenset[str] = frozenset({"cuda"} if importlib.util.find_spec("triton") else ())
"""Device types that the kernels serve; torch calls AMD's "cuda" too."""


def fused(*tensors: Tensor) -> bool:
    """Whether Triton's form serves these tensors."""
    return all(tensor.device.type in DEVICES and tensor.dtype != torch.float64 for tensor in tensors)
