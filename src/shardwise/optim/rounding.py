"""Random numbers for rounding moments, each a function of the element's place in the whole parameter.

    bits(e, k, t) = 16 bits, number e of Philox's substream (t, k, 0) under the parameter's key
                    e: place in the whole parameter, k: which moment, t: optimizer steps before this one

So an element is rounded alike on every layout, whichever rank holds it and wherever it lies there, and again alike in a
run that was resumed.

Cost:  a draw of 64 bits for four elements and moment, about 0.6 ns an element on a CPU; on a device the 410 integer
       operations of ``philox.words_on`` on a sixteenth of the elements. A parameter that is cut inside its rows (tp) is
       drawn run by run: 4 microseconds for each, or with the elements between them.
Shapes: K moments, N elements.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import philox
from shardwise.plan.placement import Run

_LANES = 4
"""Elements that a 64-bit word serves."""
_NEAR = 1 << 12
"""Elements between two runs that are drawn on a CPU for nothing rather than to begin anew."""


class RoundedPart(NamedTuple):
    """Elements [start, stop) of a flat tensor that are one parameter's."""

    start: int
    stop: int
    key: int
    """Of the parameter."""
    runs: Callable[[int, int], Iterable[Run]]
    """How elements [a, b) of the part, counted from its begin, lie in the whole parameter."""


class Rounding:
    """Of one flat tensor. ``parts`` in the order in which they lie."""

    def __init__(self, parts: Sequence[RoundedPart]):
        self._parts = parts
        self._starts = [part.start for part in parts]

    def bits(self, start: int, stop: int, step: int, kinds: int, device: torch.device) -> Tensor:
        """For elements [start, stop) of the flat tensor: int16 [K, N]; 0 between parts."""
        out = torch.zeros(kinds, stop - start, dtype=torch.int16, device=device)
        for part in self._parts[max(bisect_right(self._starts, start) - 1, 0) :]:
            if part.start >= stop:
                break
            first, last = max(part.start, start), min(part.stop, stop)
            if first >= last:
                continue
            found = part.runs(first - part.start, last - part.start)
            for together in _near(found, _NEAR if device.type == "cpu" else None):
                begin, end = together[0].full, together[-1].full + together[-1].elements
                drawn = _drawn(part.key, begin, end, step, kinds, device)
                for run in together:
                    place = part.start + run.local - start
                    out[:, place : place + run.elements] = drawn[:, run.full - begin :][:, : run.elements]
        return out


def _near(runs: Iterable[Run], gap: int | None) -> Iterator[list[Run]]:
    """Runs that are drawn together: those behind one another, at most ``gap`` elements apart (None: any)."""
    together: list[Run] = []
    for run in runs:
        if together:
            between = run.full - together[-1].full - together[-1].elements
            if between < 0 or (gap is not None and between > gap):
                yield together
                together = []
        together.append(run)
    if together:
        yield together


def _drawn(key: int, start: int, stop: int, step: int, kinds: int, device: torch.device) -> Tensor:
    """Of elements [start, stop) of a parameter: int16 [K, N]."""
    first, last = start // _LANES, -(-stop // _LANES)
    if device.type == "cpu":
        words = torch.from_numpy(
            philox.words_of(key, first, last, [(step, kind, 0) for kind in range(kinds)])
        )
    else:
        words = philox.words_on(device, key, first, last, (step, 0, 0), kinds).contiguous()
    return words.view(torch.int16)[:, start - first * _LANES : stop - first * _LANES]
