"""Eviction of rows of dynamic tables after a step: rows that are too old, and the lowest scores of a full table.

Rows of one table that lie on several ranks are evicted by their common order of (score, key), so that the same rows are
evicted on any number of ranks.

    surplus   rows beyond the capacity
    evicted   min(rows - (1 - fraction) · capacity,  max(4 · surplus, surplus + 1,024))

So a step evicts in proportion to the rows that it inserted, however large the table and the fraction are. The rows are
found by a search that is spread over the steps before (kernels/tables/rows_ahead.py).

Cost: one exchange of two numbers a table and rank, if rows or waiting keys are limited; beyond a limit, one exchange of
the lowest keys and scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.exchange import gather, share
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex

_TIMES, _FEWEST_AT_ONCE = 4, 1024
"""Rows that a step evicts at most: 4 times its surplus, and 1,024 beyond the surplus if that is more."""


def evict(tables: Sequence[DynamicIndex], group: Group | None, step: int) -> None:
    """Evict rows and forget waiting keys after ``step``. Collective over ``group``.

    Args:
        tables: the dynamic tables of a group.
        group: ranks over which the rows of each table are spread; None if each rank has all of them or none.
        step: the step that has just ended.
    """
    for each in tables:
        each.forget(each.too_old(step))
    if not any(_is_bounded(each) for each in tables):
        for each in tables:
            each.look_ahead(step, len(each.index), each.waiting)
        return
    total = torch.tensor([[len(each.index), each.waiting] for each in tables]).view(-1)
    if group is not None:
        total = share(total.repeat(group.size, 1), group, "rows of tables")[:, 0].sum(0)
    for each, (rows, waiting) in zip(tables, total.view(-1, 2).tolist(), strict=True):
        if each.capacity is not None and not each.is_capped and rows > each.capacity:
            count = number_to_evict(rows, each.capacity, each.policy.eviction.fraction)
            each.forget_keys(lowest(*each.lowest(count), count, group))
            rows -= count
        surplus = waiting - each.policy.admission.max_waiting
        if surplus > 0:
            each.forget_waiting(lowest(*each.longest_waiting(surplus), surplus, group))
        each.look_ahead(step, rows, waiting)


def number_to_evict(rows: int, capacity: int, fraction: float) -> int:
    """Return the number of rows to evict from a table with more ``rows`` than its capacity."""
    surplus = rows - capacity
    kept = int(capacity * (1 - fraction))
    return min(rows - kept, surplus + max((_TIMES - 1) * surplus, _FEWEST_AT_ONCE))


def _is_bounded(table: DynamicIndex) -> bool:
    """Return whether rows or waiting keys of a table may have to be removed; the same on all ranks."""
    evicts = table.capacity is not None and not table.is_capped
    return evicts or table.policy.admission.type == "frequency"


def lowest(keys: Tensor, scores: Tensor, count: int, group: Group | None) -> Tensor:
    """Return the ``count`` keys that are the lowest of all ranks by (score, key). Collective over ``group``.

    Args:
        keys: this rank's lowest keys, at most ``count``.
        scores: scores of these keys.
        count: number of keys to return.
        group: ranks that take part; None returns ``keys``.
    """
    if group is None:
        return keys
    offered = torch.stack([scores, keys], 1)
    mine = torch.full((group.size, 1), keys.numel())
    parts = share(mine, group, "rows to evict")[:, 0, 0].tolist()
    everyone = gather(offered, parts, group, "rows to evict", "control")
    by_key = everyone[everyone[:, 1].argsort(stable=True)]
    return by_key[by_key[:, 0].argsort(stable=True)][:count, 1]
