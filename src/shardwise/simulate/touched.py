"""Bytes that Actions read and write where they compute, beside the passes of the model.

Of a bucket with E owned elements, and g, m, w bytes of a gradient, a master or moment and a weight, M moments:

    B             2 g P in the first microbatch, 3 g P in later ones; P elements of the whole bucket
    NORM          g E / copies                              each copy sums a part
    DIRECTION     g E + (2 M + 1) m E                       moments, and the direction that STEP applies
    TRUST_RATIO   2 m E                                     weights and directions
    ALL_TO_ALL    5 rounds of Newton-Schulz of the matrices that the rank owns: 4 r² c + 2 r³ FLOPs each, r <= c
    BALANCE       3 bytes of the routers' biases
    SCALE         w E of the weights that are gathered in fp8
    FETCH, DELIVER, STEP of tables    rows of a batch (parallel/embedding/cost.py)

Cost: one look at each bucket.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.base.hardware import Hardware, Product
from shardwise.observe.memory import MAPPED_BYTES
from shardwise.parallel.embedding.calls import GroupLoad
from shardwise.parallel.embedding.cost import TableLoad, bytes_held, rows_touched
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.embedding.rows.dynamic import capacity_of
from shardwise.parallel.embedding.rules import dtypes_of, optimizer_of
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan, RankClass
from shardwise.plan.registry import Registry
from shardwise.simulate.work import NO_WORK, Work
from shardwise.tiers.row_cache import LEAVING_PARTS
from shardwise.tiers.tier_cost import row_reads, row_write_s

_KEY_BYTES = 8
_NEWTON_SCHULZ = 5
"""Rounds of Newton-Schulz, the default of Muon."""


class DirectedBytes(NamedTuple):
    """Bytes of one Unit's update, in the two halves of optimizers that look at whole tensors."""

    direction: int
    """Bytes of DIRECTION."""
    saved: int
    """Bytes of an update in one go that the second half does not touch any more."""
    compared: int
    """Bytes of TRUST_RATIO."""


def gradient_bytes(ranks: RankClass, mesh: Mesh) -> tuple[list[int], float]:
    """Return the bytes of gradients that a backward pass writes, by Unit, and those whose squares NORM sums."""
    written, normed = [0] * len(ranks.units), 0.0
    for (unit, place), rows in ranks.buffers.items():
        bucket, strategy = ranks.units[unit].buckets[place], ranks.strategies[unit]
        grad = next((row for row in rows if row.kind == "grad"), None)
        if grad is None:
            continue
        itemsize = bucket.key.dtype.itemsize if strategy.cuts_grad else grad.itemsize
        written[unit] += bucket.elements * itemsize
        copies = mesh.size(strategy.axes[0]) * mesh.size(strategy.axes[1])
        normed += bucket.elements * grad.itemsize / copies
    return written, normed


def directed_bytes(ranks: RankClass, registry: Registry, mesh: Mesh, unit: int) -> DirectedBytes:
    """Return the bytes of the halves of one Unit's update; zeros if the update looks at each element alone."""
    needs = set() if ranks.units[unit].has_rows else registry.needs_of(ranks.units[unit])
    if not needs - {"elements"}:
        return DirectedBytes(0, 0, 0)
    grad = moments = master = 0
    for place, bucket in enumerate(ranks.units[unit].buckets):
        sizes = {row.kind: row.nbytes(bucket, mesh) for row in ranks.buffers[unit, place]}
        if "grad" not in sizes:
            continue
        strategy = ranks.strategies[unit]
        own = bucket.shard_elements if strategy.cuts_master else bucket.elements
        grad += sizes["grad"] * own // bucket.elements if not strategy.cuts_grad else sizes["grad"]
        moments += sum(row.nbytes(bucket, mesh) for row in ranks.buffers[unit, place] if row.is_moment)
        master += sizes.get("master", own * bucket.key.dtype.itemsize)
    return DirectedBytes(
        grad + 2 * moments + master, grad + 2 * moments - master, 2 * master * ("norm" in needs)
    )


def scaled_bytes(ranks: RankClass) -> int:
    """Return the bytes of a rank's own weights that are gathered in fp8 and trained."""
    found = 0
    for unit, strategy in zip(ranks.units, ranks.strategies, strict=True):
        for bucket in unit.buckets:
            if bucket.key.trained and bucket.key.gather_dtype is not None:
                own = bucket.shard_elements if strategy.cuts_weight else bucket.elements
                found += own * bucket.key.dtype.itemsize
    return found


def balanced_bytes(registry: Registry, ranks: RankClass) -> int:
    """Return the bytes that BALANCE reads and writes: biases and loads of routers."""
    return sum(3 * info.elements * info.dtype.itemsize for info in registry.needs("loads", ranks.stages))


def orthogonalised(plan: Plan, ranks: RankClass) -> Work:
    """Return the products of Newton-Schulz on one rank.

    The ranks that hold a stage share the matrices evenly.
    """
    matrices = plan.registry.needs("matrix", ranks.stages)
    if not matrices:
        return NO_WORK
    sharers = plan.mesh.world_size // plan.mesh.pp
    products: Counter[Product] = Counter()
    for info in matrices:
        rows, columns = sorted((info.shape[0], info.elements // info.shape[0]))
        square = Product("product", "bf16", 2 * rows * rows * rows)
        wide = Product("product", "bf16", 2 * rows * rows * columns)
        products[square] += _NEWTON_SCHULZ
        products[wide] += 2 * _NEWTON_SCHULZ
    shared = {product: -(-calls // sharers) for product, calls in products.items()}
    return Work(shared, calls=sum(shared.values()))


class MissedRows(NamedTuple):
    """Rows of one table that a rank reads from a disk and writes back in one microbatch."""

    rows: float
    held: float
    """Rows that the disk holds."""
    line_bytes: int
    """Bytes of a row with its optimizer state."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the reads and of the writes."""
        written_s = row_write_s(self.rows, self.line_bytes, hardware)
        return row_reads(self.rows, self.held, self.line_bytes).seconds(hardware) + written_s


def missed_rows(
    table: TablePolicy, place: TablePlacement, rows: float, line_bytes: int, ranks: int
) -> tuple[MissedRows, ...]:
    """Return the rows of a table that are not in memory, at the hit rate that its tiers count on.

    Args:
        table: the table.
        place: its placement.
        rows: distinct rows of a microbatch on a rank.
        line_bytes: bytes of a row with its optimizer state.
        ranks: ranks over which the rows are spread.
    """
    if table.tiers is None:
        return ()
    most = table.rows if table.dynamic is None else capacity_of(table.dynamic, line_bytes)
    held = bytes_held(place.placement, most or rows, 1, ranks)
    return (MissedRows(rows * (1.0 - table.tiers.hit_rate), held, line_bytes),)


def _cached_rows(table: TablePolicy, place: TablePlacement, line_bytes: int, ranks: int) -> int:
    """Return the rows of a table in memory on a rank; 0 without tiers."""
    if table.tiers is None:
        return 0
    return table.tiers.rows_in_memory(table.rows, line_bytes, place.placement == "row", ranks)


class TableRows(NamedTuple):
    """Rows of one collection of embedding tables in one microbatch of a rank."""

    keys_bytes: float = 0.0
    """Bytes of the keys of a batch."""
    read_bytes: float = 0.0
    """Bytes of the weights of distinct rows that a rank reads."""
    updated_bytes: float = 0.0
    """Bytes of distinct rows with their optimizer state that a rank updates."""
    missed: tuple[MissedRows, ...] = ()
    """Rows that a rank reads from a disk and writes back, for each table with tiers."""
    passing_bytes: float = 0.0
    """Bytes of keys, vectors, gradients and lines of rows on their way in one microbatch; see ``passing_bytes``."""
    freed_bytes: float = 0.0
    """Bytes that the heap of a CPU rank keeps of these when they are freed, in pieces under ``MAPPED_BYTES``: twice as
    many. A freed piece does not serve an aligned tensor of the same size, which needs some bytes more."""


def passing_bytes(
    table: TablePolicy,
    load: TableLoad,
    served: float,
    vector_bytes: int,
    line_bytes: int,
    cached: int,
    ranks: int,
) -> float:
    """Return the bytes of a table's rows on their way through a microbatch on a rank, as if all were held at once.

    With N keys, U distinct ones, A rows that the rank serves, vectors of v bytes, and for a table with tiers lines of l
    bytes, M rows that are missing from P in memory:

        keys       8 (2 N + U + 3 A)         keys and the index of each among U; keys that came, their rows and places
        vectors    v (U + 2 A)               gradients merged by key, as they came, and merged by row
        messages   v (U + A)                 vectors that are sent and that came, if there are several ranks
        lines      l (M + P / 64)            lines that are read, and lines that leave in one batch

    Args:
        table: the table.
        load: numbers of keys of the microbatch.
        served: rows that the rank serves, A.
        vector_bytes: bytes of a vector, v.
        line_bytes: bytes of a row with its optimizer state, l.
        cached: rows of the table in memory on the rank, P; 0 without tiers.
        ranks: ranks over which the rows are spread.
    """
    keys = _KEY_BYTES * (2 * load.keys + load.distinct + 3 * served)
    found = keys + vector_bytes * (load.distinct + 2 * served)
    found += vector_bytes * (load.distinct + served) * (ranks > 1)
    if table.tiers is not None:
        found += line_bytes * (served * (1 - table.tiers.hit_rate) + cached / LEAVING_PARTS)
    return found


def table_rows(groups: Sequence[GroupLoad], ranks: int) -> TableRows:
    """Return the rows of a collection in one microbatch.

    Args:
        groups: Groups of tables, with the numbers of keys of a microbatch.
        ranks: Ranks over which the rows are spread.
    """
    found = TableRows()
    for group in groups:
        width, state = group.tables.width, optimizer_of(group.tables.optimizer).columns(group.tables.width)
        stored = dtypes_of(group.tables.tables[0], group.wire.dtype)
        line_bytes = stored.line_bytes(width, state)
        for table, place, load in zip(group.tables.tables, group.tables.places, group.loads, strict=True):
            touched = rows_touched(place, load, ranks)
            cached = _cached_rows(table, place, line_bytes, ranks)
            vector_bytes = width * group.wire.dtype.itemsize
            passing = passing_bytes(table, load, touched, vector_bytes, line_bytes, cached, ranks)
            is_small = group.whole.distinct * vector_bytes < MAPPED_BYTES
            found = TableRows(
                found.keys_bytes + load.keys * _KEY_BYTES,
                found.read_bytes + touched * stored.line_bytes(width, 0),
                found.updated_bytes + touched * line_bytes,
                found.missed + missed_rows(table, place, touched, line_bytes, ranks),
                found.passing_bytes + passing,
                found.freed_bytes + 2 * passing * is_small,
            )
    return found
