"""What experts cost in rows and bytes, in closed form. Held to counts by tests; the Plan prints it.

A token goes once to each rank that holds any of its k experts. Of E experts E/ep lie on its own rank; under a router
that chooses evenly

    reached(n)  = 1 - C(E - E/n, k) / C(E, k)                       that a token has experts on a given one of n
    rows        = tokens · (ep - 1) · reached(ep)                   expected to leave a rank
    elements    = rows · (4·D + 3·k)                                all-to-all, forward and backward

Each row goes and comes back, and so does its gradient: 4·D. Beside it go the numbers of its k experts, in 32 bits,
their weights and, backward, the gradients of these, in fp32 at least. A recomputed block sends its rows forward twice,
half as much again; so does what goes in rounds. In two levels over H hosts a row makes two hops, each
of which costs as much:

    across      = tokens · (H - 1) · reached(H)                     rows that leave a host, and
    within      = tokens · (ep - H) · reached(ep)                   those that a rank passes on within its own

In blocks (``experts.exchange``) the same with what a router's capacity c allows, whatever is chosen, but for rounding:

    reached(n)  = min(1, c·k / n)

Shapes: D width, E experts, H hosts, k experts of a token.
"""

from math import comb

_NUMBER_BYTES = 4
"""Of an expert's number on its way."""


def expected_rows(
    tokens: int, top_k: int, experts: int, ep: int, hosts: int = 1, capacity: float | None = None
) -> float:
    """Rows that leave a rank in dispatch, on the average of evenly chosen experts, in two levels over ``hosts``;
    ``capacity``: in blocks."""

    def reached(places: int) -> float:
        return (
            expected_reach(experts, top_k, places)
            if capacity is None
            else min(1.0, capacity * top_k / places)
        )

    return tokens * ((hosts - 1) * reached(hosts) + (ep - hosts) * reached(ep))


def expected_reach(experts: int, top_k: int, places: int) -> float:
    """The chance that a token has any of its evenly chosen experts on a given one of ``places``."""
    return 1 - comb(experts - experts // places, top_k) / comb(experts, top_k)


def elements_sent(rows: float, width: int, top_k: int) -> float:
    """Elements that a layer's all-to-all sends in a forward and a backward pass, for ``rows`` that left a rank.

    Those that left other ranks for this one are sent back: over all ranks ``rows`` are the same both ways.
    """
    return rows * (4 * width + 3 * top_k)


def row_bytes(width: int, top_k: int, itemsize: int) -> int:
    """Bytes of the same for one row, whose elements take ``itemsize``."""
    return 4 * width * itemsize + top_k * (_NUMBER_BYTES + 2 * max(4, itemsize))
