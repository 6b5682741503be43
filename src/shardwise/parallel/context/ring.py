"""Ring: keys and values travel round all ranks of context parallelism, one place further at a time.

    forward     in step s rank i attends to the keys of rank i - s, while those of rank i - s - 1 are on their way to it
    backward    the keys go round again; the gradients of a rank's keys begin at the next rank, travel with the keys,
                collect the addend of each rank, and arrive home after the last one

Every key passes every rank, whether a query sees it or not, so the messages do not depend on documents and windows.
``keys.py`` sends what some query sees and nothing else.

Paper: Ring Attention, Liu et al. 2023, arXiv:2310.01889.

Cost:   (c - 1) · 2·B·t·N·K elements a rank forward; backward the keys again, and their gradients: twice that.
        Two blocks of keys at a time, and in the backward pass two of gradients.
Shapes: B sequences, N key and value heads, t tokens of a rank with padding, K head size, c ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.kernels.attention_parts import RowGroup
from shardwise.kernels.attention_view import Starts, seen_groups
from shardwise.kernels.viewed_attention import GradientsOf
from shardwise.parallel.context.layout import ContextLayout


class RingBlocks(NamedTuple):
    """The keys of each rank that the queries of one rank see."""

    blocks: tuple[tuple[RowGroup, ...], ...]
    """By the number of places that the keys have travelled: the rank's own keys first."""


@lru_cache(maxsize=64)
def plan_ring(layout: ContextLayout, rank: int, starts: Starts, window: int | None) -> RingBlocks:
    """Return what the queries of one rank see of the keys that come round.

    Args:
        layout: The cut of the sequences.
        rank: The rank.
        starts: First token of each document, for each sequence.
        window: Number of keys that a token sees at most, or None.
    """
    ranks = len(layout.ranges)
    return RingBlocks(
        tuple(
            tuple(
                seen_groups(
                    layout.ranges[rank], layout.ranges[(rank - place) % ranks], starts, layout.length, window
                )
            )
            for place in range(ranks)
        )
    )


def ring_parts(
    k: Tensor, v: Tensor, ring: RingBlocks, group: Group, name: str
) -> Iterator[tuple[Tensor, Tensor, Sequence[RowGroup]]]:
    """Yield the keys and values of every rank as they come round, with what the queries see of them.

    Args:
        k: Keys of this rank's tokens, [B, N, t, K].
        v: Their values, [B, N, t, K].
        ring: What the queries see.
        group: The ranks of the ring.
        name: Name of the layer in errors.
    """
    both = torch.stack([k, v])
    for place, groups in enumerate(ring.blocks):
        is_last = place == group.size - 1
        arriving = None if is_last else _pass_on(both, group, f"keys of {name}")
        yield both[0], both[1], groups
        if arriving is not None:
            both = arriving()


def ring_gradients(
    k: Tensor, v: Tensor, ring: RingBlocks, group: Group, name: str, gradients_of: GradientsOf
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's keys and values, summed over the queries of all ranks.

    Args:
        k: Keys of this rank's tokens, [B, N, t, K].
        v: Their values, [B, N, t, K].
        ring: What the queries see.
        group: The ranks of the ring.
        name: Name of the layer in errors.
        gradients_of: Function that computes the gradients of one block.
    """
    own: tuple[Tensor, Tensor] | None = None
    going: Callable[[], Tensor] | None = None
    for place, part in enumerate(ring_parts(k, v, ring, group, f"{name}, again")):
        if place == 0:
            own = gradients_of(*part)
            continue
        exact = torch.promote_types(k.dtype, torch.float32)
        total = torch.zeros(2, *part[0].shape, dtype=exact, device=k.device)
        gradients_of(*part, (total[0], total[1]))
        if going is not None:
            total += going()
        going = _pass_on(total, group, f"gradients of keys of {name}")
    assert own is not None, "a ring has this rank"
    if going is not None:
        home = going()
        own[0].add_(home[0])
        own[1].add_(home[1])
    return own


def _pass_on(block: Tensor, group: Group, what: str) -> Callable[[], Tensor]:
    """Send ``block`` to the next rank of the ring; return a function that waits for the block of the one before."""
    ranks = range(group.size)
    counts = [[int(receiver == (sender + 1) % group.size) for receiver in ranks] for sender in ranks]
    sent = block.unsqueeze(0)
    came, pending = exchange.start_send(sent, counts, group, what)

    def arrive() -> Tensor:
        pending.wait()
        assert sent.shape == came.shape, "all ranks of a ring have equally many tokens"
        return came[0]

    return arrive
