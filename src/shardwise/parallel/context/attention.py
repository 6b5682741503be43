"""Attention of one rank's queries to the keys of all ranks of context parallelism, by one of three methods.

    planned    rows that some query of another rank sees go there straight from their owner (keys.py)
    ring       all keys pass all ranks (ring.py)
    ulysses    ranks exchange heads for tokens before and after (ulysses.py); over all ranks, or over groups of
               neighbours, between which keys travel by one of the other methods

Planned, as far as the code is here:

    forward     the rows of keys and values that other ranks need leave; attention to this rank's own keys runs
                meanwhile; attention to the rows that arrived is merged with it
    backward    the gradients of the rows that arrived go home, while the gradients of this rank's own keys are computed

What is kept for the backward pass is this rank's queries, keys, values and outputs, and one number for each query and
head. The rows of other ranks are sent again, because keeping them would keep the whole sequence on every rank.

Paper: Ring Attention, Liu et al. 2023, arXiv:2310.01889, for the merge and the gradients of keys of other ranks.

Cost:   planned: 2·B·N·K elements for each row that another rank sees forward; backward the rows again, and gradients.
Shapes: B sequences, H heads, N key and value heads, t tokens of this rank, K head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import exchange
from shardwise.comm.collectives import Group
from shardwise.kernels.attention_parts import RowGroup
from shardwise.kernels.operation import operation
from shardwise.kernels.viewed_attention import GradientsOf, attend_to_seen
from shardwise.parallel.context.keys import KeyExchange
from shardwise.parallel.context.ring import RingBlocks, ring_gradients, ring_parts
from shardwise.parallel.context.ulysses import own_heads, to_heads, to_tokens


class AttentionSite(NamedTuple):
    """The exchange of one layer's keys in one pass."""

    group: Group
    """The ranks between which keys travel."""
    keys: KeyExchange | RingBlocks
    """What travels: the rows that some query sees, or all keys round a ring."""
    name: str
    """Name of the layer in errors."""
    heads: Group | None = None
    """The ranks that exchange heads for tokens before, or None."""

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Sequence[RowGroup]]]:
        """Yield keys and values with what the queries see of them: this rank's own, and then those that arrive."""
        if isinstance(self.keys, RingBlocks):
            yield from ring_parts(k, v, self.keys, self.group, self.name)
            return
        arriving = _leave(k, v, self, "keys")
        yield k, v, self.keys.own
        others = arriving()
        if others is not None:
            yield *others, self.keys.arrived

    def gradients(self, k: Tensor, v: Tensor, gradients_of: GradientsOf) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all ranks."""
        if isinstance(self.keys, RingBlocks):
            return ring_gradients(k, v, self.keys, self.group, self.name, gradients_of)
        return _planned_gradients(k, v, self.keys, self, gradients_of)


@operation("product")
def context_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, site: AttentionSite) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks.

    Args:
        q: Queries of this rank's tokens, [B, H, t, K].
        k: Their keys, [B, N, t, K].
        v: Their values, [B, N, t, K].
        sink: One number for each head, [H], or None.
        site: The exchange of the layer.

    Returns:
        [B, H, t, K].
    """
    if site.heads is None or site.heads.size == 1:
        return attend_to_seen(q, k, v, sink, site)
    heads, kv_heads = q.shape[1], k.shape[1]
    q, k, v = to_heads(q, k, v, site.heads, site.name)
    sink = None if sink is None else own_heads(sink, kv_heads, site.heads)
    if q.shape[1]:
        found = attend_to_seen(q, k, v, sink, site)
    else:  # A rank without heads computes nothing, but autograd has to find the sink in use on every rank.
        found = q if sink is None else q * sink.to(q.dtype).view(-1, 1, 1)
    return to_tokens(found, heads, kv_heads, site.heads, site.name)


def _planned_gradients(
    k: Tensor, v: Tensor, keys: KeyExchange, site: AttentionSite, gradients_of: GradientsOf
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's keys and values, summed over the queries of all ranks that see them."""
    others = _leave(k, v, site, "keys again")()
    going: Callable[[], tuple[Tensor, Tensor]] | None = None
    if others is not None:
        exact = torch.promote_types(k.dtype, torch.float32)
        rows = torch.zeros(others[0].shape[2], 2, *k.shape[:2], k.shape[3], dtype=exact, device=k.device)
        gradients_of(*others, keys.arrived, _keys_and_values(rows))
        going = _return(rows, site)
    d_k, d_v = gradients_of(k, v, keys.own)
    if going is not None:
        home = going()  # rows that several ranks saw come once from each of them
        for total, rows in zip((d_k, d_v), home, strict=True):
            place = 0
            for start, stop in keys.sent:
                total[:, :, start:stop] += rows[:, :, place : place + stop - start]
                place += stop - start
    return d_k, d_v


def _leave(
    k: Tensor, v: Tensor, site: AttentionSite, what: str
) -> Callable[[], tuple[Tensor, Tensor] | None]:
    """Send the rows that others need, and return a function that waits for those that arrive: keys and values."""
    keys = site.keys
    assert isinstance(keys, KeyExchange), "a ring passes on whole blocks"
    if site.group.size == 1 or not any(map(any, keys.counts)):
        return lambda: None
    counts = [list(row) for row in keys.counts]
    leaving = sum(counts[site.group.index])
    rows = k.new_empty(leaving, 2, k.shape[0], k.shape[1], k.shape[3])
    place = 0
    for start, stop in keys.sent:
        for i, each in enumerate((k, v)):
            rows[place : place + stop - start, i] = each[:, :, start:stop].permute(2, 0, 1, 3)
        place += stop - start
    came, pending = exchange.start_send(rows, counts, site.group, f"{what} of {site.name}")

    def arrive() -> tuple[Tensor, Tensor]:
        pending.wait()
        return _keys_and_values(came)

    return arrive


def _return(rows: Tensor, site: AttentionSite) -> Callable[[], tuple[Tensor, Tensor]]:
    """Send gradients of rows that arrived to their owners; return a function that waits for those of this rank's."""
    assert isinstance(site.keys, KeyExchange), "a ring passes gradients on"
    counts = exchange.transposed(site.keys.counts)
    came, pending = exchange.start_send(rows, counts, site.group, f"gradients of keys of {site.name}")

    def arrive() -> tuple[Tensor, Tensor]:
        pending.wait()
        return _keys_and_values(came)

    return arrive


def _keys_and_values(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [S, 2, B, N, K] as they travel as keys and values, each [B, N, S, K], without a copy."""
    keys, values = rows.permute(1, 2, 3, 0, 4)
    return keys, values
