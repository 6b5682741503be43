"""Seconds of a step, from quantities and rates.

    compute    operations / flops_s, those of recomputation and of tiles among them
    update     bytes of masters, moments, gradients / memory rate, where they lie on the device
    waits      what of the tiers' work the computation does not cover:

        updates elsewhere     run beside the next forward pass:  max(t - forward, t / Units)      at_end: t
                                                                                                  delayed: t - compute
                              t: the slower of host memory and disk, which work beside one another
        gradients that leave  run beside the backward pass:      max(t - backward, 0)
        weights that come     beside the computation where gathers go ahead, else all of it waits
        activations           beside the computation:            max(t - compute, 0)

Bytes and operations are counted (``memory/tier_cost.py``, ``passes.py``); rates are given or measured on the spot
(``rates.py``). What ranks send one another is not among it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.compose.plan import Policies, strategies_of
from shardwise.memory.tier_cost import tier_traffic
from shardwise.plan.action import Kind
from shardwise.plan.plan import Plan, class_of
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.rates import Rates


class StepSeconds(NamedTuple):
    """Of one rank."""

    compute: float
    update: float
    waits: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self)


def step_seconds(
    plan: Plan,
    policies: Policies,
    passed: Mapping[int, MeasuredPass],
    rates: Rates,
    is_cpu: bool,
    activation_bytes: int = 0,
    rank: int = 0,
) -> StepSeconds:
    """``activation_bytes``: of a step's microbatches, to the host and back each."""
    ranks = plan.classes[class_of(plan.mesh, rank)]
    strategies = strategies_of(ranks, plan.registry, policies)
    moved = tier_traffic(ranks, plan.mesh, strategies)
    stages = [passed[stage] for stage in ranks.stages]
    forward = sum(
        share.flops for each in stages for (kind, _), share in each.shares.items() if kind is Kind.F
    )
    forward_s = policies.microbatches * forward / rates.flops_s
    compute_s = policies.microbatches * sum(each.flops for each in stages) / rates.flops_s
    link = 0.0 if is_cpu else 1 / rates.link_bytes_s
    disk = 1 / rates.disk_bytes_s if moved.read else 0.0
    on_disk = max(moved.updated_on_host / rates.host_bytes_s, (moved.read + moved.written) * disk)
    beside_s = on_disk + moved.up * link
    units = sum(strategy.tier != "device" for strategy in strategies) or 1
    is_hidden = policies.offload.step == "before_use"
    waits = max(beside_s - forward_s, beside_s / units) if is_hidden else beside_s
    if policies.offload.step == "delayed":
        waits = max(beside_s - compute_s, 0.0)
    leaving_s = max(
        (moved.down + moved.gradients_brought) * link,
        (moved.gradients_written + moved.gradients_read) * disk,
    )
    waits += max(leaving_s - (compute_s - forward_s), 0.0)
    brought_s = max(moved.weights_brought * link, moved.weights_read * disk)
    goes_ahead = policies.zero.prefetch_bytes not in ("auto", 0)
    waits += max(brought_s - compute_s, 0.0) if goes_ahead else brought_s
    waits += max(2 * activation_bytes * link - compute_s, 0.0)
    near = rates.host_bytes_s if is_cpu else rates.device_bytes_s
    return StepSeconds(compute_s, moved.updated_on_device / near, waits)
