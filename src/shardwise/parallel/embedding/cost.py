"""Cost of a placement: bytes that a rank sends in a step, and memory. A test compares the bytes with traced ones.

For one table, with N keys of a rank's batch, U of them distinct, S bags (samples times features), width D in elements
of s bytes, over W ranks, k = (W-1)/W. For ``wire: int8`` read D·s as D + 4, and of columns D/W + 4 for each rank's:

                         keys                       vectors          gradients
    data_parallel        8·U (W-1)                  0                U·D·s (W-1)
    column               8·U (W-1)                  U·D·s k          U·D·s k
    table, row; rows     8·U k                      U·D·s k          U·D·s k
    table; sums          8·(N + S) k                S·D·s k          S·D·s k
    row; sums            8·N k + 8·S (W-1)          S·D·s (W-1)      S·D·s (W-1)

For a table placed by row, sums are fewer bytes than rows if W·S < U: bags of many distinct keys. The owner of a table
placed by table sends and receives what the others do; the figure is the mean over ranks.

Shapes: as above.
"""

from typing import NamedTuple

from shardwise.base.words import bytes_text
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.kernels.tables.wire import RowWire
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.policy import PlacementName, TablePolicy
from shardwise.parallel.embedding.rows.rows_in_tiers import WINDOW_ROWS
from shardwise.tiers.row_cache import bytes_beside
from shardwise.tiers.segment_index import RowPositions
from shardwise.tiers.tier_cost import segment_buffer_bytes

_KEY_BYTES = 8
_AHEAD_BYTES = 4
"""Bytes of memory for each row of a dynamic table among which eviction searches ahead."""
_RECORD_BYTES = 12
"""Bytes of a row on disk beside its line: a CRC and the row's number."""
_WASTE = 2
"""Largest ratio of the bytes on disk to those of the rows that they hold."""


class TableLoad(NamedTuple):
    """Numbers of keys, distinct keys and bags that one rank's batch has for one table."""

    keys: float
    """Number of keys, N."""
    distinct: float
    """Number of distinct keys, U."""
    bags: float
    """Number of bags, S."""


class ExchangeBytes(NamedTuple):
    """Bytes that one rank sends in one forward and backward pass."""

    keys: float
    vectors: float
    gradients: float

    @property
    def total(self) -> float:
        """Sum of the bytes of keys, vectors and gradients."""
        return sum(self)


def bytes_sent(
    place: TablePlacement, load: TableLoad, width: int, wire: RowWire, ranks: int
) -> ExchangeBytes:
    """Return the bytes that a rank sends for one table in one forward and backward pass, as a mean over the ranks.

    Args:
        place: placement of the table.
        load: numbers of keys and bags of a rank's batch.
        width: numbers in a vector, D.
        wire: form in which vectors and gradients travel.
        ranks: number of ranks, W.
    """
    others, part = ranks - 1, (ranks - 1) / ranks
    rows, sums = load.distinct * wire.row_bytes(width), load.bags * wire.row_bytes(width)
    if place.placement == "data_parallel":
        return ExchangeBytes(_KEY_BYTES * load.distinct * others, 0.0, rows * others)
    if place.placement == "column":
        columns = load.distinct * others * wire.row_bytes(width / ranks)
        return ExchangeBytes(_KEY_BYTES * load.distinct * others, columns, columns)
    if place.exchange == "rows":
        return ExchangeBytes(_KEY_BYTES * load.distinct * part, rows * part, rows * part)
    if place.placement == "table":
        return ExchangeBytes(_KEY_BYTES * (load.keys + load.bags) * part, sums * part, sums * part)
    keys = _KEY_BYTES * (load.keys * part + load.bags * others)
    return ExchangeBytes(keys, sums * others, sums * others)


def collectives(place: TablePlacement) -> int:
    """Return the number of messages to all ranks that a table adds to a pass if no other table travels with it."""
    if place.placement == "data_parallel":
        return 2
    return 4 if place.exchange == "pooled" else 3


def rows_touched(place: TablePlacement, load: TableLoad, ranks: int) -> float:
    """Return the number of whole rows that a rank reads, merges and updates in a step, as a mean over the ranks."""
    return load.distinct * (ranks if place.placement == "data_parallel" else 1)


def bytes_held(placement: PlacementName, rows: float, line_bytes: int, ranks: int) -> float:
    """Return the bytes of weights and optimizer state on one rank that holds any part of the table.

    Args:
        placement: placement of the table.
        rows: number of rows.
        line_bytes: bytes of a whole row with its optimizer state.
        ranks: number of ranks.
    """
    cut = ranks if placement in ("row", "column") else 1
    return rows * line_bytes / cut


class TierBytes(NamedTuple):
    """Sizes of a table with tiers on one rank that holds any part of it."""

    rows: int
    """Rows in memory."""
    cache: float
    """Bytes of the rows in memory."""
    indexes: float
    """Bytes of memory of the indexes of the rows in memory and on disk, of the index of a dynamic table's keys, of the
    buffers of the segments, and of the window through which saves and loads copy lines."""
    disk: float
    """Most bytes on disk, once every row has changed; 0 if nothing limits the rows."""
    hit_rate: float = 1.0
    """Share of a batch's rows that the price of a step expects in memory."""

    @property
    def host(self) -> float:
        """Bytes of memory."""
        return self.cache + self.indexes

    @property
    def said(self) -> str:
        """The figures as text."""
        disk = f"up to {bytes_text(self.disk)} on disk" if self.disk else "the rest on disk"
        return (
            f"in tiers: {self.rows:,} rows a rank in {bytes_text(self.cache)} of memory, {bytes_text(self.indexes)} of "
            f"indexes, {disk}; the price of a step expects {self.hit_rate:.0%} of a batch's rows in memory"
        )


def bytes_in_tiers(
    table: TablePolicy,
    placement: PlacementName,
    rows: float,
    line_bytes: int,
    ranks: int,
    group_places: int | None = None,
) -> TierBytes:
    """Return what a table with tiers takes on one rank that holds any part of the table.

    Tables of a group share one cache and one set of segments, whose index and buffers count for each table by its part
    of the rows in memory. With P rows in the cache of the group, of which the table has p, and R rows of the table on
    the rank:

        indexes    p / P · (index and marks of P rows + buffers of the segments + window) + 4 R
                   and the index of R keys if the table is dynamic, without keys that wait for admission

    Args:
        table: the table, which has tiers.
        placement: placement of the table.
        rows: largest number of rows; 0 if nothing limits it.
        line_bytes: bytes of a whole row with its optimizer state.
        ranks: number of ranks.
        group_places: rows in the cache of the group on the rank; None: the table is alone in its group.
    """
    tiers = table.tiers
    assert tiers is not None, "the table has tiers"
    cached = tiers.rows_in_memory(table.rows, line_bytes, placement == "row", ranks)
    held = bytes_held(placement, rows, 1, ranks) if placement == "row" else rows
    line = line_bytes / ranks if placement == "column" else line_bytes
    places = group_places or cached
    shared = bytes_beside(places) + segment_buffer_bytes(round(line)) + min(places, WINDOW_ROWS) * line
    indexes = shared * cached / places + RowPositions.bytes_for(round(held), table.dynamic is not None)
    if table.dynamic is not None:
        indexes += HashIndex.bytes_for(round(held), grown=True)
        indexes += _AHEAD_BYTES * held * (table.dynamic.eviction.type != "none")
    most = held * (line + _RECORD_BYTES) * _WASTE
    return TierBytes(cached, cached * line, indexes, most, tiers.hit_rate)
