"""Hardware: the peaks, memories and links of one rank's device, its host and their cluster, by which work is priced.

    seconds of a product      flops / (peak of its dtype * efficiency at its size)
    seconds of other work     bytes read and written / rate of the memory
    seconds of a message      latency of the link + bytes / rate of the link

Large products reach a larger share of the peak than small ones, so ``efficiency`` is a table of shares by the FLOPs of
one product, between which the share is interpolated over the logarithm of the FLOPs.

Cost: a look into a table.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Level = Literal["device", "host", "cluster"]
"""What a link joins: a device and its host, the ranks of one host, or the hosts of a cluster."""
ProductKind = Literal["product", "attention", "convolution"]
"""Kind of an operation that is priced by its FLOPs."""


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
        return self.efficiency.get(f"{kind} {dtype}") or self.efficiency[kind]

    def product_s(self, product: Product, calls: int = 1) -> float:
        """Return the seconds of ``calls`` operations of one class.

        Raises:
            KeyError: if the device has no peak in the dtype.
        """
        return calls * product.flops / (self.peaks[product.dtype] * self.share_of_peak(product))

    def touched_s(self, nbytes: float, tier: str = "device") -> float:
        """Return the seconds in which so many bytes of a tier are read or written."""
        return nbytes / self.memory_bytes_s[tier]


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
