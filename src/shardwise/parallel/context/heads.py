"""Heads that each of several ranks gets when they exchange heads for tokens (ulysses.py), as pure numbers.

Query heads are dealt in order, as evenly as they divide: 6 heads over 4 ranks are 2, 2, 1, 1. A key head goes to each
rank whose query heads use it.

Shapes: H query heads, N key and value heads, U ranks.
"""

from functools import lru_cache
from typing import NamedTuple


class HeadShares(NamedTuple):
    """The heads that each rank gets, as ranges [first, last)."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    """Key heads that the rank's query heads use."""

    def rows(self, rank: int) -> int:
        """Return the number of heads of queries, keys and values together that ``rank`` gets."""
        return self.queries_of(rank) + 2 * self.keys_of(rank)

    def queries_of(self, rank: int) -> int:
        """Return the number of query heads of ``rank``."""
        return self.queries[rank][1] - self.queries[rank][0]

    def keys_of(self, rank: int) -> int:
        """Return the number of key heads of ``rank``."""
        return self.keys[rank][1] - self.keys[rank][0]

    def sent(self, rank: int) -> tuple[int, int]:
        """Return the heads of one token that ``rank`` sends in a forward and in a backward pass.

        With U ranks of t tokens each a head has t·K elements for each sequence.
        """
        others = [each for each in range(len(self.queries)) if each != rank]
        forward = sum(map(self.rows, others)) + len(others) * self.queries_of(rank)
        backward = sum(map(self.queries_of, others)) + len(others) * self.rows(rank)
        return forward, backward


@lru_cache(maxsize=64)
def share_heads(heads: int, kv_heads: int, ranks: int) -> HeadShares:
    """Return the heads that each of ``ranks`` gets.

    Args:
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of ``heads``.
        ranks: Number of ranks.
    """
    least, more = divmod(heads, ranks)
    ends = [0]
    for rank in range(ranks):
        ends.append(ends[-1] + least + (rank < more))
    queries = tuple(zip(ends, ends[1:], strict=False))
    group = heads // kv_heads
    keys = tuple((a // group, (e - 1) // group + 1) if a < e else (0, 0) for a, e in queries)
    return HeadShares(queries, keys)


def users_of(shares: HeadShares, rank: int, group: int) -> list[int] | None:
    """Return the place of the key head of each of a rank's query heads; None if all key heads have equally many.

    Args:
        shares: The heads of each rank.
        rank: The rank.
        group: Query heads of one key head.
    """
    (first, last), (start, _) = shares.queries[rank], shares.keys[rank]
    used = [head // group - start for head in range(first, last)]
    number = shares.keys_of(rank)
    if not used or len(used) % number:
        return used or None
    return None if used == [place * number // len(used) for place in range(len(used))] else used
