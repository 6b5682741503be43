"""Uniform random numbers of many rows on a device, each row at its own place of its own substream.

    u(i, c) = uniform number start_i + c of Philox's substream (call, name_i, step) under ``key``       (philox.py)

The numbers are those of ``philox.uniform_of``, to the bit: words are integers, and the step from a word to a number in
(0, 1) is exact in fp64. Neither the rows' starts nor their names come to the host.

Cost:   with Triton one launch; else 430 operations on a quarter of the numbers. Neither was measured on a device.
Shapes: n rows, W numbers of a row.
"""

import torch
from torch import Tensor

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation
from shardwise.kernels.philox import signed, words_at

_WORDS = 4
"""Number of words that one step of Philox's counter yields."""


def uniform_rows(starts: Tensor, names: Tensor, width: int, key: int, call: int, step: int) -> Tensor:
    """Return ``width`` numbers in (0, 1) for each row, on the rows' device: fp64 [n, width].

    Args:
        starts: index of each row's first number in its substream, int64 [n].
        names: second word of each row's substream, int64 [n].
        width: number of numbers of a row.
        key: key of the stream (``philox.key_of``).
        call: first word of all substreams.
        step: third word of all substreams.
    """
    out: Tensor = _uniform_rows(starts, names, width, signed(key), call, step)
    return out


@device_operation(
    "uniform_rows(Tensor starts, Tensor names, SymInt width, SymInt key, SymInt call, SymInt step) -> Tensor",
    lambda starts, names, width, *numbers: starts.new_empty(len(starts), width, dtype=torch.float64),
)
def _uniform_rows(starts: Tensor, names: Tensor, width: int, key: int, call: int, step: int) -> Tensor:
    if not fused(starts, names):
        return plain_uniform_rows(starts, names, width, key, call, step)
    from shardwise.kernels.fused import uniform as kernels

    return kernels.uniform_rows(starts.contiguous(), names.contiguous(), width, key, call, step)


def plain_uniform_rows(starts: Tensor, names: Tensor, width: int, key: int, call: int, step: int) -> Tensor:
    """Return ``uniform_rows`` in plain torch operations: the reference. ``key`` is a signed number."""
    if not len(starts):
        return starts.new_empty(0, width, dtype=torch.float64)
    steps = -(-(width + _WORDS - 1) // _WORDS)  # of the counter; a row may begin inside of one
    blocks = starts.div(_WORDS, rounding_mode="floor")[:, None] + torch.arange(steps, device=starts.device)
    named = names[:, None].expand(blocks.shape).reshape(-1)
    words = words_at(blocks.view(-1), key % (1 << 64), (call, 0, step), names=named).view(len(starts), -1)
    places = starts.remainder(_WORDS)[:, None] + torch.arange(width, device=starts.device)
    raw = words.gather(1, places)
    # 52 bits under the exponent of 1 make 1 + k / 2^52; the subtraction is exact, and the result is neither 0 nor 1.
    unit = (raw >> 12) & ((1 << 52) - 1) | (0x3FF << 52)
    return unit.view(torch.float64) - (1.0 - 2.0**-53)
