"""Forms in which the optimizer's moments are stored, and their sizes.

    fp32    as the masters
    bf16    16 bits an element
    int8    8 bits an element, and 8 for each block of 16: behind all elements, in the same flat tensor

``optim/coded_moments.py`` encodes and decodes the values.
"""

from typing import Literal

import torch

StateForm = Literal["fp32", "bf16", "int8"]

BLOCK = 16
"""Elements that share a scale.

Parameters and ranges of ranks begin at multiples of 64 bytes, which are 16 or 32 elements (plan/unit.py). A block
therefore belongs to one parameter, and to the same elements of it on any number of ranks.
"""

_DTYPES = {"bf16": torch.bfloat16, "int8": torch.uint8}


def stored_dtype(form: StateForm, master: torch.dtype) -> torch.dtype:
    """Return the dtype of the flat tensor that holds a moment.

    Args:
        form: Form of the moment.
        master: Dtype of the masters.
    """
    return _DTYPES.get(form, master)


def stored_elements(form: StateForm, elements: int) -> int:
    """Return the elements of the flat tensor that holds a moment.

    Args:
        form: Form of the moment.
        elements: Elements of the master.
    """
    return elements + (-(-elements // BLOCK) if form == "int8" else 0)
