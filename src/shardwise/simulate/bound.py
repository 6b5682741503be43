"""A bound of time: seconds below which no step of a job can be, without a Plan and without a walk.

A search compares the bound of a layout with the price of the best one so far, and drops the layout if its bound is
above. So the bound must never be above the price (price.py). It counts what the computation of one rank must do, one
after another, and the time until the first microbatch reaches the rank and until the last one is back:

    work of a stage     f = seconds of its forward pass, b of its backward pass
    bound of a rank     Σ f of the stages before its first + m · Σ (f + b) of its stages + Σ b of the stages before
    bound of the step   the largest bound of a rank

If a schedule computes the gradients of weights apart, other work may cover the time until the first microbatch
reaches a rank and the last one is back, and only the work of the rank's own stages counts.

Exchanges, updates and Python are left out, because other work may cover them.

Cost: one look at each Unit of each stage.
Shapes: m microbatches.
"""

from collections.abc import Mapping, Sequence

from shardwise.base.hardware import Hardware
from shardwise.plan.stage_places import StagePlaces
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
    return pipeline_bound(stage_seconds(passed, hardware, device_type), StagePlaces(ranks), microbatches)


def pipeline_bound(
    stages: Sequence[float],
    places: StagePlaces,
    microbatches: int,
    messages_s: float = 0.0,
    splits_backward: bool = False,
) -> float:
    """Return seconds that a step takes at least.

    Args:
        stages: Seconds of the forward and the backward pass of one microbatch, by stage.
        places: Placement of the stages on the ranks.
        microbatches: Microbatches of a step.
        messages_s: Seconds of a microbatch's messages from one stage to the next and back.
        splits_backward: True if the schedule computes the gradients of weights apart.
    """
    most = 0.0
    for place in range(places.ranks):
        own_s = microbatches * sum(stages[each] for each in places.stages_of(place, len(stages)))
        ramp_s = 0.0 if splits_backward else sum(stages[:place]) + place * messages_s
        most = max(most, own_s + ramp_s)
    return most


def stage_seconds(passed: Mapping[int, MeasuredPass], hardware: Hardware, device_type: str) -> list[float]:
    """Return the seconds of the forward and the backward pass of one microbatch, by stage."""
    near = "host" if device_type == "cpu" else "device"
    return [
        hardware.least_pass_factor
        * sum(
            share.work.seconds(hardware, share.touched_bytes, near) for share in passed[stage].shares.values()
        )
        for stage in sorted(passed)
    ]
