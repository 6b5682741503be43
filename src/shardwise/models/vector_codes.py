"""Vectors in files as numbers of 16 or 8 bits, read as fp32.

    bf16    the upper half of an fp32, rounded to nearest
    int8    q = round(v / scale),  scale = max |v| of the row / 127;  read as q · scale

Cost:   2 bytes a number; 1 byte a number and 4 bytes a row.
Shapes: M rows, D width, n rows that are read.
"""

import numpy as np
import torch
from torch import Tensor

FORMS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
"""The dtype in files for each form of vectors."""
_MOST = 127


def decoded(codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Return vectors from the numbers in a file: fp32 from bf16 and int8, and other dtypes as they are.

    Args:
        codes: int16 with the bits of bf16, int8, or floating numbers, [n, D].
        scales: The factor of each row of int8, [n]; None for other dtypes.
    """
    if scales is not None:
        found: np.ndarray = codes * scales[:, None]
        return found
    if codes.dtype == np.int16:
        return (codes.astype(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return codes


def coded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [n, D] and fp32 scales [n] of vectors [n, D]; a row of zeros has the scale 0."""
    vectors = vectors.float()
    scales = vectors.abs().amax(1) / _MOST if vectors.shape[1] else vectors.new_zeros(len(vectors))
    factors = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (vectors / factors[:, None]).round().clamp(-_MOST, _MOST).to(torch.int8), scales
