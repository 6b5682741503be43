"""Moments in 16 or 8 bits: decoded a chunk at a time, updated in fp32, and encoded again.

    bf16                 x, rounded up or down at random, so that the mean is x
    int8, signed         x = ±q² · 4^e           q = 0 .. 127       first moments: exp_avg, momentum_buffer
    int8, of squares     x =  q⁴ · 16^e          q = 0 .. 255       second moments: exp_avg_sq, square_avg ...

e is the smallest exponent with which the block's largest number has a q; a block is 16 elements, and e takes one byte
of it. q is rounded up or down at random like bf16, in proportion to x, so that the mean is x.

Why at random: with beta2 = 0.999 a second moment moves by less than a thousandth a step, far below half the distance of
two neighbours in either form. Rounded to the nearest, it would never move again; at random it moves as often as it
should.

Why roots: an update is m / sqrt(v). Linear codes of v end at max / 255, where most of a block lies (sqrt(v) spreads
over decades), and a v that is rounded to 0 makes m / (0 + eps) explode. So sqrt(v) is coded, through its own root:
neighbours are 2/q apart, relative to sqrt(v), and reach 128² to 255² times below the largest. A v that is not 0 never
gets below one step: smaller numbers are raised to it, which makes their updates smaller. The same root serves m, where
0 is harmless. Dettmers et al. found the same two needs, many magnitudes in a block and blocks small enough that an
outlier spoils few neighbours, and met them with a tree of exponents and blocks of 2048 with scales in fp32.

Why powers of two as scales: every number that was decoded is encoded to itself, whatever the random bits and the
block's new exponent are (4^e is two steps of q to one), so numbers that are loaded and saved again do not drift, and e
takes a byte.

Blocks with an infinite or NaN element decode to NaN: int8 hides no overflow.

Paper: Dettmers et al. 2022, arXiv:2110.02861 (8-bit optimizers). bf16 with stochastic rounding: Zamirai et al. 2020,
       arXiv:2010.06192.
Cost:  2 or 17/16 bytes an element; chunks of fp32 while an update goes over them.
Shapes: N elements of the master, K moments.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels.moment_codes import from_int8, to_bf16, to_int8
from shardwise.optim.rounding import StochasticRounding
from shardwise.plan.state_form import BLOCK, StateForm, stored_dtype, stored_elements

SIGNED = ("exp_avg", "momentum_buffer")
"""Labels of moments that may be negative."""
SQUARES = ("exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")
"""Labels of moments that are never negative."""


def refused(form: StateForm, labels: Sequence[str]) -> str:
    """Return the reason why moments of these names have no such form, or an empty string if they have."""
    if form == "fp32":
        return ""
    for label in labels:
        if label == "max_exp_avg_sq":
            return "keeps max_exp_avg_sq (amsgrad): a maximum keeps what was rounded up, and grows without a reason"
        if label == "grad_avg":
            return "takes grad_avg² (centered) from square_avg: rounded, the difference may be negative"
        if label not in (*SIGNED, *SQUARES):
            return f"keeps {label}, of which nobody has said how it may be rounded"
    return ""


class CodedMoments:
    """Moments of one bucket's owned range in 16 or 8 bits, flat, by label.

    Args:
        form: bf16 or int8.
        labels: labels of the moments, in the order that all ranks have.
        elements: number of elements of the range.
        device: device of the moments.
        rounding: random numbers of the same range.
        into: memory for the moments, by label; its content is not valid until it is written. None allocates memory.
    """

    def __init__(
        self,
        form: StateForm,
        labels: Sequence[str],
        elements: int,
        device: torch.device,
        rounding: StochasticRounding,
        into: Mapping[str, Tensor] | None = None,
    ):
        assert form != "fp32", "moments as the masters need no code"
        self._form: StateForm = form
        self._elements = elements
        self._rounding = rounding
        dtype, stored = stored_dtype(form, torch.float32), stored_elements(form, elements)
        self.tensors = {
            label: torch.zeros(stored, dtype=dtype, device=device) if into is None else into[label].detach()
            for label in labels
        }
        """Stored form of each moment, by label."""

    @property
    def block(self) -> int:
        """Number of neighbouring elements that share a scale."""
        return BLOCK if self._form == "int8" else 1

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the moments, in the order that all ranks have."""
        return tuple(self.tensors)

    def read(self, label: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a moment: fp32, a copy."""
        stored = self.tensors[label]
        if self._form == "bf16":
            return stored[start:stop].float()
        first, last = start // BLOCK, -(-stop // BLOCK)
        q = stored[first * BLOCK : min(last * BLOCK, self._elements)]
        exponents = stored[self._elements + first : self._elements + last]
        decoded = from_int8(q, exponents.view(torch.int8), label in SQUARES)
        return decoded[start - first * BLOCK : stop - first * BLOCK]

    def write(self, label: str, start: int, values: Tensor, bits: Tensor | None = None) -> None:
        """Store ``values`` [N] from element ``start`` on, rounded by ``bits`` (int16 [N]) or to the nearest."""
        stored = self.tensors[label]
        values, stop = values.to(stored.device, torch.float32), start + values.numel()
        if self._form == "bf16":
            stored[start:stop] = to_bf16(values, bits)
            return
        first, last = start // BLOCK, -(-stop // BLOCK)
        begin, end = first * BLOCK, min(last * BLOCK, self._elements)
        if (begin, end) != (start, stop):  # keep the rest of a block that is written in part
            whole = self.read(label, begin, end)
            whole[start - begin : stop - begin] = values
            values, bits = whole, None if bits is None else pad(bits, (start - begin, end - stop))
        q, exponents = to_int8(values, bits, label in SQUARES)
        stored[begin:end] = q
        stored[self._elements + first : self._elements + last] = exponents.view(torch.uint8)

    def bits(self, start: int, stop: int, step: int) -> Tensor:
        """Return random numbers to round elements [start, stop) of all moments, in their order: int16 [K, N]."""
        device = next(iter(self.tensors.values())).device
        return self._rounding.bits(start, stop, step, len(self.tensors), device)


class CodedPart(NamedTuple):
    """Moments from element ``start`` on, in an update that ``step`` steps preceded."""

    moments: CodedMoments
    start: int
    step: int

    def chunk(self, here: slice) -> list[Tensor]:
        """Return elements of all moments to be updated: fp32 [N] each."""
        moments, start = self.moments, self.start
        return [moments.read(label, start + here.start, start + here.stop) for label in moments.labels]

    def keep(self, here: slice, updated: Sequence[Tensor]) -> None:
        """Store the updated elements of all moments."""
        start, stop = self.start + here.start, self.start + here.stop
        bits = self.moments.bits(start, stop, self.step)
        for label, values, own in zip(self.moments.labels, updated, bits, strict=True):
            self.moments.write(label, start, values, own)
