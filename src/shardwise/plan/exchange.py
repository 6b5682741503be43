"""GradientExchange: the way in which the ranks of a Unit sum its gradient and keep one range of the sum each.

    sum          cast to the dtype of the sum, then the backend's own reduce-scatter, which adds in the dtype it sends
    all_to_all   each rank sends every other rank its range in the dtype of the gradient; the receiver adds
    two_level    the same twice: first between the ranks of a host, which add what is for the same place on any host;
                 then between the ranks in the same place on the hosts, which add the sums of the hosts

All three add in the dtype of the sum. In ``two_level`` the sums of the hosts travel in the dtype ``between``
(``precision.reduce``).

    way          elements that one rank sends     elements that leave a host, at
    sum          (N-1)/N · P                      (N-1)/N · P                  the width of the sum   (a ring)
    all_to_all   (N-1)/N · P                      (H-1)/H · L · P              the gradient's width
    two_level    (N-1)/N · P                      (H-1)/H · P                  the width of ``between``

A gradient in 16 bits whose sum is kept in 32 is sent in half the bytes by ``all_to_all``, which is best inside a host.
Over hosts it sends every element L times through the host's link. ``auto`` takes the way that sends the fewest bytes
through that link; of equal ways it takes the one that sends less in all, then the one with fewer messages.

Paper: Wang et al. 2023, arXiv:2306.10209 (ZeRO++: gradients in two levels).
Cost:  a dozen products, once per bucket.
Shapes: P elements of the bucket; N ranks on H hosts, L = N/H on each.
"""

from typing import Literal, NamedTuple

PIECE_BYTES = 16 << 20
"""Bytes of a piece of a reduction that hosts exchange at once over gloo."""
Way = Literal["sum", "all_to_all", "two_level"]
Asked = Literal["auto", "sum", "all_to_all", "two_level"]


class Widths(NamedTuple):
    """Bytes of an element of a gradient at the three places of its sum."""

    wire: int
    """Width of the gradient that a rank contributes."""
    between: int
    """Width of the sum of one host, where it travels to another host."""
    total: int
    """Width in which ranks add."""


class GradientExchange(NamedTuple):
    """The ranks of one axis as they lie on hosts, and the key ``zero.exchange``."""

    asked: Asked = "auto"
    ranks: int = 1
    hosts: int = 1
    """Hosts over which the ranks lie."""
    is_even: bool = True
    """True if each host has as many of the ranks, more than one, as neighbours on the axis."""
    is_native: bool = False
    """True if the backend has a reduce-scatter of its own, which adds on the way."""

    def way(self, widths: Widths) -> Way:
        """Return the way for gradients of these widths."""
        if self.asked == "sum":
            return "sum" if widths.wire <= widths.total else "all_to_all"
        if self.asked == "two_level":
            return "two_level" if self.has_levels else self._flat(widths)
        if self.asked == "all_to_all" or self.hosts == 1:
            return self._flat(widths)
        if self.is_native and widths.wire == widths.total:
            return "sum"
        ways = [self._flat(widths)]
        if self.is_native and widths.wire < widths.total:
            ways.append("sum")
        if self.has_levels:
            ways.append("two_level")
        return min(ways, key=lambda way: (self._crossing(1.0, way, widths), self._sent(1.0, way, widths)))

    def legs(self, elements: int, widths: Widths) -> list[tuple[int, int, int]]:
        """Return what one rank takes part in as (elements, bytes of an element, ranks) of reduce-scatters.

        Args:
            elements: Elements of the bucket.
            widths: Widths of the gradient.
        """
        way = self.way(widths)
        if way != "two_level":
            return [(elements, widths.total if way == "sum" else widths.wire, self.ranks)]
        per_host = self.ranks // self.hosts
        return [
            (elements, widths.wire, per_host),
            (elements // per_host, widths.between, self.hosts),
        ]

    def sent_bytes(self, elements: int, widths: Widths) -> int:
        """Return the bytes that one rank sends to sum a bucket of ``elements``."""
        return sum(part * width * (ranks - 1) // ranks for part, width, ranks in self.legs(elements, widths))

    def crossing_bytes(self, elements: int, widths: Widths) -> int:
        """Return the bytes that leave one host when the ranks sum a bucket of ``elements``."""
        return round(self._crossing(elements, self.way(widths), widths)) if self.hosts > 1 else 0

    def held_bytes(self, elements: int, widths: Widths) -> int:
        """Return the bytes that one rank holds beside the gradient on a device, from the start of a sum to its wait.

        Args:
            elements: Elements of the bucket.
            widths: Widths of the gradient.
        """
        way, shard = self.way(widths), elements // self.ranks
        if way == "two_level":
            return 2 * elements * widths.wire + self.hosts * shard * (widths.total + 2 * widths.between)
        if way == "all_to_all":
            return elements * widths.wire
        return elements * widths.total if widths.wire < widths.total else shard * widths.total

    @property
    def has_levels(self) -> bool:
        """True if the ranks can sum in two levels."""
        return self.hosts > 1 and self.is_even

    def _flat(self, widths: Widths) -> Way:
        return "sum" if widths.wire == widths.total else "all_to_all"

    def _sent(self, elements: float, way: Way, widths: Widths) -> float:
        if way != "two_level":
            return elements * (widths.total if way == "sum" else widths.wire) * (self.ranks - 1) / self.ranks
        per_host = self.ranks / self.hosts
        across = elements / per_host * widths.between * (self.hosts - 1) / self.hosts
        return elements * widths.wire * (per_host - 1) / per_host + across

    def _crossing(self, elements: float, way: Way, widths: Widths) -> float:
        if way == "sum" and self.is_native:
            return elements * widths.total * (self.ranks - 1) / self.ranks
        across = elements * (self.hosts - 1) / self.hosts
        if way == "two_level":
            return across * widths.between
        return across * self.ranks / self.hosts * (widths.total if way == "sum" else widths.wire)
