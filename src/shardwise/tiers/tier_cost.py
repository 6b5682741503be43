"""Cost of state on a tier: bytes of a step that move, or are updated on the tier; requests for rows on a disk.

Tests compare the formulas with counted bytes and requests.

Of a bucket with E owned elements, w, g, m bytes of a weight, a gradient, a master or moment each, M moments, n windows
of its Unit in a step:

                    gradient down      update                                     weight up    disk
    device          0                  2 (1 + M) m E + g E + w E                  0            0
    host            g E                the same, in host memory                   w E          0
    disk            g E                the same, in host memory                   w E          reads (1 + M) m E + g E
                                                                                               writes the same
    weights there too                                                             n w E        reads n w E, writes w E
    each further    g E, and up again                                                          reads g E, writes g E
    microbatch

A master that is the weight itself counts once. On CPU ranks nothing goes up or down: device and host are one.

Of n rows read at once from segments with r records of b bytes, s = b / 4096, two neighbours have k other records
between them with probability p (1 - p)^k, p = n / r. They are in one request if at most 2 pages lie between them, which
for records at any place in a page has probability j(k) = 1 - (k s - 3), cut to 0 and 1 (``segment_reader.py``):

    apart        a = 1 - sum over k of p (1 - p)^k j(k)
    pages        n (a (1 + s) + sum over k of p (1 - p)^k j(k) (k + 1) s)
    requests     n a + pages / 64 (1 - a)                                 a request has at most 64 pages
    seconds      requests · (request_s - 4096 / rate) + pages · 4096 / rate

Memory of segments beside the rows: two blocks of at least 1 MiB, one that is filled and one for compaction, and that of
a job of reads, 4.3 MiB.
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from shardwise.base.hardware import Hardware
from shardwise.kernels.tables.records import record_bytes
from shardwise.memory.direct_io import ALIGNMENT_BYTES
from shardwise.plan.action import Kind
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import RankClass
from shardwise.tiers.segment_file import shape_for
from shardwise.tiers.segment_reader import GAP_PAGES, REQUEST_PAGES, SPARE_BYTES


@dataclass
class TierTraffic:
    """Bytes that one rank moves or updates in one step."""

    updated_on_device: int = 0
    """Bytes read and written by updates on the device."""
    updated_on_host: int = 0
    """Bytes read and written by updates in host memory, for state that lies in host memory or on a disk."""
    down: int = 0
    """Bytes of gradients copied from the device to the host."""
    up: int = 0
    """Bytes of updated weights copied from the host to the device."""
    read: int = 0
    """Bytes read from the disk for updates."""
    written: int = 0
    """Bytes written to the disk behind updates."""
    gradients_written: int = 0
    """Bytes of gradients written to the disk during the backward pass."""
    gradients_brought: int = 0
    """Bytes of gradients brought back to the device, for a later microbatch to add to them."""
    gradients_read: int = 0
    """Bytes of ``gradients_brought`` that are read from the disk."""
    weights_brought: int = 0
    """Bytes of weights brought from host memory or the disk for windows."""
    weights_read: int = 0
    """Bytes of ``weights_brought`` that are read from the disk."""


def tier_traffic(ranks: RankClass, mesh: Mesh) -> TierTraffic:
    """Return the bytes that one rank moves and updates in one step.

    Args:
        ranks: The rank's class in the Plan.
        mesh: The mesh of the job.

    Returns:
        The sum over all Units.
    """
    found = TierTraffic()
    for each in unit_traffic(ranks, mesh):
        for row in fields(TierTraffic):
            setattr(found, row.name, getattr(found, row.name) + getattr(each, row.name))
    return found


def unit_traffic(ranks: RankClass, mesh: Mesh) -> list[TierTraffic]:
    """Return the bytes that one rank moves and updates in one step, for each Unit.

    Args:
        ranks: The rank's class in the Plan.
        mesh: The mesh of the job.

    Returns:
        One row per Unit.
    """
    windows, reductions = ([0] * len(ranks.units) for _ in range(2))
    for action in ranks.actions:
        if action.kind is Kind.UNSHARD:
            windows[action.unit] += 1
        elif action.kind is Kind.REDUCE:
            reductions[action.unit] += 1
    by_unit = [TierTraffic() for _ in ranks.units]
    for (unit, place), rows in ranks.buffers.items():
        found, strategy, bucket = by_unit[unit], ranks.strategies[unit], ranks.units[unit].buckets[place]
        sizes = {row.kind: row.nbytes(bucket, mesh) for row in rows}
        weight, grad = sizes.pop("weight"), sizes.pop("grad", 0)
        sizes.pop("next weight", None)
        own = bucket.shard_elements if strategy.cuts_master else bucket.elements
        own_weight = own * bucket.key.dtype.itemsize
        if strategy.cuts_master and not strategy.cuts_grad:
            grad = grad * own // bucket.elements
        if strategy.weight_tier != "device":
            found.weights_brought += windows[unit] * weight
            found.weights_read += windows[unit] * weight * (strategy.weight_tier == "disk")
        if not bucket.key.trained:
            continue
        has_master = "master" in sizes
        state = sum(sizes.values()) + own_weight * (not has_master)
        touched = 2 * state + grad + own_weight * has_master
        if strategy.tier == "device":
            found.updated_on_device += touched
            continue
        found.updated_on_host += touched
        leaves = strategy.grad_tier != "device"
        comes_back = reductions[unit] - 1 if leaves else 0
        found.down += grad * (1 + comes_back)
        found.up += own_weight * (strategy.weight_tier == "device")
        found.gradients_brought += grad * comes_back
        if strategy.tier != "disk":
            continue
        found.read += state + grad * leaves
        found.written += state + weight * (strategy.weight_tier == "disk" and has_master)
        found.gradients_written += grad * leaves * (1 + comes_back)
        found.gradients_read += grad * comes_back
    return by_unit


class RowReads(NamedTuple):
    """Requests to the disk for rows of embedding tables."""

    requests: float
    """Requests."""
    pages: float
    """Pages of all requests."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the requests."""
        page_s = ALIGNMENT_BYTES / hardware.memory_bytes_s["disk"]
        return self.requests * max(hardware.disk_request_s - page_s, 0.0) + self.pages * page_s


def row_reads(rows: float, held: float, line_bytes: int) -> RowReads:
    """Return the expected requests for rows at random places of the disk.

    Args:
        rows: Rows read at once.
        held: Rows that the disk holds.
        line_bytes: Bytes of a row's line.
    """
    size = record_bytes(line_bytes) / ALIGNMENT_BYTES
    share = min(1.0, rows / max(held, 1.0))
    near = moved = 0.0
    chance = share
    for between in range(math.ceil((GAP_PAGES + 2) / size)):
        joined = chance * (1 - min(max(between * size - (GAP_PAGES + 1), 0.0), 1.0))
        near += joined
        moved += joined * (between + 1) * size
        chance *= 1 - share
    pages = rows * ((1 - near) * (1 + size) + moved)
    return RowReads(rows * (1 - near) + pages / REQUEST_PAGES * near, pages)


def segment_buffer_bytes(line_bytes: int) -> int:
    """Return the most bytes of memory that segments take beside their index: two blocks, and a job of reads.

    Args:
        line_bytes: Bytes of a row's line.
    """
    return 2 * shape_for(line_bytes, 0).block_bytes + SPARE_BYTES


def row_write_s(rows: float, line_bytes: int, hardware: Hardware, written: float = 2.0) -> float:
    """Return the seconds in which the disk writes rows back.

    Args:
        rows: Rows written.
        line_bytes: Bytes of a row's line.
        hardware: Rates of the disk.
        written: Bytes that the disk reads and writes for each byte of a row, with compaction.
    """
    return hardware.touched_s(rows * record_bytes(line_bytes) * written, "disk")
