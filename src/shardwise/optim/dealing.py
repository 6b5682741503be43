"""Assignment of whole matrices to ranks and rounds. Pure: the result is the same on every rank.

Orthogonalising costs rows · columns · min(rows, columns) operations a round of Newton-Schulz. The dearest matrix goes
first, each to the rank that has least so far, of several to the one that holds most of it; no rank then has more than
the mean and one matrix. A rank's matrices travel in rounds, so that only some of them are whole at a time.

Source: longest processing time first, Graham 1969, doi:10.1137/0117039.
"""

from collections.abc import Sequence

ROUND_ELEMENTS = 16 << 20
"""Elements of whole matrices that a rank takes in one round; a larger matrix has a round of its own."""


def owners(shapes: Sequence[tuple[int, ...]], held: Sequence[Sequence[int]]) -> list[int]:
    """Return the index of the rank that gets each matrix.

    Args:
        shapes: rows and columns of each matrix.
        held: number of elements that each rank has of each matrix.
    """
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    ranks = range(len(held[0])) if held else range(0)
    load, found = [0] * len(ranks), [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: (-costs[place], place)):
        rank = min(ranks, key=lambda rank: (load[rank], -held[place][rank]))
        found[place] = rank
        load[rank] += costs[place]
    return found


def rounds(
    shapes: Sequence[tuple[int, ...]], owner: Sequence[int], limit: int = ROUND_ELEMENTS
) -> list[list[int]]:
    """Return the matrices that travel together in each round, ascending.

    Args:
        shapes: rows and columns of each matrix.
        owner: rank that gets each matrix.
        limit: largest number of elements that a rank takes in one round; a larger matrix has a separate round.
    """
    found: list[list[int]] = []
    at: dict[int, tuple[int, int]] = {}
    """Last round of each rank, and the elements that the rank takes there."""
    for place, (rows, columns) in enumerate(shapes):
        last, held = at.get(owner[place], (0, 0))
        if held and held + rows * columns > limit:
            last, held = last + 1, 0
        at[owner[place]] = (last, held + rows * columns)
        while len(found) <= last:
            found.append([])
        found[last].append(place)
    return found
