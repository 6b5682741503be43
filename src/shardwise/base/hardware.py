"""Hardware: the peaks, memories and links of one rank's device, its host and their cluster, by which work is priced.

    seconds of a product      flops / (peak of its dtype * efficiency at its size)
    seconds of other work     bytes read and written / rate of the memory, or of the class of the operation
    seconds of a message      latency of the link + bytes / rate of the link

Large products reach a larger share of the peak than small ones, so ``efficiency`` is a table of shares by the FLOPs of
one product, between which the share is interpolated over the logarithm of the FLOPs.

Cost: a look into a table.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, NamedTuple

Level = Literal["device", "host", "cluster"]
"""What a link joins: a device and its host, the ranks of one host, or the hosts of a cluster."""
ProductKind = Literal["product", "attention", "convolution", "batched"]
"""Kind of an operation that is priced by its FLOPs; a ``batched`` one multiplies many pairs of small matrices, and
counts as a ``product`` if a table has no shares for it."""
OperationClass = Literal["arithmetic", "function", "copy", "update", "page"]
"""Class of an operation that is priced by the bytes that it touches: sums and products of elements; functions such as
``exp``, ``silu`` and ``softmax``; copies that change the order of elements; updates of an optimizer."""


class Link(NamedTuple):
    """A connection over which one rank sends while it receives as many bytes."""

    bytes_s: float
    """Bytes per second in each direction."""
    latency_s: float
    """Seconds before the first byte of a message arrives."""
    taken: float = 0.0
    """Share of the device's computation that exchanges on the link take while they run."""
    groups: tuple[tuple[float, float], ...] = ()
    """Shares of the rate that small groups have, as (ranks, share), ascending: on hosts whose devices are joined in
    pairs by different numbers of links. Larger groups have the whole rate."""

    def among(self, ranks: float) -> "Link":
        """Return the link between neighbours in a ring of so many ranks of a host."""
        share = next((share for most, share in self.groups if ranks <= most), 1.0)
        return self if share == 1.0 else self._replace(bytes_s=self.bytes_s * share)


class Product(NamedTuple):
    """A class of operations that are priced by their FLOPs: products of one kind, dtype and size."""

    kind: ProductKind
    dtype: str
    """Name of the dtype, such as ``bf16``."""
    flops: int
    """FLOPs of one of the operations."""


class Neighbours(NamedTuple):
    """Figures of what the ranks of one host take from one another."""

    unevenness: tuple[tuple[float, float], ...] = ()
    """Seconds of work between two meetings of two CPU ranks that do the same work, and the share of them for which a
    rank then waits for the other, ascending; empty: ranks are never late."""
    passes: tuple[tuple[float, float], ...] = ()
    """Ranks of one host that compute at the same time, and the seconds of a model's passes on one of them over the sum
    of their operations' seconds, ascending by the ranks; empty: 1. Ranks that share caches and memory are slower."""


PAGE_BYTES = 4096
"""Bytes of the least read of a disk."""
DISK_REQUEST_S = 50e-6
"""Seconds of a read at a random place of a disk that was not measured: 20,000 reads per second."""


@dataclass(frozen=True)
class Hardware:
    """The rates of one rank, with the load that its neighbours put on the host."""

    name: str
    peaks: Mapping[str, float]
    """Dense FLOP/s by name of the dtype: ``fp32``, ``fp16``, ``bf16``, ``fp64``, ``fp8``."""
    efficiency: Mapping[str, tuple[tuple[float, float], ...]]
    """Shares of the peak that operations reach, as (FLOPs of one operation, share), ascending. Keys are kinds, and for
    a dtype with shares of its own the kind and the dtype, such as ``product bf16``."""
    memory_bytes: Mapping[str, int]
    """Bytes of memory by tier: ``device``, ``host``, ``disk``; a tier that is left out is not limited."""
    memory_bytes_s: Mapping[str, float]
    """Bytes read and written per second, by tier."""
    links: Mapping[Level, Link]
    operation_s: float = 0.0
    """Seconds that one operation takes however small it is."""
    action_s: float = 0.0
    """Seconds that Python takes for one Action of the Plan."""
    ending_action_s: float = 0.0
    """Seconds that Python takes for one Action that ends a step, such as the update of a Unit; 0.0: ``action_s``."""
    operations: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Bytes per second that operations other than products reach, as (bytes that one operation touches, bytes per
    second), ascending, by class; a class that is left out is priced by the rate of the memory."""
    neighbours: Neighbours = Neighbours()
    """What ranks of one host take from one another."""
    row_bytes_s: float = 4e9
    """Bytes of scattered rows of embedding tables that are read and written per second."""
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Factors on seconds for the low and the high end of a price, by use of the time (plan/timeline.py), if the rates
    were measured; empty: the default spread (simulate/price.py)."""
    exchanges: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Measured seconds of collectives between two CPU ranks of one host, as (bytes that a rank copies, seconds),
    ascending, by operation (simulate/exchange_price.py); an operation that is left out is priced by ``links``."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each figure, by its place in a file of hardware (hardware_files.py)."""

    def flops_s(self, dtype: str) -> float:
        """Return the FLOP/s that the largest products of a dtype reach.

        Raises:
            KeyError: if the device has no peak in the dtype.
        """
        return self.peaks[dtype] * self._shares("product", dtype)[-1][1]

    def share_of_peak(self, product: Product) -> float:
        """Return the share of the peak that an operation of this class reaches."""
        table = self._shares(product.kind, product.dtype)
        sizes = [math.log(size) for size, _ in table]
        here = math.log(max(product.flops, 1))
        above = bisect_left(sizes, here)
        if above == 0 or above == len(table):
            return table[min(above, len(table) - 1)][1]
        (_, low), (_, high) = table[above - 1], table[above]
        part = (here - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return low + part * (high - low)

    def best_share(self, kind: ProductKind, dtype: str) -> float:
        """Return the largest share of the peak that operations of a kind and dtype reach, whatever their size."""
        return max(share for _, share in self._shares(kind, dtype))

    def _shares(self, kind: ProductKind, dtype: str) -> tuple[tuple[float, float], ...]:
        if kind == "batched" and kind not in self.efficiency:
            kind = "product"
        return self.efficiency.get(f"{kind} {dtype}") or self.efficiency[kind]

    def product_s(self, product: Product, calls: int = 1) -> float:
        """Return the seconds of ``calls`` operations of one class.

        Raises:
            KeyError: if the device has no peak in the dtype.
        """
        return calls * product.flops / (self.peaks[product.dtype] * self.share_of_peak(product))

    def pass_factor(self, ranks: int) -> float:
        """Return the factor on the seconds of passes if so many ranks of a host compute at the same time.

        Args:
            ranks: Number of ranks. If it was not measured, the next smaller measured number counts.
        """
        return next((factor for count, factor in reversed(self.neighbours.passes) if count <= ranks), 1.0)

    @property
    def least_pass_factor(self) -> float:
        """The least factor on the seconds of passes, whatever the number of ranks."""
        return min(
            self.pass_factor(ranks) for ranks in (1, *(int(count) for count, _ in self.neighbours.passes))
        )

    def touched_s(self, nbytes: float, tier: str = "device") -> float:
        """Return the seconds in which so many bytes of a tier are read or written."""
        return nbytes / self.memory_bytes_s[tier]

    def operation_bytes_s(self, of_class: OperationClass, nbytes: float, tier: str = "device") -> float:
        """Return the bytes per second that an operation of a class touches.

        Args:
            of_class: Class of the operation.
            nbytes: Bytes that the operation touches.
            tier: Tier whose rate counts if the class has none of its own.
        """
        rates = self.operations.get(of_class)
        return interpolated(rates, nbytes) if rates else self.memory_bytes_s[tier]

    @property
    def disk_request_s(self) -> float:
        """Seconds of one read of a page at a random place of the disk while several are under way."""
        pages = self.operations.get("page")
        return PAGE_BYTES / pages[0][1] if pages else DISK_REQUEST_S

    def best_bytes_s(self, tier: str = "device") -> float:
        """Return the most bytes per second that operations of a pass can touch, whatever their class."""
        rates = [
            rate
            for name, table in self.operations.items()
            if name not in ("update", "page")
            for _, rate in table
        ]
        return max([self.memory_bytes_s[tier], *rates])

    def late_s(self, worked_s: float, ranks: int) -> float:
        """Return the seconds for which a rank waits, on average, for the last of the ranks that it meets.

        The lateness of one rank is taken to be normal, so with more ranks the wait grows like the expected largest of
        so many normal numbers (Blom 1958).

        Args:
            worked_s: Seconds of work since the ranks met.
            ranks: Number of the ranks.
        """
        if not self.neighbours.unevenness or ranks < 2 or worked_s <= 0:
            return 0.0
        return (
            worked_s
            * interpolated(self.neighbours.unevenness, worked_s)
            * _largest_of(ranks)
            / _largest_of(2)
        )


def interpolated(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return the second numbers of a table, interpolated over the logarithms of both; constant beyond its ends."""
    sizes = [each for each, _ in table]
    above = bisect_left(sizes, size)
    if above == 0 or above == len(table):
        return table[min(above, len(table) - 1)][1]
    (small, low), (large, high) = table[above - 1], table[above]
    part = math.log(size / small) / math.log(large / small)
    return low * math.exp(part * math.log(high / low))


def _largest_of(count: int) -> float:
    """Return the expected largest of ``count`` standard normal numbers."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def even_hardware(
    name: str,
    flops_s: float,
    *,
    host_bytes_s: float,
    device_bytes_s: float,
    link_bytes_s: float,
    disk_bytes_s: float,
    exchange_bytes_s: float,
    message_s: float = 0.0,
    dtypes: Sequence[str] = ("fp64", "fp32", "bf16", "fp16"),
    source: str = "",
) -> Hardware:
    """Return hardware whose operations all reach one rate, whatever their dtype and size.

    Args:
        name: Name of the hardware.
        flops_s: FLOP/s of products.
        host_bytes_s: Bytes read and written per second in host memory.
        device_bytes_s: The same of the device's memory; on CPU ranks equal to ``host_bytes_s``.
        link_bytes_s: Bytes per second between host and device, in one direction.
        disk_bytes_s: Bytes read or written per second on a disk.
        exchange_bytes_s: Bytes per second that a rank sends to others, on its host or not, while it receives as many.
        message_s: Seconds of delay of one message to other ranks.
        dtypes: Dtypes that the device computes in.
        source: Source of the figures.
    """
    between = Link(exchange_bytes_s, message_s)
    even = ((1.0, 1.0),)
    return Hardware(
        name,
        peaks=dict.fromkeys(dtypes, flops_s),
        efficiency={"product": even, "attention": even, "convolution": even},
        memory_bytes={},
        memory_bytes_s={"device": device_bytes_s, "host": host_bytes_s, "disk": disk_bytes_s},
        links={"device": Link(link_bytes_s, 0.0), "host": between, "cluster": between},
        sources={"": source} if source else {},
    )


ASSUMED_HARDWARE = even_hardware(
    "assumed",
    100e9,
    host_bytes_s=6e9,
    device_bytes_s=6e9,
    link_bytes_s=6e9,
    disk_bytes_s=1e9,
    exchange_bytes_s=1.5e9,
    message_s=1e-4,
    source="two CPU ranks on one host, whose exchange takes four passes over memory",
)
"""Hardware by which the planner of embedding tables chooses placements, because all ranks must come to the same
placement before anything is measured. A faster exchange changes all placements of a table alike.
"""
