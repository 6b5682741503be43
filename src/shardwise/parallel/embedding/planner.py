"""The planner chooses a placement for each table and gives the reason. Pure: the result is the same on every rank.

Tables are placed one after another, the largest first. Of the placements that the user allows and that fit into the
memory that is left, the planner chooses the one that takes the least time. Beside an accelerator there are two
memories: device memory for static tables and the host's for dynamic ones. On a CPU both kinds share one memory.

    seconds = bytes sent / rate of the link + rows touched · 2 · line / row_bytes_s
              + messages · latency of the link / tables that share them                 (base/hardware.py)

A table placed by table goes to the rank with the least time so far. Its time counts 5 % more than the formula, because
owners are never equally busy. A table that fits nowhere is an error; no table is left out.

Source: the greedy placement of the largest first, as in HugeCTR's sample planner; the terms are those of cost.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.base.errors import PlanError
from shardwise.base.hardware import ASSUMED_HARDWARE, Hardware
from shardwise.base.ragged import Ragged
from shardwise.base.words import bytes_text
from shardwise.kernels.tables.wire import RowWire, WireName
from shardwise.parallel.embedding.cost import (
    TableLoad,
    bytes_held,
    bytes_in_tiers,
    bytes_sent,
    collectives,
    rows_touched,
)
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.policy import PLACEMENTS, PlacementName, RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.dynamic import capacity_of
from shardwise.parallel.embedding.rows.row_marks import MARK_BYTES
from shardwise.parallel.embedding.rules import row_bytes

_OWNERS_DIFFER = 1.05
"""Factor on the time of placement ``table``, because owners are not equally busy."""


@dataclass(frozen=True)
class PlacementChoice:
    """The placement of one table, with the reason."""

    table: str
    place: TablePlacement
    why: str
    """Reason for the choice, as text."""
    line: str
    """Size of the table, as text."""

    def __str__(self) -> str:
        owner = f" on rank {self.place.owner}" if self.place.placement == "table" else ""
        return f"{self.table} ({self.line}): {self.place.placement}{owner}, {self.why}"


class _RankBudget:
    """Memory and time of the ranks, as tables are placed.

    ``host_bytes`` is the memory of dynamic tables if it is separate, else None.
    """

    def __init__(self, ranks: int, memory_bytes: float | None, host_bytes: float | None):
        self._left = [float("inf") if memory_bytes is None else float(memory_bytes)] * ranks
        self._left_on_host = self._left if host_bytes is None else [float(host_bytes)] * ranks
        self.seconds = [0.0] * ranks

    @property
    def is_apart(self) -> bool:
        """True if dynamic tables have a memory of their own."""
        return self._left_on_host is not self._left

    def left(self, table: TablePolicy) -> list[float]:
        """Return the memory that is left for the table's rows, by rank."""
        return self._left_on_host if _is_on_host(table) else self._left

    def name(self, table: TablePolicy) -> str:
        """Return the name of that memory, with the key that sets its size."""
        if _is_on_host(table) and self.is_apart:
            return "host memory (tables.host_memory_bytes)"
        return f"{'device memory' if self.is_apart else 'memory'} (tables.memory_bytes)"

    def owner(self, table: TablePolicy, needed: float) -> int | None:
        """Return the least busy rank that has room; None if no rank has."""
        fitting = [rank for rank, left in enumerate(self.left(table)) if left >= needed]
        return min(fitting, key=lambda rank: (self.seconds[rank], rank), default=None)

    def take(self, table: TablePolicy, place: TablePlacement, held: float, seconds: float) -> None:
        """Account for a table at ``place``: ``held`` bytes on each rank that holds it, and its seconds."""
        left = self.left(table)
        for rank in range(len(left)):
            if place.holds(rank):
                left[rank] -= held
        ranks = len(left)
        for rank in range(ranks):
            if place.placement != "table":
                self.seconds[rank] += seconds
            elif rank == place.owner:
                self.seconds[rank] += seconds * ranks


def plan_tables(
    tables: Sequence[TablePolicy],
    optimizer: RowOptimizerPolicy,
    ranks: int,
    batch: int,
    dtype: torch.dtype,
    memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    hardware: Hardware = ASSUMED_HARDWARE,
    wire: WireName = "fp32",
) -> list[PlacementChoice]:
    """Choose a placement for each table.

    Args:
        tables: the tables.
        optimizer: optimizer of tables without their own.
        ranks: number of ranks.
        batch: samples of a rank's microbatch.
        dtype: dtype of the collection.
        memory_bytes: memory of a rank for tables; None is without limit.
        host_memory_bytes: memory of a rank for dynamic tables; None means that they share ``memory_bytes``.
        hardware: rates of a rank, which must be given alike on every rank.
        wire: form in which vectors and gradients travel.

    Returns:
        The choices, in the order of ``tables``.

    Raises:
        PlanError: if a table fits nowhere, or if its policy demands a placement that is impossible.
    """
    room = _RankBudget(ranks, memory_bytes, host_memory_bytes)
    sized = sorted(
        tables, key=lambda table: -_rows(table, optimizer, dtype) * row_bytes(table, optimizer, dtype)
    )
    found = {
        table.name: _choose(
            table, optimizer, ranks, batch, dtype, room, len(tables), hardware, RowWire(wire, dtype)
        )
        for table in sized
    }
    return [found[table.name] for table in tables]


def measured(tables: Sequence[TablePolicy], features: Mapping[str, Ragged]) -> list[TablePolicy]:
    """Return the policies with figures of a batch: keys of a sample and feature, and the share of distinct keys."""
    found = []
    for table in tables:
        given = [features[name] for name in table.feature_names]
        keys = torch.cat([ragged.values for ragged in given])
        bags = sum(ragged.samples for ragged in given)
        if keys.numel() and bags:
            figures = {
                "keys_per_sample": keys.numel() / bags,
                "distinct_ratio": keys.unique().numel() / keys.numel(),
            }
            table = table.model_copy(update=figures)
        found.append(table)
    return found


def load_of(table: TablePolicy, batch: int) -> TableLoad:
    """Return the numbers of keys, distinct keys and bags of a rank's batch for a table, from the policy's figures."""
    bags = float(batch * len(table.feature_names))
    keys = bags * table.keys_per_sample
    distinct = keys * table.distinct_ratio
    return TableLoad(keys, distinct if table.rows is None else min(distinct, table.rows), bags)


def _choose(
    table: TablePolicy,
    optimizer: RowOptimizerPolicy,
    ranks: int,
    batch: int,
    dtype: torch.dtype,
    room: _RankBudget,
    tables: int,
    hardware: Hardware,
    wire: RowWire,
) -> PlacementChoice:
    rows, line = _rows(table, optimizer, dtype), row_bytes(table, optimizer, dtype)
    number = (
        f"up to {rows:,.0f}" if table.dynamic and rows else ("dynamic" if table.dynamic else f"{rows:,.0f}")
    )
    text = f"{number} x {table.width}, {(table.optimizer or optimizer).type}, {bytes_text(rows * line)}"
    text += "" if table.tiers is None else ", rows in tiers"
    load, link = load_of(table, batch), hardware.links["host"]
    fitting: list[tuple[float, TablePlacement, float]] = []
    too_large: list[str] = []
    for place in _candidates(table, ranks):
        held = _bytes_held(table, place, rows, line, ranks)
        owner = room.owner(table, held) if place.placement == "table" else 0
        if owner is None or (place.placement != "table" and min(room.left(table)) < held):
            too_large.append(f"{place.placement} needs {bytes_text(held)}")
            continue
        place = TablePlacement(place.placement, owner, place.exchange)
        sent = bytes_sent(place, load, table.width, wire, ranks).total
        seconds = (
            sent / link.bytes_s
            + rows_touched(place, load, ranks) * 2 * line / hardware.row_bytes_s
            + (collectives(place) * link.latency_s / tables if ranks > 1 else 0.0)
        )
        fitting.append((seconds * (_OWNERS_DIFFER if place.placement == "table" else 1.0), place, sent))
    if not fitting:
        left = ", ".join(bytes_text(each) for each in room.left(table)[:8])
        raise PlanError(
            f"table {table.name!r} ({text}) fits nowhere: {'; '.join(dict.fromkeys(too_large))}; left of "
            f"{room.name(table)} on the ranks: {left}. Use more ranks, a narrower table, an optimizer with less state "
            f"(rowwise_adagrad, sgd), or {'a smaller dynamic.capacity' if table.dynamic else 'placement: row'}"
        )
    best = min(fitting, key=lambda each: each[0])
    seconds, place, sent = best
    room.take(table, place, _bytes_held(table, place, rows, line, ranks), seconds)
    if table.tiers is not None:
        sizes = bytes_in_tiers(table, place.placement, rows, line, ranks)
        text = text.removesuffix("rows in tiers") + sizes.said
    return PlacementChoice(table.name, place, _why(table, best, fitting, too_large, ranks), text)


def _candidates(table: TablePolicy, ranks: int) -> list[TablePlacement]:
    """Return the placements that the policy allows; the first of equals wins."""
    asked: Sequence[PlacementName] = PLACEMENTS if table.placement == "auto" else (table.placement,)
    if ranks == 1 and table.placement == "auto":
        return [TablePlacement("data_parallel")]
    if table.placement == "column" and table.width < ranks:
        raise PlanError(
            f"table {table.name!r}: placement column gives each of {ranks} ranks a column, but the width is "
            f"{table.width}; use placement row, or at most {table.width} ranks"
        )
    adds = all(table.pooling_of(feature) in ("sum", "mean") for feature in table.feature_names)
    found = []
    for placement in asked:
        if placement == "column" and table.width < ranks:
            continue
        if table.exchange != "pooled":
            found.append(TablePlacement(placement))
        can_sum = placement in ("table", "row") and adds and table.dynamic is None
        if can_sum and table.exchange != "rows":
            found.append(TablePlacement(placement, exchange="pooled"))
    return found


def _why(
    table: TablePolicy,
    best: tuple[float, TablePlacement, float],
    fitting: Sequence[tuple[float, TablePlacement, float]],
    too_large: Sequence[str],
    ranks: int,
) -> str:
    """Return one sentence that compares the chosen placement with the others."""
    if ranks == 1:
        return "one rank holds everything"
    _, place, sent = best
    what = f"exchanges {place.exchange}, " if place.placement in ("table", "row") else ""
    asked = "as asked; " if table.placement != "auto" else ""
    others = [
        f"{other.placement}{' (pooled)' if other.exchange == 'pooled' else ''} {seconds * 1e3:.2f}"
        for seconds, other, _ in sorted(fitting, key=lambda each: each[0])
        if other != place
    ]
    text = f"{what}{asked}{best[0] * 1e3:.2f} ms and {bytes_text(sent)} a rank and step"
    text += f" (others, ms: {', '.join(others)})" if others else ""
    return text + (f"; no room: {'; '.join(dict.fromkeys(too_large))}" if too_large else "")


def _is_on_host(table: TablePolicy) -> bool:
    """Return whether a table's rows are in the host's memory even beside an accelerator."""
    return table.dynamic is not None or table.tiers is not None


def _bytes_held(table: TablePolicy, place: TablePlacement, rows: float, line: int, ranks: int) -> float:
    """Return the bytes of memory of one rank that holds any part of the table."""
    marks = bytes_held(place.placement, rows, MARK_BYTES, ranks) if table.marks_changes else 0.0
    if table.tiers is None:
        return bytes_held(place.placement, rows, line, ranks) + marks
    return bytes_in_tiers(table, place.placement, rows, line, ranks).host + marks


def _rows(table: TablePolicy, optimizer: RowOptimizerPolicy, dtype: torch.dtype) -> float:
    """Return the largest number of rows; 0 for a dynamic table without a limit, which needs no memory in advance."""
    if table.dynamic is None:
        return float(table.rows or 0)
    return float(capacity_of(table.dynamic, row_bytes(table, optimizer, dtype)) or 0)
