"""Bound: seconds below which no step with given passes can be, from the passes alone, without a Plan.

    work of a stage     s = seconds of its F and B for one microbatch: operations, memory, and what is sent inside
    a rank at p         m · Σ s over its stages, plus Σ s of the stages before its first stage: until the first message
                        arrives, and behind its last backward pass, the rank has nothing to compute
    a step              at least the most over all ranks

Every addend is on the one clock that computes (simulate/price.py), or is waited for there, so the bound is never above
the price. Exchanges that run beside the computation, updates and Python come on top.

Where a pass is not measured yet, it is taken from a pass of another size: a cut into t slices leaves at least a t-th of
the work on a rank, and the work grows with the samples.

Cost: one look at each Unit's share of a pass.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.base.rates import RankRates
from shardwise.simulate.passes import MeasuredPass

_SHARE_OF_OPERATIONS = 0.98
"""Share of the operations of a pass that a pass scaled from another size has at least."""
_SHARE_OF_BYTES = 0.9
"""Share of the bytes read and written, and of what is sent, that such a pass has at least."""


class PassWork(NamedTuple):
    """Operations and bytes of one microbatch, forward and backward, on one rank."""

    flops: float = 0.0
    touched_bytes: float = 0.0
    sent_bytes: float = 0.0

    def scaled(self, operations: float, sent: float) -> "PassWork":
        """Return the least work of a pass of another size.

        Args:
            operations: Ratio of the samples on a rank, divided by the slices of the model.
            sent: Ratio of what is sent inside the pass.
        """
        return PassWork(
            _SHARE_OF_OPERATIONS * operations * self.flops,
            _SHARE_OF_BYTES * operations * self.touched_bytes,
            _SHARE_OF_BYTES * sent * self.sent_bytes,
        )

    def seconds(self, rates: RankRates, is_cpu: bool) -> float:
        """Return the seconds of the work on the clock that computes."""
        near = rates.host_bytes_s if is_cpu else rates.device_bytes_s
        computed = self.flops / rates.flops_s + self.touched_bytes / near
        return computed + self.sent_bytes / rates.exchange_bytes_s


def work_of(passed: MeasuredPass) -> PassWork:
    """Return the work of a measured pass."""
    shares = passed.shares.values()
    return PassWork(
        sum(share.flops for share in shares),
        sum(share.touched_bytes for share in shares),
        sum(share.sent_bytes for share in shares),
    )


def pipeline_bound(stages: Sequence[float], ranks: int, microbatches: int) -> float:
    """Return seconds that a step takes at least.

    Args:
        stages: Seconds of F and B of one microbatch, by stage.
        ranks: Ranks on "pp"; the stages are dealt to them in turn.
        microbatches: Microbatches of a step.
    """
    most = 0.0
    for place in range(ranks):
        own = sum(stages[place::ranks])
        most = max(most, microbatches * own + sum(stages[:place]))
    return most


def stage_seconds(passed: Mapping[int, MeasuredPass], rates: RankRates, is_cpu: bool) -> list[float]:
    """Return the seconds of F and B of one microbatch, by stage."""
    return [work_of(passed[stage]).seconds(rates, is_cpu) for stage in sorted(passed)]
