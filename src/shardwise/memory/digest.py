"""Digest: a number of 64 bits for the bytes of a tensor, in which every byte and its place count.

    digest = Σ_i word_i · (2 i + 1)   modulo 2^64        word_i: eight bytes

Every factor is odd, so a change of any one word changes the digest. The sum does not depend on the order in which a
device adds, and no number leaves the device.

Cost: one read of the memory, and 4 MiB beside it.
"""

import torch
from torch import Tensor

_WORDS = 1 << 18
"""Words that are multiplied at once."""


def digest(memory: Tensor) -> Tensor:
    """Return the digest of a contiguous tensor as an int64 tensor [] on its device."""
    flat = memory.detach().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    total = flat[whole:].sum(dtype=torch.int64)
    words = flat[:whole].view(torch.int64)
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        factors = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=memory.device)
        total += (part * factors).sum()
    return total
