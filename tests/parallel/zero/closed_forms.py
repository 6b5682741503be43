"""Elements that ZeRO sends in a step, in closed form; test_cost.py compares the figures with counted traffic.

With P elements (padding counted, frozen Units gathered but not reduced), N shard ranks, a microbatches:

    stage      elements sent per rank and step
    0, 1       2 P (N-1)/N
    2          (a+1) P (N-1)/N
    3          3 a P (N-1)/N

Paper: arXiv:1910.02054, section 7.
"""

from collections.abc import Sequence

from shardwise.plan.lists import Strategy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from shardwise.plan.unit import Unit


def elements_sent_per_step(
    units: Sequence[Unit], strategies: Sequence[Strategy], mesh: Mesh, accumulation: int
) -> int:
    """Return the elements of weights and gradients that one rank sends in one optimizer step.

    Args:
        units: The Units of the model.
        strategies: The strategy of each Unit, in the order of ``units``.
        mesh: The mesh of the job.
        accumulation: Microbatches per optimizer step.

    Returns:
        The number of elements, padding included.
    """
    total = 0
    for unit, strategy in zip(units, strategies, strict=True):
        replicas, shards = (mesh.size(axis) for axis in strategy.axes)
        for bucket in unit.buckets:
            gather = elements_sent(Shard(), Replicate(), bucket.elements, shards)
            if strategy.cuts_weight:
                total += 2 * accumulation * gather
            if not bucket.key.trained:
                continue
            if not strategy.cuts_master:
                total += elements_sent(Partial(), Replicate(), bucket.elements, shards * replicas)
                continue
            if not strategy.cuts_weight:
                total += gather
            reductions = accumulation if strategy.cuts_grad else 1
            total += reductions * elements_sent(Partial(), Shard(), bucket.elements, shards)
            total += elements_sent(Partial(), Replicate(), bucket.shard_elements, replicas)
    return total
