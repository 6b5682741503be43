"""Vectors in files as numbers of 16 or 8 bits, read as fp32.

    bf16    the upper half of an fp32, rounded to nearest
    int8    q = round(v / scale),  scale = max |v| of the row / 127;  read as q · scale

Cost:   2 bytes a number; 1 byte a number and 4 bytes a row.
Shapes: M rows, D width, n rows that are read.
"""

from typing import Any

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


class CodedRows:
    """Rows of bf16 or int8 in a file, which are decoded to fp32 when they are read.

    Args:
        codes: The numbers in the file: int16 with the bits of bf16, or int8, [M, D].
        scales: The factor of each row of int8, [M]; None for bf16.
    """

    dtype = np.dtype(np.float32)
    """The dtype of what is read."""

    def __init__(self, codes: np.ndarray, scales: np.ndarray | None) -> None:
        self._codes, self._scales = codes, scales

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows: (M, D)."""
        return self._codes.shape

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return rows as fp32: [n] -> [n, D]."""
        codes = self._codes[rows]
        if self._scales is None:
            return (codes.astype(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        found: np.ndarray = codes * self._scales[rows][..., None]
        return found

    def copy(self) -> np.ndarray:
        """Return all rows as fp32: [M, D]."""
        return self[:]


def coded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [n, D] and fp32 scales [n] of vectors [n, D]; a row of zeros has the scale 0."""
    vectors = vectors.float()
    scales = vectors.abs().amax(1) / _MOST if vectors.shape[1] else vectors.new_zeros(len(vectors))
    factors = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (vectors / factors[:, None]).round().clamp(-_MOST, _MOST).to(torch.int8), scales
