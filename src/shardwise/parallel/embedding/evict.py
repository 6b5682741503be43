"""Which rows of dynamic tables go after a step: those too old, and the lowest of a table that is too full.

Rows of one table that lie on several ranks are evicted by their common order of (score, key), so that the same rows go
on any number of ranks.

Cost: one exchange of two numbers a table and rank, where rows or keys that wait are limited; beyond a limit one of the
lowest keys and scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.exchange import gather, share
from shardwise.parallel.embedding.dynamic import Dynamic


def evict(tables: Sequence[Dynamic], group: Group | None, step: int) -> None:
    """After ``step``. ``group``: the ranks over which the rows of each table are spread; None where each rank has all
    of them or none. Collective over it."""
    for each in tables:
        limit = each.policy.eviction.max_age_steps
        if limit is not None:
            each.forget(each.index.below(step - limit + 1))
    if not any(_is_bounded(each) for each in tables):
        return
    total = torch.tensor([[len(each.index), each.waiting] for each in tables]).view(-1)
    if group is not None:
        total = share(total.repeat(group.size, 1), group, "rows of tables")[:, 0].sum(0)
    for each, (rows, waiting) in zip(tables, total.view(-1, 2).tolist(), strict=True):
        if each.capacity is not None and not each.is_capped and rows > each.capacity:
            kept = int(each.capacity * (1 - each.policy.eviction.fraction))
            here = each.index.lowest(rows - kept)
            keys = lowest(each.index.keys_of(here), each.index.scores_of(here), rows - kept, group)
            each.forget_keys(keys)
        surplus = waiting - each.policy.admission.max_waiting
        if surplus > 0:
            each.forget_waiting(lowest(*each.longest_waiting(surplus), surplus, group))


def _is_bounded(table: Dynamic) -> bool:
    """Something of it may have to go: alike on all ranks."""
    evicts = table.capacity is not None and not table.is_capped
    return evicts or table.policy.admission.type == "frequency"


def lowest(keys: Tensor, scores: Tensor, count: int, group: Group | None) -> Tensor:
    """Of each rank's lowest keys, those ``count`` that are the lowest of all by (score, key)."""
    if group is None:
        return keys
    offered = torch.stack([scores, keys], 1)
    mine = torch.full((group.size, 1), keys.numel())
    parts = share(mine, group, "rows to evict")[:, 0, 0].tolist()
    everyone = gather(offered, parts, group, "rows to evict", "control")
    by_key = everyone[everyone[:, 1].argsort(stable=True)]
    return by_key[by_key[:, 0].argsort(stable=True)][:count, 1]
