"""Which keys travel between the ranks of context parallelism, and what each rank's queries see of them.

A rank has the keys of its own tokens. Its queries also see keys of other ranks: those of the same document at earlier
positions, no further back than the window. Every rank computes from the layout and the documents alone which rows each
rank needs of which other, so that nothing has to be agreed on, and nothing travels that nobody sees.

    cut                               rows that a rank receives, of T tokens over c ranks
    one document, zigzag              about 3/4 of the others' (c - 1)/c · T
    documents much shorter than T/c   less than one document for each end of a range
    a window of w                     at most w for each end of a range

Cost:   O(c² · ranges) on the host for a new cut; the plan of a cut that came before is kept.
Shapes: B sequences, T tokens, c ranks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.kernels.attention_parts import RowGroup
from shardwise.kernels.attention_view import Starts, seen_groups
from shardwise.parallel.context.layout import ContextLayout, TokenRange, travelling_rows


class KeyExchange(NamedTuple):
    """The rows of keys and values that one rank sends and receives, and what its queries see."""

    sent: tuple[TokenRange, ...]
    """Ranges of this rank's tokens, by place in its tensors, that it sends: to rank 0 first, then to rank 1 and so on.
    """
    counts: tuple[tuple[int, ...], ...]
    """Numbers of rows: counts[i][j] go from rank i to rank j."""
    own: tuple[RowGroup, ...]
    """What the queries see of this rank's own keys."""
    arrived: tuple[RowGroup, ...]
    """What the queries see of the keys that arrive, in the order of their arrival."""


@lru_cache(maxsize=64)
def plan_exchange(layout: ContextLayout, rank: int, starts: Starts, window: int | None) -> KeyExchange:
    """Return the exchange of keys for one rank.

    Args:
        layout: The cut of the sequences.
        rank: The rank.
        starts: First token of each document, for each sequence.
        window: Number of keys that a token sees at most, or None.
    """
    ranks = len(layout.ranges)
    rows = travelling_rows(layout, starts, window)
    counts = tuple(tuple(sum(each.tokens for each in ranges) for ranges in row) for row in rows)
    sent = [each for ranges in rows[rank] for each in _held_at(layout.ranges[rank], ranges)]
    own = layout.ranges[rank]
    came = [each for sender in range(ranks) for each in rows[sender][rank]]
    return KeyExchange(
        tuple(sent),
        counts,
        seen_groups(own, own, starts, layout.length, window),
        seen_groups(own, came, starts, layout.length, window),
    )


def _held_at(held: Sequence[TokenRange], ranges: Sequence[TokenRange]) -> list[TokenRange]:
    """Return the places in a rank's tensors of ``ranges``, each of which lies in one range that it holds."""
    found, place = [], 0
    for start, stop in held:
        for a, b in ranges:
            if start <= a and b <= stop:
                found.append(TokenRange(a - start + place, b - start + place))
        place += stop - start
    return found
