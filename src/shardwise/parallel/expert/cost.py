"""What experts cost in rows and elements, in closed form. Held to counts by tests.

A token goes once to each rank that holds any of its k experts. Of E experts E/ep lie on its own rank; under a router
that chooses evenly, another rank has none of them with probability C(E - E/ep, k) / C(E, k), so that

    rows        = tokens · (ep - 1) · (1 - C(E - E/ep, k) / C(E, k))          expected to leave a rank
    elements    = rows · (4·D + 3·k)                                          all-to-all, forward and backward

Each row goes and comes back, and so does its gradient: 4·D. Beside it go the numbers of its k experts, their weights
and, backward, the gradients of these.

Shapes: D width, E experts, k experts of a token.
"""

from math import comb


def expected_rows(tokens: int, top_k: int, experts: int, ep: int) -> float:
    """Rows that leave a rank in dispatch, on the average of evenly chosen experts."""
    elsewhere = comb(experts - experts // ep, top_k) / comb(experts, top_k)
    return tokens * (ep - 1) * (1 - elsewhere)


def elements_sent(rows: float, width: int, top_k: int) -> float:
    """Elements that a layer's all-to-all sends in a forward and a backward pass, for ``rows`` that left a rank.

    Those that left other ranks for this one are sent back: over all ranks ``rows`` are the same both ways.
    """
    return rows * (4 * width + 3 * top_k)
