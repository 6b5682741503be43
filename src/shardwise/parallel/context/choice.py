"""Choice: what each method of context parallelism sends, in closed form, and which method sends least.

    method      elements that a rank sends for one sequence and layer, forward + backward
    ring        3 · (c - 1) · 2·t·N·K
    planned     2·N·K · (2 · rows that others see of its keys + rows that it sees of theirs); in the mean 3 times 2·N·K
                times the rows of a rank that others see, counted once for each of them
    ulysses     2 · (c - 1) · t · 2·(H + N)·K / c if c divides H and N; else by the heads of each rank

Two factors add up: ulysses among neighbours, each of which then has the tokens of its group and a share of the heads,
and keys between groups. No rows that are seen are more than all rows, so planned never sends more than a ring.

``auto`` takes the factor of ulysses with the fewest elements over all layers: first of those that leave a host, because
the link between hosts is the slowest, then of all. A factor that gives ranks unlike numbers of heads is left out,
because the rank with the most heads would keep the others waiting. Documents that only the batches show are not
counted.

Cost:   one cut of the sequence for each divisor of c and window.
Shapes: c ranks along "cp", t tokens of a rank with padding, H query heads, N key and value heads, K head size.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from shardwise.parallel.context.heads import share_heads, users_of
from shardwise.parallel.context.layout import cut_in_groups, travelling_rows
from shardwise.parallel.context.policy import ContextPolicy

KeysBy = Literal["planned", "ring"]
_ONE: tuple[tuple[int, ...], ...] = ((0,),)


class AttentionLayer(NamedTuple):
    """Sizes of one attention layer, as one rank along "tp" computes it."""

    heads: int
    kv_heads: int
    size: int
    """Features of a head."""
    window: int | None = None
    """Number of keys that a token sees at most, or None."""


class ContextMethod(NamedTuple):
    """The way in which the ranks along "cp" exchange tokens."""

    keys: KeysBy = "planned"
    """The way in which keys travel between groups of ranks that exchange heads."""
    heads: int = 1
    """Ranks of such a group."""

    def name(self, ranks: int) -> str:
        """Return the method as the configuration names it, for ``ranks`` along "cp"."""
        if self.heads == 1:
            return self.keys
        return "ulysses" if self.heads == ranks else f"ulysses over {self.heads} and {self.keys}"


class SentElements(NamedTuple):
    """Elements that one rank sends for one sequence and one layer."""

    forward: int
    backward: int
    crossing: int = 0
    """Those of both passes that go to other hosts."""

    @property
    def total(self) -> int:
        """Elements of both passes."""
        return self.forward + self.backward


def chosen(
    policy: ContextPolicy,
    layers: Sequence[AttentionLayer],
    length: int,
    ranks: int,
    parts: int = 1,
    hosts: tuple[int, ...] = (),
) -> tuple[ContextMethod, str]:
    """Return the method for a model, and the reason in words.

    Args:
        policy: Keys under ``context:``.
        layers: The attention layers of the model.
        length: Tokens of a sequence.
        ranks: Ranks along "cp".
        parts: Equal parts into which tensor parallelism cuts a rank's tokens.
        hosts: Number of the host of each rank; empty if all are on one host.
    """
    keys: KeysBy = "ring" if policy.method == "ring" else "planned"
    if policy.method != "auto":
        heads = policy.ulysses or (ranks if policy.method == "ulysses" else 1)
        return ContextMethod(keys, heads), "as configured"
    alike: dict[AttentionLayer, int] = {}
    for layer in layers:
        alike[layer] = alike.get(layer, 0) + 1
    if not alike:
        return ContextMethod(keys, policy.ulysses or 1), "the heads of the layers are not known"
    factors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    if policy.ulysses is not None:
        factors = [policy.ulysses]
    else:
        factors = [each for each in factors if each == 1 or all(layer.heads % each == 0 for layer in alike)]
    costs = {
        heads: _total(ContextMethod(keys, heads), alike, length, ranks, parts, hosts) for heads in factors
    }
    best = min(costs, key=lambda heads: (costs[heads][0], costs[heads][1], heads))
    others = ", ".join(
        f"{ContextMethod(keys, heads).name(ranks)} {sent:,}"
        + (f" ({crossing:,} to other hosts)" if hosts else "")
        for heads, (crossing, sent) in costs.items()
    )
    ring = _total(ContextMethod("ring", 1), alike, length, ranks, parts, hosts)[1]
    why = (
        f"elements that a rank sends in the mean for a sequence of {length:,} tokens in all layers: {others}, "
        f"ring {ring:,}"
    )
    return ContextMethod(keys, best), why


def _total(
    method: ContextMethod,
    layers: Mapping[AttentionLayer, int],
    length: int,
    ranks: int,
    parts: int,
    hosts: tuple[int, ...],
) -> tuple[int, int]:
    """Return the elements that leave a host and all elements, of all layers, of a rank in the mean."""
    crossing = total = 0
    for layer, number in layers.items():
        sent = sent_elements(method, layer, length, ranks, parts, hosts)
        crossing += number * sum(each.crossing for each in sent)
        total += number * sum(each.total for each in sent)
    return crossing // ranks, total // ranks


@lru_cache(maxsize=256)
def sent_elements(
    method: ContextMethod,
    layer: AttentionLayer,
    length: int,
    ranks: int,
    parts: int = 1,
    hosts: tuple[int, ...] = (),
) -> tuple[SentElements, ...]:
    """Return what each rank sends for one sequence of one document.

    Args:
        method: The method.
        layer: Sizes of the attention layer.
        length: Tokens of a sequence.
        ranks: Ranks along "cp".
        parts: Equal parts into which tensor parallelism cuts a rank's tokens.
        hosts: Number of the host of each rank; empty if all are on one host.
    """
    members, groups = method.heads, ranks // method.heads
    whole, own = cut_in_groups(length, groups, members, parts)
    shares = share_heads(layer.heads, layer.kv_heads, members)
    if method.keys == "ring":
        rows = [
            [whole.tokens * (b == (a + 1) % groups) * (groups - 1) for b in range(groups)]
            for a in range(groups)
        ]
        back = rows
    else:
        counts = [
            [sum(each.tokens for each in pair) for pair in row]
            for row in travelling_rows(whole, _ONE, layer.window)
        ]
        rows, back = counts, [list(column) for column in zip(*counts, strict=True)]
    where = hosts or (0,) * ranks
    found = []
    for rank in range(ranks):
        group, member = divmod(rank, members)
        row = 2 * layer.size * _key_heads(layer, members, member)
        forward, backward = (own.tokens * layer.size * each for each in shares.sent(member))
        crossing = 0
        for other in range(groups):
            there, again = row * rows[group][other], row * back[group][other]
            if group != other:
                forward, backward = forward + there, backward + there + again
                crossing += (2 * there + again) * (where[other * members + member] != where[rank])
        for other in range(members):
            if other != member and where[group * members + other] != where[rank]:
                per_token = 2 * (shares.rows(other) + shares.queries_of(member))
                crossing += own.tokens * layer.size * per_token
        found.append(SentElements(forward, backward, crossing))
    return tuple(found)


def _key_heads(layer: AttentionLayer, members: int, member: int) -> int:
    """Return the number of key heads whose rows a rank sends to other groups."""
    shares = share_heads(layer.heads, layer.kv_heads, members)
    users = users_of(shares, member, layer.heads // layer.kv_heads)
    return shares.keys_of(member) if users is None else len(users)
