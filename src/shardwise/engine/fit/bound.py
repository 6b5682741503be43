"""Bound: seconds below which no step whose passes were not measured can be, from passes of another size.

    work of a pass      products at the best rate that their dtype can reach, and bytes of other operations
    of another size     a cut into t slices leaves at least a t-th of the work on a rank, and the work grows with the
                        samples

What is left out comes on top: small products reach less of the peak, each operation takes time to start, and ranks wait
for one another. The bound of a step follows from the work of its stages (simulate/bound.py).

Cost: one look at each class of products of each Unit's share of a pass.
"""

from typing import NamedTuple

from shardwise.base.hardware import Hardware
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.work import peak_dtype

_SHARE_OF_OPERATIONS = 0.98
"""Share of the operations of a pass that a pass scaled from another size has at least."""
_SHARE_OF_BYTES = 0.9
"""Share of the bytes read and written that such a pass has at least."""


class PassWork(NamedTuple):
    """Least seconds of one microbatch's operations, forward and backward, on one rank."""

    product_s: float = 0.0
    """Seconds of products at their best rate."""
    touched_s: float = 0.0
    """Seconds in which other operations read and write."""

    def scaled(self, operations: float) -> "PassWork":
        """Return the least work of a pass of another size.

        Args:
            operations: Ratio of the samples on a rank, divided by the slices of the model.
        """
        return PassWork(
            _SHARE_OF_OPERATIONS * operations * self.product_s,
            _SHARE_OF_BYTES * operations * self.touched_s,
        )

    @property
    def seconds(self) -> float:
        """Seconds of the work on the clock that computes."""
        return self.product_s + self.touched_s


def work_of(passed: MeasuredPass, hardware: Hardware, is_cpu: bool) -> PassWork:
    """Return the work of a measured pass.

    Args:
        passed: The pass.
        hardware: Rates of a rank.
        is_cpu: True if ranks compute on CPUs.
    """
    near = "host" if is_cpu else "device"
    product_s = touched = 0.0
    for share in passed.shares.values():
        touched += share.touched_bytes
        for product, calls in share.work.products.items():
            dtype = peak_dtype(hardware, product.dtype)
            product_s += (
                calls * product.flops / (hardware.peaks[dtype] * hardware.best_share(product.kind, dtype))
            )
    return PassWork(product_s, touched / hardware.best_bytes_s(near))
