"""The index of one dynamic table on one rank: admission of keys, their rows, and the scores that eviction reads.

A key that comes in training gets a row at once, if it is admitted; its score moves once a step, however often it came;
rows are evicted after a step. Nothing depends on the number of ranks or of microbatches. A discarded step leaves no
trace: keys that came for the first time have no row, and the counts of waiting keys are as before.

Cost:   one lookup of each distinct key a batch, and one of each row that came a step; kernels/tables/hash_index.py.
Shapes: U keys of one call.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.base.errors import MismatchError, PlanError, TableFullError
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.index_snapshot import IndexSnapshot
from shardwise.kernels.tables.keys import mix
from shardwise.kernels.tables.unique import unique
from shardwise.parallel.embedding.layout import BUCKETS
from shardwise.parallel.embedding.policy import DynamicPolicy

_SLACK_ROWS = 1 << 20
"""Rows beyond its capacity that a table may have until the step is over: the ranks learn only at the step that the
table is full.
"""
_ADDRESSES = 1 << 45
"""Bytes of address space for all tables without a capacity: a quarter of a process's address space."""
_MOST_POSITIONS = 1 << 32
"""Rows of all tables without a capacity that segments can number on a rank."""
_COUNT_BITS = 20
"""Lower bits of a waiting key's score, which hold its count; the upper bits hold the step in which the key last came.
"""


@dataclass
class EvictedKeys:
    """Keys whose rows were evicted."""

    count: int = 0
    """Number of the rows since the start of this process."""
    keys: list[Tensor] | None = None
    """The keys since the list was last emptied; None if no increments are made of them."""


class DynamicIndex:
    """Index of one dynamic table on one rank.

    Args:
        name: name of the table, for errors.
        policy: growth of the table.
        base: row of the slab at which the table's rows begin.
        limit: rows for which this rank has address space.
        capacity: largest number of rows over all ranks; None is without limit.
        start_key: key of the random numbers of the table, which also decides admission by probability.
        keys_are_distinct: True if the keys of each call of ``take`` are distinct, because no other rank sends keys.

    Raises:
        PlanError: if more keys are pinned than the capacity allows.
    """

    index: HashIndex
    """Rows by key."""

    def __init__(
        self,
        name: str,
        policy: DynamicPolicy,
        base: int,
        limit: int,
        capacity: int | None,
        start_key: int,
        keys_are_distinct: bool,
    ):
        self.name = name
        self.policy = policy
        self.base = base
        self.capacity = capacity
        self.start_key = start_key
        self._limit = limit
        self.evictions = EvictedKeys()
        self.clear()
        self._keys_are_distinct = keys_are_distinct
        self._pinned = torch.tensor(policy.eviction.pinned, dtype=torch.int64)
        pins = len(set(policy.eviction.pinned))
        if capacity is not None and pins > capacity:
            raise PlanError(
                f"table {name!r}: {pins} pinned keys for at most {capacity} rows, which is what dynamic.capacity and "
                "dynamic.budget_bytes allow; pinned rows never go, so raise the limit or pin fewer keys"
            )

    def clear(self) -> None:
        """Remove all keys."""
        if self.evictions.keys is not None:
            self.evictions.keys.append(self.index.items()[0])
        self.index = HashIndex(self._limit, min(self.policy.initial_rows, self._limit), buckets=BUCKETS)
        self._candidates: HashIndex | None = None
        if self.policy.admission.type == "frequency":
            room = self.policy.admission.max_waiting + _SLACK_ROWS
            self._candidates = HashIndex(room=room, buckets=BUCKETS)
        self.inserted = 0
        self.evictions.count = 0
        self._came: list[Tensor] = []
        """Rows that came in this step, perhaps several times."""
        self._new: list[Tensor] = []
        """Keys that got a row in this step."""
        self._waited: list[tuple[Tensor, Tensor]] = []
        """Keys that asked for admission in this step, with their scores before it; -1 for keys that had not waited."""

    @property
    def evicted(self) -> int:
        """Number of rows that were evicted since the start of this process."""
        return self.evictions.count

    @property
    def is_capped(self) -> bool:
        """True if more rows than the capacity are an error, because no row is evicted for room."""
        return self.capacity is not None and self.policy.eviction.type in ("none", "age")

    @property
    def most_rows(self) -> int | None:
        """Largest number of rows of the table between two steps over all ranks.

        None if nothing limits the rows, or if the surplus is evicted.
        """
        return self.capacity if self.policy.eviction.type == "none" else None

    def rows_after(self, step: int) -> int:
        """Return the number of rows on this rank after ``step`` and after the eviction of rows that are too old."""
        old = self.too_old(step)
        if old.numel() == 0:
            return len(self.index)
        # Rows on a rank that received no key of the table in this step are evicted too.
        came = torch.cat(self._came) if self._came else old.new_empty(0)
        return len(self.index) - int((~torch.isin(old, came)).sum())

    def too_old(self, step: int) -> Tensor:
        """Return the rows that did not come in the ``max_age_steps`` steps up to ``step``; none without that limit."""
        max_age = self.policy.eviction.max_age_steps
        if max_age is None or step < max_age:  # no score is below 0, and a search for it would read all rows
            return torch.empty(0, dtype=torch.int64)
        return self.index.below(step - max_age + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the index and of the keys that wait for admission."""
        return self.index.nbytes + (0 if self._candidates is None else self._candidates.nbytes)

    @property
    def waiting(self) -> int:
        """Number of keys that wait for admission."""
        return 0 if self._candidates is None else len(self._candidates)

    def forget_step(self) -> None:
        """Undo the effect of the keys of this step."""
        for keys in self._new:
            self.inserted -= self.index.remove(keys).numel()
        for keys, scores in reversed(self._waited):
            assert self._candidates is not None, "keys have waited"
            is_first = scores < 0
            self._candidates.remove(keys[is_first])
            rows, _ = self._candidates.find_or_insert(keys[~is_first])
            self._candidates.set_scores(rows, scores[~is_first])
        self._end_step()

    def _end_step(self) -> None:
        self._new.clear()
        self._waited.clear()
        self._came.clear()

    def take(self, keys: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the row of each key, -1 for those not admitted, and the rows that are new."""
        if self.policy.admission.type == "always":
            rows, new = self._insert(keys, step)
        else:
            rows = self.index.find(keys)
            missing = (rows < 0).nonzero()[:, 0]
            missing = missing[self._admitted(keys[missing], step)]
            rows[missing], new = self._insert(keys[missing], step)
        if self.policy.eviction.type != "none":
            self._came.append(rows[rows >= 0])
        self.inserted += new.numel()
        if new.numel():
            self._new.append(self.index.keys_of(new))
        return rows, new

    def _insert(self, keys: Tensor, step: int) -> tuple[Tensor, Tensor]:
        try:
            rows, new = self.index.find_or_insert(keys, 0 if self.policy.eviction.type == "lfu" else step)
        except TableFullError as error:
            raise TableFullError(
                f"table {self.name!r} has {len(self.index)} rows on this rank, and no room for the new keys of one "
                f"batch beyond {self._limit}: use more ranks, admit fewer keys, or give it a capacity and "
                "dynamic.eviction.type: lru or lfu"
            ) from error
        self.pin(self.index.keys_of(new), new)
        return rows, new

    def load(self, keys: Tensor, scores: Tensor | None, step: int) -> Tensor:
        """Return rows of loaded keys; without scores, new keys count as used once, in ``step``.

        Raises:
            MismatchError: if the table would hold more rows than its capacity and evicts none.
        """
        most = self.most_rows
        if most is not None and len(self.index) + keys.numel() > most:
            total = len(self.index) + int((self.index.find(unique(keys).keys) < 0).sum())
            if total > most:
                raise MismatchError(
                    f"table {self.name!r}: {total} rows for a table of at most {most} that evicts none, so that every "
                    "later step would be refused; raise dynamic.capacity (or budget_bytes), load fewer rows, or set "
                    "dynamic.eviction.type: lru or lfu"
                )
        rows, _ = self.index.find_or_insert(keys, 1 if self.policy.eviction.type == "lfu" else step)
        if scores is not None:
            self.index.set_scores(rows, scores)
        self.pin(keys, rows)
        return rows

    def pin(self, keys: Tensor, rows: Tensor) -> None:
        """Protect the rows whose keys the policy pins from eviction."""
        if self._pinned.numel() and rows.numel():
            kept = torch.isin(keys, self._pinned)
            self.index.pin(rows[kept])

    @property
    def is_open(self) -> bool:
        """True if keys have come since the last step that changed the index or the keys that wait."""
        return bool(self._new or self._waited)

    @property
    def bucket_counts(self) -> tuple[Tensor, Tensor]:
        """Numbers of rows, and of waiting keys, of each bucket on this rank: int64 [BUCKETS], [BUCKETS]."""
        rows = self.index.bucket_counts
        return rows, torch.zeros_like(rows) if self._candidates is None else self._candidates.bucket_counts

    def snapshots(self) -> tuple[IndexSnapshot, IndexSnapshot | None]:
        """Return snapshots of the rows, and of the keys that wait for admission if the table counts those."""
        waiting = None if self._candidates is None else IndexSnapshot(self._candidates)
        return IndexSnapshot(self.index), waiting

    def rows_now(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, rows and scores of all rows of the table on this rank."""
        keys, rows = self.index.items()
        return keys, rows, self.index.scores_of(rows)

    def rows_of_last_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, rows and scores as they were after the last step, without the keys that have come since."""
        keys, rows = self.index.items()
        if self._new:
            is_old = ~torch.isin(keys, torch.cat(self._new))
            keys, rows = keys[is_old], rows[is_old]
        return keys, rows, self.index.scores_of(rows)

    @property
    def candidates(self) -> Tensor | None:
        """Keys that wait for admission and their scores: int64 [m, 2], by key."""
        if self._candidates is None:
            return None
        keys, rows = self._candidates.items()
        order = keys.argsort()
        return torch.stack([keys[order], self._candidates.scores_of(rows[order])], 1)

    def candidates_of_last_step(self) -> Tensor | None:
        """Return ``candidates`` as they were after the last step."""
        if self._candidates is None:
            return None
        keys, rows = self._candidates.items()
        scores = self._candidates.scores_of(rows)
        if self._waited:
            asked, before = (torch.cat(each) for each in zip(*self._waited, strict=True))
            asked, order = asked.sort(stable=True)
            is_first = torch.ones_like(asked, dtype=torch.bool)
            is_first[1:] = asked[1:] != asked[:-1]
            asked, before = asked[is_first], before[order][is_first]
            is_other, has_waited = ~torch.isin(keys, asked), before >= 0
            keys = torch.cat([keys[is_other], asked[has_waited]])
            scores = torch.cat([scores[is_other], before[has_waited]])
        order = keys.argsort()
        return torch.stack([keys[order], scores[order]], 1)

    def wait(self, candidates: Tensor) -> None:
        """Add waiting keys and their scores, if the policy admits by frequency."""
        if self._candidates is not None:
            rows, _ = self._candidates.find_or_insert(candidates[:, 0].contiguous())
            self._candidates.set_scores(rows, candidates[:, 1].contiguous())

    def forget_candidates(self, step: int) -> None:
        """Remove the waiting keys that have not come in the last ``forget_steps`` steps."""
        if self._candidates is not None and step >= self.policy.admission.forget_steps:
            rows = self._candidates.below((step - self.policy.admission.forget_steps + 1) << _COUNT_BITS)
            self._candidates.remove(self._candidates.keys_of(rows))

    def score(self, step: int) -> None:
        """Update the scores of the rows that came in the step that ends."""
        came = list(self._came)
        self._end_step()
        if not came:
            return
        is_once = len(came) == 1 and self._keys_are_distinct
        rows = came[0] if is_once else unique(torch.cat(came)).keys
        if self.policy.eviction.type == "lfu":
            self.index.add_scores(rows)
        else:
            self.index.set_scores(rows, step)

    def lowest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and scores of the rows to evict, lowest first: int64 [n], [n], n at most ``count``."""
        rows = self.index.lowest(count)
        return self.index.keys_of(rows), self.index.scores_of(rows)

    def longest_waiting(self, count: int) -> tuple[Tensor, Tensor]:
        """Return waiting keys and scores, those that came longest ago first: int64 [n], [n], n at most ``count``."""
        assert self._candidates is not None, "asked of tables that admit by frequency"
        rows = self._candidates.lowest(count)
        return self._candidates.keys_of(rows), self._candidates.scores_of(rows)

    def look_ahead(self, step: int, rows: int, waiting: int) -> None:
        """Search for the rows and the waiting keys that leave in later steps, a part of the search in each step.

        Which rows leave does not depend on the search.

        Args:
            step: the step that has just ended.
            rows: rows of the table on all ranks.
            waiting: keys that wait for admission on all ranks.
        """
        max_age = self.policy.eviction.max_age_steps
        if max_age is not None:
            self.index.look_ahead_below(step - max_age + 2, max_age)
        elif self.capacity is not None and not self.is_capped and rows > _near(self.capacity):
            self.index.look_ahead()
        admission = self.policy.admission
        if self._candidates is not None:
            self._candidates.look_ahead_below(
                step - admission.forget_steps + 2, admission.forget_steps, 1 << _COUNT_BITS
            )
            if waiting > _near(admission.max_waiting):
                self._candidates.look_ahead()

    def forget_waiting(self, keys: Tensor) -> None:
        """Remove keys from the waiting ones; keys that do not wait are ignored."""
        if self._candidates is not None:
            self._candidates.remove(keys)

    def forget(self, rows: Tensor) -> None:
        """Evict the rows that are given."""
        if rows.numel():
            self.forget_keys(self.index.keys_of(rows))

    def forget_keys(self, keys: Tensor) -> None:
        """Evict the rows of keys; keys without a row are ignored."""
        if self.evictions.keys is not None:
            self.evictions.keys.append(keys[self.index.find(keys) >= 0])
        self.evictions.count += self.index.remove(keys).numel()

    def _admitted(self, keys: Tensor, step: int) -> Tensor:
        """Return a mask of the keys without a row that get one now."""
        admission = self.policy.admission
        if admission.type == "probability":
            key = self.start_key - (1 << 64) if self.start_key >> 63 else self.start_key
            draw = (mix(keys ^ key) >> 11) & ((1 << 53) - 1)
            return draw.double() * 2.0**-53 < admission.probability
        assert self._candidates is not None, "candidates are counted"
        distinct = unique(keys)
        known = self._candidates.find(distinct.keys) >= 0
        rows, _ = self._candidates.find_or_insert(distinct.keys)
        scores = self._candidates.scores_of(rows)
        self._waited.append((distinct.keys, torch.where(known, scores, -1)))
        counts = count_of(scores) + (step_of(scores) != step).long()
        self._candidates.set_scores(rows, (step << _COUNT_BITS) + counts)
        enough = counts >= admission.count
        self._candidates.remove(distinct.keys[enough])
        return enough[distinct.inverse]


def _near(most: int) -> int:
    """Return the number of rows from which on rows are searched that leave when there are more than ``most``."""
    return most - most // 8


def step_of(scores: Tensor) -> Tensor:
    """Return the step in which each waiting key last came."""
    return scores >> _COUNT_BITS


def count_of(scores: Tensor) -> Tensor:
    """Return the number of steps in which each waiting key came."""
    return scores & ((1 << _COUNT_BITS) - 1)


def capacity_of(policy: DynamicPolicy, row_bytes: int) -> int | None:
    """Return the largest number of rows over all ranks; None is without limit.

    Args:
        policy: growth of the table.
        row_bytes: bytes of a row with its optimizer state.

    Raises:
        PlanError: if the budget is below one row.
    """
    rows = [] if policy.capacity is None else [policy.capacity]
    if policy.budget_bytes is not None:
        if policy.budget_bytes < row_bytes:
            raise PlanError(
                f"embedding: dynamic.budget_bytes {policy.budget_bytes} is below the {row_bytes} bytes of one row with "
                "its optimizer state, so that the table could keep nothing; raise it, or give dynamic.capacity in rows"
            )
        rows.append(policy.budget_bytes // row_bytes)
    return min(rows, default=None)


def is_unlimited(policy: DynamicPolicy | None) -> bool:
    """Return whether a table is dynamic and may have as many rows as memory holds."""
    return policy is not None and policy.capacity is None and policy.budget_bytes is None


def limit_of(capacity: int | None, line_bytes: int, unlimited: int = 1, is_tiered: bool = False) -> int:
    """Return the number of rows that a table may have on a rank, for which address space is reserved without tiers.

    Args:
        capacity: largest number of rows over all ranks; None is without limit.
        line_bytes: bytes of a row on this rank, with its optimizer state.
        unlimited: number of the model's tables without a capacity. Each may fill the host's memory, as long as a
            process has addresses for all of them.
        is_tiered: True if rows may be on a disk, so that memory does not limit their number.
    """
    if capacity is None and is_tiered:
        return _MOST_POSITIONS // max(unlimited, 1)
    if capacity is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return max(min(memory, _ADDRESSES // max(unlimited, 1)) // line_bytes, 1)
    return 2 * capacity + _SLACK_ROWS
