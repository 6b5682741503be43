"""Memory of a rank beside its steps: what building, saving and loading hold, from the Plan alone.

    build    state of the Units so far, and the part of a parameter that is being drawn (models/initial.py), or, of a
             model that comes with its weights, those of the Units whose state is still to be made
    buffers  the model's own buffers, such as the statistics of batch norms; in every phase
    save     the copy that is written behind training: every range that the rank writes and every buffer, each on 64
             bytes, in host memory; none if state lies on a disk                           (checkpoint/checkpoints.py)
    tables   start rows that are drawn in front of all other state           (parallel/embedding/rows/store.py); in a
             save, a block of rows that are read when they are written, or copies of the rows of small tables; in a
             load, a chunk of rows with the lines made of some of them              (engine/state/saved_tables.py)
    load     new moments beside the old ones on the device, and one block of a file in host memory (checkpoint/load.py)
    rings    memory that CPU ranks of one host share, for each group and each pair of a pipeline (comm/shared_memory.py)

Cost: one look at each parameter of the rank; of a parameter that is cut by rows, at each run of rows.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwise.checkpoint.layout import LayoutSizes, arrange
from shardwise.checkpoint.piece import TensorSpec
from shardwise.comm.peers import RING
from shardwise.comm.shared_memory import ring_file_bytes
from shardwise.engine.fit.outside import communicators_by_use, groups_of, neighbours_of
from shardwise.engine.state.saved_tables import CHUNK_BYTES
from shardwise.parallel.embedding.rows.row_contents import LOADED_ROWS
from shardwise.parallel.embedding.saved import READ_ROWS
from shardwise.plan.placement import Shard
from shardwise.plan.plan import Plan, RankClass, class_of
from shardwise.plan.registry import TensorInfo
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import ALIGNMENT_BYTES, Bucket

_FILL_ELEMENTS = 1 << 22
"""Elements that are drawn or read at a time (parallel/zero/bucket.py)."""
_DRAW_ELEMENTS = 1 << 18
"""Elements that are drawn in fp64 at a time (models/initial.py)."""
_DRAW_BYTES = 8
_START_ROWS = 1 << 16
"""Rows of a table that are drawn at a time (parallel/embedding/rows/store.py)."""
_KEY_BYTES = 8
_KEYS_ON_THE_WAY = 3
"""Tensors of keys, rows and places that a load or a save makes beside the keys of the rows that it moves."""
_KEY_AND_SCORE_BYTES = 16
"""Bytes of a dynamic table's row beside its line in a checkpoint."""
_ORDER_BYTES = 4
"""Bytes of a row in the order in which a save reads a dynamic table."""
_DECODED_BYTES = 4
"""Bytes of an element of a moment that is stored with scales, when it is saved."""


def buffer_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the model's buffers on ``rank``."""
    stages = plan.classes[class_of(plan.mesh, rank)].stages
    return sum(
        info.elements * info.dtype.itemsize
        for info in plan.registry.of_kind("buffer")
        if info.stages[0] in stages
    )


def save_copy_bytes(plan: Plan, rank: int, unsaved: Collection[str] = ()) -> int:
    """Return the bytes of the copy that a save behind training makes on ``rank``; 0 if state lies on a disk.

    Args:
        plan: The Plan.
        rank: The rank.
        unsaved: Names of buffers that are not saved.
    """
    ranks = plan.classes[class_of(plan.mesh, rank)]
    if any(
        row.tier == "disk" for each in plan.classes.values() for rows in each.buffers.values() for row in rows
    ):
        return 0
    slices, total = TensorSlices(plan.registry, plan.mesh, rank), 0
    for (unit, place), rows in ranks.buffers.items():
        bucket, stage = ranks.units[unit].buckets[place], ranks.unit_stages[unit]
        slots = [
            slot for slot in bucket.slots if plan.registry.get("parameter", slot.name).stages[0] == stage
        ]
        window = _written_range(plan, ranks, unit, bucket, rank)
        for row in rows:
            if row.kind in ("grad", "next weight"):
                continue
            itemsize = row.itemsize if row.form == "fp32" else _DECODED_BYTES
            if row.kind == "master" and itemsize == bucket.key.dtype.itemsize:
                continue  # saved as the weight
            is_cut = row.elements(bucket, plan.mesh) < bucket.elements
            first, elements = (window[2], bucket.shard_elements) if is_cut else (0, bucket.elements)
            for found in slices.ranges_in(slots, first, elements, window[:2]):
                total += _aligned((found.stop - found.start) * itemsize)
    buffers = [info for info in plan.registry.of_kind("buffer") if info.name not in unsaved]
    own = [info for info in buffers if info.stages[0] in ranks.stages and slices.holds_first(info)]
    return total + sum(_aligned(info.elements * info.dtype.itemsize) for info in own)


def _written_range(
    plan: Plan, ranks: RankClass, unit: int, bucket: Bucket, rank: int
) -> tuple[int, int, int]:
    """Return the range of a bucket that ``rank`` writes, and the first element of the range that it owns."""
    outer, inner = ranks.strategies[unit].axes
    own = plan.mesh.index(inner, rank) * bucket.shard_elements
    return (own, own + bucket.shard_elements, own) if plan.mesh.index(outer, rank) == 0 else (0, 0, own)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def load_rows(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes that a load holds on ``rank`` beside the state, by row.

    Moments on the device are read into new buffers, which replace the old ones. Files are read block by block.
    """
    ranks = plan.classes[class_of(plan.mesh, rank)]
    moments = sum(
        row.nbytes(ranks.units[unit].buckets[place], plan.mesh)
        for (unit, place), rows in ranks.buffers.items()
        for row in rows
        if row.is_moment and row.tier == "device"
    )
    return {"new moments": moments, "read": max(_block_bytes(plan), _table_bytes_at_load(plan, rank))}


def _block_bytes(plan: Plan) -> int:
    """Return the bytes of the block through which a load reads files."""
    sizes = LayoutSizes()
    parameters = plan.registry.of_kind("parameter")
    if sum(info.elements * info.dtype.itemsize for info in parameters) > sizes.block_bytes:
        return sizes.block_bytes
    specs = [TensorSpec("weight", info.name, info.shape, info.dtype) for info in parameters]
    buffers = plan.registry.of_kind("buffer")
    specs += [TensorSpec("buffer", info.name, info.shape, info.dtype) for info in buffers]
    dtypes = {info.name: info.dtype for info in parameters}
    masters = plan.registry.of_kind("master")
    specs += [
        TensorSpec("master", info.name, info.shape, info.dtype)
        for info in masters
        if info.dtype != dtypes[info.name]
    ]
    specs += [
        TensorSpec(info.label, info.name, info.shape, info.dtype) for info in plan.registry.of_kind("moment")
    ]
    files = arrange(specs, sizes, {})
    return min(sizes.block_bytes, max((file.bytes for file in files), default=0))


class _TablePart(NamedTuple):
    """The part of one embedding table that a rank holds."""

    rows: int
    weight_bytes: int
    line_bytes: int
    """Bytes of all rows with their optimizer state."""
    grows: bool
    places: int | None
    """Rows in memory; None if all are."""
    is_streamed: bool
    """True if a save reads the rows when it writes them."""
    whole_bytes: int
    """Bytes of all rows of all ranks with their optimizer state."""

    @property
    def bytes_a_row(self) -> int:
        """Bytes of one row with its optimizer state."""
        return self.line_bytes // self.rows


def _tables_on(plan: Plan, rank: int) -> list[_TablePart]:
    """Return the parts of tables on ``rank``."""
    found: dict[str, list[TensorInfo]] = {}
    for info in plan.registry.of_kind("table"):
        found.setdefault(info.name, []).append(info)
    parts = []
    for infos in found.values():
        sizes = [round(replace(info, tiers=None).bytes_on(plan.mesh, rank)) for info in infos]
        wholes = [info.elements * info.dtype.itemsize for info in infos]
        weight = max(range(len(infos)), key=lambda i: infos[i].elements)
        rows = infos[weight].shape[0] * sizes[weight] // max(wholes[weight], 1)
        tiers, is_cut = infos[weight].tiers, isinstance(infos[weight].on("dp"), Shard)
        if is_cut:
            rows = infos[weight].shape[0]
        parts.append(
            _TablePart(
                rows,
                sizes[weight],
                sum(sizes),
                infos[weight].grows,
                None if tiers is None else tiers.rows,
                not is_cut,
                sum(wholes),
            )
        )
    return [part for part in parts if part.rows]


def table_bytes_at_build(plan: Plan, rank: int) -> int:
    """Return the most bytes that drawing the start rows of a table takes beside the table: keys, lines, weights.

    The start rows of a table with tiers are drawn in the steps that need them.
    """
    most = 0
    for part in _tables_on(plan, rank):
        if part.grows or part.places is not None:
            continue
        at_once = min(part.rows, _START_ROWS)
        drawn = (part.line_bytes + part.weight_bytes) * at_once // part.rows
        most = max(most, part.rows * _KEY_BYTES + drawn)
    return most


def table_bytes_at_save(plan: Plan, rank: int) -> int:
    """Return the bytes of table rows that a save holds beside the tables.

    That is a block of a file, and the lines of a few rows, as they are read and copied; for dynamic tables also the
    order of all rows. Tables whose rows a snapshot cannot give are copied before the first file is written. Rows that
    steps change while a save is written, and of which a copy is kept, are not counted.
    """
    block, copied, order, lines = LayoutSizes().block_bytes, 0, 0, 0
    for part in _tables_on(plan, rank):
        if not part.is_streamed:
            copied += part.line_bytes + part.rows * _KEY_AND_SCORE_BYTES * part.grows
            continue
        order += part.rows * _ORDER_BYTES * part.grows
        keys = min(part.rows, READ_ROWS) * _KEYS_ON_THE_WAY * _KEY_BYTES
        some = _bytes_of_some(part, READ_ROWS) + keys
        if part.places is not None:  # a window of lines, and the lines that are read of the disk for it
            some += min(part.rows, READ_ROWS) * part.bytes_a_row
        lines = max(lines, min(block, part.weight_bytes) + some)
    return copied + order + lines


def _bytes_of_some(part: _TablePart, rows: int) -> int:
    """Return the bytes of some rows on their way from a table, or into it.

    Their lines are made of their weights; for tables with tiers they are also copied as bytes.
    """
    rows = min(part.rows, rows)
    lines = part.bytes_a_row + part.weight_bytes // part.rows
    return rows * (lines if part.places is None else lines + part.bytes_a_row)


def _table_bytes_at_load(plan: Plan, rank: int) -> int:
    """Return the most bytes that loading tables takes: a chunk of rows with their keys, and a block of a file or lines.

    A chunk is counted over all ranks and tables, of which a rank reads what it holds.
    """
    parts = _tables_on(plan, rank)
    if not parts:
        return 0
    share = min(1.0, CHUNK_BYTES / sum(part.whole_bytes for part in parts))
    read = share * sum(part.line_bytes + part.rows * _KEY_BYTES for part in parts)
    of_one = max(part.rows * min(1.0, CHUNK_BYTES / part.whole_bytes) for part in parts)
    block = min(LayoutSizes().block_bytes, max(part.weight_bytes for part in parts))
    beside = max(block, *(_bytes_of_some(part, LOADED_ROWS) for part in parts))
    return round(read + of_one * _KEYS_ON_THE_WAY * _KEY_BYTES) + beside


def most_at_build(plan: Plan, rank: int, draws: bool, given_bytes: int = 0) -> tuple[dict[str, int], int]:
    """Return the largest memory of a build: state by row of the ledger, and the bytes of start weights beside it.

    Units are filled one after another. A bucket's weights and masters exist while its parameters are drawn; its moments
    are made afterwards. Weights that the model comes with are released with their Unit.

    Args:
        plan: The Plan.
        rank: The rank.
        draws: True if start weights are drawn; False if the model comes with them.
        given_bytes: Bytes of the weights that the model comes with.
    """
    ranks = plan.classes[class_of(plan.mesh, rank)]
    given = _given_by_unit(ranks, given_bytes)
    held: dict[str, int] = {}
    best: tuple[dict[str, int], int] = {}, 0
    for unit in ranks.units:
        for place, bucket in enumerate(unit.buckets):
            rows = ranks.buffers[unit.index, place]
            sizes = [(row, row.nbytes(bucket, plan.mesh)) for row in rows if row.kind != "grad"]
            drawn = _drawn_bytes(plan, ranks, unit.index, bucket, rank) if draws else 0
            for follows in (False, True):
                for row, size in sizes:
                    if row.is_moment is follows:
                        held[row.row] = held.get(row.row, 0) + size
                beside = (0 if follows else drawn) + sum(given[unit.index :])
                if sum(held.values()) + beside > sum(best[0].values()) + best[1]:
                    best = dict(held), beside
    return best


def _given_by_unit(ranks: RankClass, given_bytes: int) -> list[int]:
    """Return the bytes of the weights that a model comes with, by Unit, as large as the Units' parameters are."""
    elements = [
        sum(slot.elements for bucket in unit.buckets for slot in bucket.slots) for unit in ranks.units
    ]
    return [given_bytes * each // max(sum(elements), 1) for each in elements]


def _drawn_bytes(plan: Plan, ranks: RankClass, unit: int, bucket: Bucket, rank: int) -> int:
    """Return the bytes of the largest part of a parameter that is drawn: twice, with its numbers in fp64 beside it."""
    strategy = ranks.strategies[unit]
    index, count = (
        (plan.mesh.index(strategy.axes[1], rank), bucket.shards) if strategy.cuts_master else (0, 1)
    )
    itemsize = next(
        (
            row.itemsize
            for row in ranks.buffers[unit, ranks.units[unit].buckets.index(bucket)]
            if row.kind == "master"
        ),
        bucket.key.dtype.itemsize,
    )
    most = 0
    for _, start, stop, _ in bucket.overlaps(index, count):
        elements = min(stop - start, _FILL_ELEMENTS)
        most = max(most, 2 * elements * itemsize + min(elements, _DRAW_ELEMENTS) * _DRAW_BYTES)
    return most


def ring_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of shared memory that ``rank`` provides if all ranks are CPU ranks of one host.

    Keys of tables have a ring of their own, because a thread sends them beside the collectives of the step.
    """
    groups = sum(ring_file_bytes(len(ranks)) for ranks in groups_of(plan, rank))
    keys = ring_file_bytes(plan.mesh.size("dp")) * communicators_by_use(plan, rank)["keys"]
    return groups + keys + RING.file_bytes * len(neighbours_of(plan, rank))


def rows_of_build(plan: Plan, rank: int, draws: bool, given_bytes: int = 0) -> Mapping[str, int]:
    """Return the bytes by row when a build holds most.

    Args:
        plan: The Plan.
        rank: The rank.
        draws: True if start weights are drawn.
        given_bytes: Bytes of the model's own parameters, which are released as the state of their Units is made.
    """
    held, beside = most_at_build(plan, rank, draws, given_bytes)
    tables = {
        row: size for row, size in plan.bytes_per_rank(rank).items() if row in ("tables", "dynamic tables")
    }
    drawn = table_bytes_at_build(plan, rank)  # before there is any other state
    if drawn + given_bytes > sum(held.values()) + beside:
        return {**tables, "start weights": drawn + given_bytes}
    return {**held, **tables, "start weights": beside}
