"""Moments in 16 or 8 bits: decoded a chunk at a time, updated in fp32, and encoded again.

    bf16                 x, rounded up or down at random, so that the mean is x
    int8, signed         x = ±q² · 4^e           q = 0 .. 127       first moments: exp_avg, momentum_buffer
    int8, of squares     x =  q⁴ · 16^e          q = 0 .. 255       second moments: exp_avg_sq, square_avg ...

e is the smallest exponent with which the block's largest number has a q; a block is 16 elements, and e a byte of it.
q is rounded up or down at random like bf16, in proportion to x, so that the mean is x.

Why at random: with beta2 = 0.999 a second moment moves by less than a thousandth a step, far below half the distance of
two neighbours in either form. Rounded to the nearest one it would never move again; at random it moves as often as it
should.

Why roots: an update is m / sqrt(v). Linear codes of v end at max / 255, where most of a block lies (sqrt(v) spreads
over decades), and a v that is rounded to 0 makes m / (0 + eps) explode. So it is sqrt(v) that is coded, through its own
root: neighbours are 2/q apart, relative to sqrt(v), and reach 128² to 255² times below the largest. A v that is not 0
never gets below one step: what is smaller is raised to it, which makes its update smaller. The same root serves m,
where 0 harms nobody. Dettmers et al. found the same two needs, many magnitudes in a block and blocks small enough that
an outlier spoils few neighbours, and answered them with a tree of exponents and blocks of 2048 with scales in fp32.

Powers of two as scales: every number that was decoded is encoded to itself, whatever the random bits and the block's
new exponent are (4^e is two steps of q to one), so what is loaded and saved again does not wander, and e takes a byte.

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
from shardwise.optim.rounding import Rounding
from shardwise.plan.state_form import BLOCK, StateForm, stored_dtype, stored_elements

SIGNED = ("exp_avg", "momentum_buffer")
SQUARES = ("exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")
"""Never negative."""


def refused(form: StateForm, labels: Sequence[str]) -> str:
    """Why moments of these names have no such form; "" where they have."""
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
    """The moments of one bucket's owned range, flat, by label. ``rounding``: of the same range."""

    def __init__(
        self,
        form: StateForm,
        labels: Sequence[str],
        elements: int,
        device: torch.device,
        rounding: Rounding,
        into: Mapping[str, Tensor] | None = None,
    ):
        """``into``: memory that they lie in, by label, instead of their own; its numbers are another's until they are
        written."""
        assert form != "fp32", "moments as the masters need no code"
        self._form: StateForm = form
        self._elements = elements
        self._rounding = rounding
        dtype, stored = stored_dtype(form, torch.float32), stored_elements(form, elements)
        self.tensors = {
            label: torch.zeros(stored, dtype=dtype, device=device) if into is None else into[label].detach()
            for label in labels
        }
        """As they are kept."""

    @property
    def labels(self) -> tuple[str, ...]:
        """In the order that all ranks have."""
        return tuple(self.tensors)

    def read(self, label: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop): fp32, a copy."""
        stored = self.tensors[label]
        if self._form == "bf16":
            return stored[start:stop].float()
        first, last = start // BLOCK, -(-stop // BLOCK)
        q = stored[first * BLOCK : min(last * BLOCK, self._elements)]
        exponents = stored[self._elements + first : self._elements + last]
        decoded = from_int8(q, exponents.view(torch.int8), label in SQUARES)
        return decoded[start - first * BLOCK : stop - first * BLOCK]

    def write(self, label: str, start: int, values: Tensor, bits: Tensor | None = None) -> None:
        """``values`` [N] from element ``start`` on, rounded by ``bits`` (int16 [N]) or, without, to the nearest."""
        stored = self.tensors[label]
        values, stop = values.to(stored.device, torch.float32), start + values.numel()
        if self._form == "bf16":
            stored[start:stop] = to_bf16(values, bits)
            return
        first, last = start // BLOCK, -(-stop // BLOCK)
        begin, end = first * BLOCK, min(last * BLOCK, self._elements)
        if (begin, end) != (start, stop):  # the others of a block that is written in part keep what they are
            whole = self.read(label, begin, end)
            whole[start - begin : stop - begin] = values
            values, bits = whole, None if bits is None else pad(bits, (start - begin, end - stop))
        q, exponents = to_int8(values, bits, label in SQUARES)
        stored[begin:end] = q
        stored[self._elements + first : self._elements + last] = exponents.view(torch.uint8)

    def bits(self, start: int, stop: int, step: int) -> Tensor:
        """To round elements [start, stop) of all of them by, in their order: int16 [K, N]."""
        device = next(iter(self.tensors.values())).device
        return self._rounding.bits(start, stop, step, len(self.tensors), device)


class CodedPart(NamedTuple):
    """The moments from element ``start`` on, in an update before which there were ``step`` steps."""

    moments: CodedMoments
    start: int
    step: int

    def chunk(self, here: slice) -> list[Tensor]:
        """Elements of all of them, to be updated: fp32 [N] each."""
        moments, start = self.moments, self.start
        return [moments.read(label, start + here.start, start + here.stop) for label in moments.labels]

    def keep(self, here: slice, updated: Sequence[Tensor]) -> None:
        """What became of them."""
        start, stop = self.start + here.start, self.start + here.stop
        bits = self.moments.bits(start, stop, self.step)
        for label, values, own in zip(self.moments.labels, updated, bits, strict=True):
            self.moments.write(label, start, values, own)
