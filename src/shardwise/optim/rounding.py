"""Random numbers for rounding moments, each a function of the element's position in the whole parameter.

    bits(e, k, t) = 16 bits, number e of Philox's substream (t, k, 0) under the parameter's key
                    e: position in the whole parameter, k: index of the moment, t: optimizer steps before this one

So an element is rounded alike on every layout, whichever rank holds it and at any position, and again alike in a run
that was resumed.

Cost:  a draw of 64 bits for four elements and moment, about 1 ns an element on a CPU; on a device the 410 integer
       operations of ``philox.words_at`` on a sixteenth of the elements. A parameter that is cut inside its rows (tp) is
       drawn run by run, 8 microseconds for each, or with the elements between them.
Shapes: K moments, N elements.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels import philox
from shardwise.plan.placement import ContiguousRun

_LANES = 4
"""Number of elements that a 64-bit word serves."""
_NEAR = 1 << 12
"""Largest number of elements between two runs that a CPU draws and drops, because a new draw would cost more."""


class RoundedPart(NamedTuple):
    """Elements [start, stop) of a flat tensor that belong to one parameter."""

    start: int
    stop: int
    key: int
    """Key of the parameter's random numbers."""
    runs: Callable[[int, int], Iterable[ContiguousRun]]
    """Function that yields the runs of elements [a, b), counted from the part's start, in the whole parameter."""


class _RoundingDraw(NamedTuple):
    """Elements of one parameter that are drawn together."""

    key: int
    start: int
    stop: int
    """End of the positions in the whole parameter."""
    runs: Sequence[tuple[int, int, int]]
    """(position in the requested range, position in the whole parameter, elements) of each run."""


class StochasticRounding:
    """Random numbers for the elements of one flat tensor.

    Args:
        parts: parts of the tensor by parameter, in their order.
    """

    def __init__(self, parts: Sequence[RoundedPart]):
        self._parts = parts
        self._starts = [part.start for part in parts]

    def bits(self, start: int, stop: int, step: int, kinds: int, device: torch.device) -> Tensor:
        """Return random numbers for elements [start, stop) of the flat tensor: int16 [K, N]; 0 between parts.

        Args:
            start: first element.
            stop: end of the elements.
            step: optimizer steps before this one.
            kinds: number of moments, K.
            device: device of the result.
        """
        on_device = device.type != "cpu"
        draws = [draw for part in self._within(start, stop) for draw in _draws(part, start, stop, on_device)]
        out = torch.zeros(kinds, stop - start, dtype=torch.int16, device=device)
        found = drawn_together(draws, step, kinds, device) if on_device else _drawn(draws, step, kinds)
        for draw, drawn in zip(draws, found, strict=True):
            for place, whole, count in draw.runs:
                if count == stop - start:
                    return drawn
                out[:, place : place + count] = drawn[:, whole - draw.start :][:, :count]
        return out

    def _within(self, start: int, stop: int) -> Iterator[RoundedPart]:
        for part in self._parts[max(bisect_right(self._starts, start) - 1, 0) :]:
            if part.start >= stop:
                return
            if part.stop > start:
                yield part


def _draws(part: RoundedPart, start: int, stop: int, on_device: bool) -> Iterator[_RoundingDraw]:
    """Yield the draws for the elements of a part that are in [start, stop).

    Runs that are near one another, on a device all runs, are drawn together.
    """
    runs: list[tuple[int, int, int]] = []
    last = 0
    for run in part.runs(max(start - part.start, 0), min(stop, part.stop) - part.start):
        between = run.full - last
        if runs and (between < 0 or (between > _NEAR and not on_device)):
            yield _RoundingDraw(part.key, runs[0][1], last, runs)
            runs = []
        runs.append((part.start + run.local - start, run.full, run.elements))
        last = run.full + run.elements
    if runs:
        yield _RoundingDraw(part.key, runs[0][1], last, runs)


def _drawn(draws: Iterable[_RoundingDraw], step: int, kinds: int) -> Iterator[Tensor]:
    """Yield int16 [K, elements] of each draw."""
    for key, start, stop, _ in draws:
        first, last = start // _LANES, -(-stop // _LANES)
        words = philox.words_of(key, first, last, [(step, kind, 0) for kind in range(kinds)])
        yield torch.from_numpy(words.view(np.int16))[:, start - first * _LANES : stop - first * _LANES]


def drawn_together(
    draws: Sequence[_RoundingDraw], step: int, kinds: int, device: torch.device
) -> Iterator[Tensor]:
    """Yield int16 [K, elements] of each draw, computed on ``device`` with as many launches as for a single draw."""
    each = 4 * _LANES
    spans = [(draw.start // each, -(-draw.stop // each)) for draw in draws]
    if not spans:
        return
    blocks = torch.cat([torch.arange(first, last, device=device) for first, last in spans])
    keys = torch.cat(
        [
            torch.full((last - first,), philox.signed(draw.key), dtype=torch.int64, device=device)
            for draw, (first, last) in zip(draws, spans, strict=True)
        ]
    )
    words = philox.words_at(blocks, keys, (step, 0, 0), kinds).view(kinds, -1).view(torch.int16)
    begin = 0
    for draw, (first, last) in zip(draws, spans, strict=True):
        yield words[:, begin : begin + (last - first) * each][
            :, draw.start - first * each : draw.stop - first * each
        ]
        begin += (last - first) * each
