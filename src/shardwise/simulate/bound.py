"""A bound of time: seconds below which no step of a job can be, without a Plan and without a walk.

A search compares the bound of a layout with the price of the best one so far, and drops the layout if its bound is
above. So the bound must never be above the price (price.py). It counts what the computation of one rank must do, one
after another, and the time until the first microbatch reaches the rank and until the last one is back:

    work of a stage     f = seconds of its forward pass, b of its backward pass
    bound of a rank     Σ f of the stages before its first + m · Σ (f + b) of its stages + Σ b of the stages before
    bound of the step   the largest bound of a rank

Exchanges, updates and Python are left out, because other work may cover them.

Cost: one look at each Unit of each stage.
Shapes: m microbatches.
"""

from collections.abc import Mapping

from shardwise.base.hardware import Hardware
from shardwise.plan.action import Kind
from shardwise.simulate.passes import MeasuredPass


def time_bound(
    passed: Mapping[int, MeasuredPass],
    hardware: Hardware,
    device_type: str,
    microbatches: int,
    ranks: int = 1,
) -> float:
    """Return seconds that a step takes at least.

    Args:
        passed: Measured pass of one microbatch, by stage.
        hardware: Rates of a rank.
        device_type: Type of the device, such as ``cpu``.
        microbatches: Microbatches of a step.
        ranks: Size of the "pp" axis; the rank at index i has the stages i, i + ranks, ...
    """
    seconds = {stage: _pass_s(each, hardware, device_type) for stage, each in passed.items()}
    forward = {stage: each[Kind.F] for stage, each in seconds.items()}
    backward = {stage: each[Kind.B] for stage, each in seconds.items()}
    found = 0.0
    for index in range(ranks):
        own, before = range(index, len(passed), ranks), range(index)
        reached_s = sum(forward[stage] + backward[stage] for stage in before)
        work_s = sum(forward[stage] + backward[stage] for stage in own)
        found = max(found, reached_s + microbatches * work_s)
    return found


def _pass_s(passed: MeasuredPass, hardware: Hardware, device_type: str) -> dict[Kind, float]:
    """Return the seconds of the forward and of the backward pass of one microbatch in a stage."""
    near = "host" if device_type == "cpu" else "device"
    found = {Kind.F: 0.0, Kind.B: 0.0}
    for (kind, _), share in passed.shares.items():
        found[kind] += share.work.seconds(hardware, share.touched_bytes, near)
    return found
