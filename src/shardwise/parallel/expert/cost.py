"""Cost of experts in rows and bytes, in closed form. Tests compare it with counts; the Plan prints it.

A token goes once to each rank that holds any of its k experts. Of E experts E/ep lie on its own rank; under a router
that chooses evenly

    reached(n)  = 1 - C(E - E/n, k) / C(E, k)                       that a token has experts on a given one of n
    rows        = tokens · (ep - 1) · reached(ep)                   expected to leave a rank
    elements    = rows · (4·D + 3·k)                                all-to-all, forward and backward

Each row is sent and comes back, and so does its gradient: 4·D. The numbers of its k experts travel with it, in 32 bits,
and their weights and, backward, the gradients of these, in fp32 at least; messages are filled up to 16 bytes. A
recomputed block sends its rows forward twice, half as much again; so do rounds. In two levels over H hosts a row makes
two hops, each of which costs as much:

    across      = tokens · (H - 1) · reached(H)                     rows that leave a host, and
    within      = tokens · (ep - H) · reached(ep)                   rows that a rank passes on within its host

In blocks (``experts.exchange``) the same holds with the bound that a router's capacity c sets, whatever is chosen, up
to rounding:

    reached(n)  = min(1, c·k / n)

Shapes: D width, E experts, H hosts, k experts of a token.
"""

from math import comb

from shardwise.base.packed import message_bytes

_NUMBER_BYTES = 4
"""Bytes of an expert's number in a message."""


def expected_rows(
    tokens: int, top_k: int, experts: int, ep: int, hosts: int = 1, capacity: float | None = None
) -> float:
    """Return the expected number of rows that leave a rank in dispatch, if experts are chosen evenly.

    Args:
        tokens: tokens of the rank.
        top_k: experts of a token.
        experts: number of experts.
        ep: ranks over which experts are spread.
        hosts: hosts of these ranks; more than 1 means two levels.
        capacity: capacity of the router, for padded blocks; None counts rows.
    """

    def reached(places: int) -> float:
        return (
            expected_reach(experts, top_k, places)
            if capacity is None
            else min(1.0, capacity * top_k / places)
        )

    return tokens * ((hosts - 1) * reached(hosts) + (ep - hosts) * reached(ep))


def expected_reach(experts: int, top_k: int, places: int) -> float:
    """Return the probability that a token has any of its evenly chosen experts on a given one of ``places``."""
    return 1 - comb(experts - experts // places, top_k) / comb(experts, top_k)


def row_bytes(width: int, top_k: int, itemsize: int) -> int:
    """Return the bytes that one row adds to the all-to-all of a forward and a backward pass.

    The rank also sends back the rows that it received; over all ranks, as many rows are received as are sent.

    Args:
        width: numbers of a token, D.
        top_k: experts of a token.
        itemsize: bytes of an element of a token.
    """
    row, weights = width * itemsize, top_k * max(4, itemsize)
    return message_bytes(row, weights, top_k * _NUMBER_BYTES) + 2 * row + message_bytes(row, weights)
