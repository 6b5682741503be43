"""In which form the optimizer's moments are kept, and what that takes.

    fp32    as the masters
    bf16    16 bits an element
    int8    8 bits an element, and 8 for each block of 16: behind all elements, in the same flat tensor

The numbers themselves are ``optim/coded_moments.py``'s.
"""

from typing import Literal

import torch

StateForm = Literal["fp32", "bf16", "int8"]

BLOCK = 16
"""Elements that share a scale. Parameters and ranges of ranks begin at multiples of 64 bytes, of 16 elements or 32
(plan/unit.py), so that a block belongs to one parameter, and to the same elements of it on any number of ranks."""

_DTYPES = {"bf16": torch.bfloat16, "int8": torch.uint8}


def stored_dtype(form: StateForm, master: torch.dtype) -> torch.dtype:
    """Of the flat tensor that holds a moment; ``master``: of the masters."""
    return _DTYPES.get(form, master)


def stored_elements(form: StateForm, elements: int) -> int:
    """Of that tensor, for so many elements of the master."""
    return elements + (-(-elements // BLOCK) if form == "int8" else 0)
