"""Which tokens of a sequence each rank of context parallelism holds, and which keys it needs from the others.

Token p of a document that starts at s attends to the keys s ... p, or to the last w of them in a layer with a window of
w tokens. The number of keys that it sees is its area

    a(p) = min(p - s + 1, w)

and attention takes a time proportional to the sum of a(p) over a rank's tokens. So a cut is good if all ranks have the
same number of tokens, for the layers that work on single tokens, and the same area, for attention. Contiguous parts of
one long document have unequal areas: with c ranks the last part has 2c - 1 times the area of the first.

The sequence is padded to n chunks of equal length, with n = c first and n = 2c, 4c, 8c ... as long as the areas are
unequal. The chunks, largest area first, are dealt in rounds of c: each round gives every rank one chunk, the largest to
the rank with the smallest area so far. For one document and n = 2c this is the zigzag of ring attention: rank i has the
chunks i and 2c - 1 - i, and all areas are equal. For packed documents of equal length n = c is already equal, and keys
travel only where a chunk ends inside a document.

A rank has few contiguous ranges rather than single tokens, so that rotary angles, dropout and masks can be computed for
a range at a time, and keys travel as slices.

Papers: Ring Attention, Liu et al. 2023, arXiv:2310.01889; Striped Attention, Brandon et al. 2023, arXiv:2311.09431 (on
equal areas).

Cost:   O(B·T) for the areas, O(n log n) for each n that is tried.
Shapes: B sequences of a microbatch, T tokens, c ranks, n chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOOD = 1.02
"""Ratio of the largest area of a rank to the mean at which no more chunks are tried."""
_LEAST_CHUNK = 16
"""Tokens of the shortest chunk that is tried beyond n = 2c, because every chunk costs a call of each kernel."""


class TokenRange(NamedTuple):
    """The tokens [start, stop) of a padded sequence."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class ContextLayout:
    """The ranges of tokens that each rank holds, in the order in which they lie on it."""

    length: int
    """Tokens of a sequence, without padding."""
    padded: int
    """Tokens of a sequence with padding behind its end."""
    ranges: tuple[tuple[TokenRange, ...], ...]
    """Ranges by rank; all ranks have the same number of tokens."""

    @property
    def tokens(self) -> int:
        """Number of tokens of a rank, padding included."""
        return self.padded // len(self.ranges)

    def places(self, rank: int) -> Tensor:
        """Return the position in the sequence of each token of ``rank``: int64 [tokens]."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges[rank]])


def cut_sequences(
    length: int,
    ranks: int,
    parts: int = 1,
    starts: Sequence[Sequence[int]] = ((0,),),
    window: int | None = None,
) -> ContextLayout:
    """Return the cut of sequences with equal numbers of tokens and nearly equal areas on all ranks.

    All sequences of a microbatch are cut alike, so that a rank's tokens are one tensor; their areas are summed.

    Args:
        length: Tokens of a sequence.
        ranks: Ranks of context parallelism.
        parts: Equal parts into which a rank's tokens are cut further (tensor parallelism).
        starts: First token of each document, ascending and from 0 on, for each sequence.
        window: Number of keys that a token sees at most, or None.

    Returns:
        The layout.
    """
    areas = token_areas(length, starts, window)
    best: tuple[float, ContextLayout] | None = None
    count = ranks
    while best is None or (best[0] > _GOOD and (count <= 2 * ranks or length // count >= _LEAST_CHUNK)):
        layout = _deal(length, ranks, parts, count, areas)
        ratio = balance(layout, areas)
        if best is None or ratio < best[0] - 1e-12:
            best = ratio, layout
        count *= 2
    return best[1]


def cut_in_groups(
    length: int, groups: int, members: int, parts: int = 1, starts: Sequence[Sequence[int]] = ((0,),)
) -> tuple[ContextLayout, ContextLayout]:
    """Return the cut over groups of ranks whose members exchange heads for tokens, and the cut over single ranks.

    The members of a group hold equal parts of its tokens, in the order in which the group holds them, so the tokens of
    all members, one after the other, are those of the group.

    Args:
        length: Tokens of a sequence.
        groups: Number of groups, between which keys travel.
        members: Ranks of a group; neighbours along "cp".
        parts: Equal parts into which a rank's tokens are cut further (tensor parallelism).
        starts: First token of each document, ascending and from 0 on, for each sequence.
    """
    whole = cut_sequences(length, groups, parts * members, starts)
    if members == 1:
        return whole, whole
    ranges = tuple(part for each in whole.ranges for part in _dealt(each, whole.tokens // members))
    return whole, ContextLayout(length, whole.padded, ranges)


def _dealt(ranges: Sequence[TokenRange], tokens: int) -> list[tuple[TokenRange, ...]]:
    """Return ranges in parts of ``tokens`` tokens, in the order in which the ranges lie in memory."""
    found: list[tuple[TokenRange, ...]] = []
    part: list[TokenRange] = []
    free = tokens
    for start, stop in ranges:
        while start < stop:
            end = min(stop, start + free)
            part.append(TokenRange(start, end))
            free -= end - start
            start = end
            if not free:
                found.append(tuple(part))
                part, free = [], tokens
    return found


def token_areas(length: int, starts: Sequence[Sequence[int]], window: int | None = None) -> NDArray[np.int64]:
    """Return the number of keys that each token sees, summed over the sequences: [length]."""
    total = np.zeros(length, dtype=np.int64)
    for each in starts:
        first = np.zeros(length, dtype=np.int64)
        first[list(each)] = list(each)
        seen = np.arange(length) - np.maximum.accumulate(first) + 1
        total += seen if window is None else np.minimum(seen, window)
    return total


def balance(layout: ContextLayout, areas: NDArray[np.int64]) -> float:
    """Return the largest area of a rank over the mean of all ranks."""
    before = np.concatenate([[0], areas.cumsum()])
    ends = [[(min(a, layout.length), min(b, layout.length)) for a, b in own] for own in layout.ranges]
    sums = [sum(int(before[b] - before[a]) for a, b in own) for own in ends]
    return max(sums) * len(sums) / max(sum(sums), 1)


def _deal(length: int, ranks: int, parts: int, count: int, areas: NDArray[np.int64]) -> ContextLayout:
    chunk = -(-length // count)
    while chunk * (count // ranks) % parts:
        chunk += 1
    area = np.pad(areas, (0, chunk * count - length)).reshape(count, chunk).sum(1).tolist()
    sums, held = [0] * ranks, list[list[int]]([] for _ in range(ranks))
    largest = sorted(range(count), key=lambda place: (-area[place], place))
    for first in range(0, count, ranks):
        emptiest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for rank, place in zip(emptiest, largest[first : first + ranks], strict=True):
            sums[rank] += area[place]
            held[rank].append(place)
    # Ranks in the order of their first tokens, so that neighbours in the sequence are neighbours on the ring.
    ordered = sorted(sorted(places) for places in held)
    return ContextLayout(length, chunk * count, tuple(_joined(places, chunk) for places in ordered))


def _joined(places: Sequence[int], chunk: int) -> tuple[TokenRange, ...]:
    """Return chunks, ascending, as ranges; chunks that follow one another are one range."""
    found: list[TokenRange] = []
    for place in places:
        start = place * chunk
        if found and found[-1].stop == start:
            found[-1] = found[-1]._replace(stop=start + chunk)
        else:
            found.append(TokenRange(start, start + chunk))
    return tuple(found)


def needed_keys(
    layout: ContextLayout, rank: int, starts: Sequence[Sequence[int]], window: int | None = None
) -> tuple[TokenRange, ...]:
    """Return the ranges of keys that some query of ``rank`` sees in some sequence, its own keys included.

    Args:
        layout: The cut of the sequences.
        rank: The rank.
        starts: First token of each document, for each sequence.
        window: Number of keys that a token sees at most, or None.

    Returns:
        Ranges that are ascending and do not touch. What a rank holds, and what others send to it, follow by
        intersection with the ranges of ``layout``.
    """
    seen: list[TokenRange] = []
    for start, stop in layout.ranges[rank]:
        stop = min(stop, layout.length)
        if start >= stop:
            continue
        first = start
        for each in starts:
            document = max(begin for begin in each if begin <= start)
            first = min(first, document if window is None else max(document, start - window + 1))
        seen.append(TokenRange(first, stop))
    joined: list[TokenRange] = []
    for each in sorted(seen):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = joined[-1]._replace(stop=max(joined[-1].stop, each.stop))
        else:
            joined.append(each)
    return tuple(joined)


def travelling_rows(
    layout: ContextLayout, starts: Sequence[Sequence[int]], window: int | None = None
) -> list[list[tuple[TokenRange, ...]]]:
    """Return the tokens whose keys go from one rank to another, by sender and receiver.

    Args:
        layout: The cut of the sequences.
        starts: First token of each document, for each sequence.
        window: Number of keys that a token sees at most, or None.
    """
    ranks = range(len(layout.ranges))
    needed = [needed_keys(layout, each, starts, window) for each in ranks]
    return [
        [() if sender == receiver else _common(layout.ranges[sender], needed[receiver]) for receiver in ranks]
        for sender in ranks
    ]


def _common(held: Sequence[TokenRange], wanted: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """Return the tokens that are in both, in the order of ``held``."""
    both = (TokenRange(max(a.start, b.start), min(a.stop, b.stop)) for a in held for b in wanted)
    return tuple(each for each in both if each.start < each.stop)
