"""ZeRO 0 to 3 and HSDP as a table of placements.

Each Unit has a weight, a gradient and a master (with the optimizer's moments). Each of the three has a placement on the
two axes of the Unit's state. A ZeRO stage is a row of this table; the axes are (dp_replicate, dp_shard), and for
experts (dp_replicate, edp):

    strategy          weight    gradient between microbatches    master and moments
    0  DDP            R, R      P, P                             R, R
    1  ZeRO-1         R, R      P, P  (one microbatch: P, S)     R, S
    2  ZeRO-2         R, R      P, S                             R, S
    3  ZeRO-3, FSDP   R, S      P, S                             R, S

With ranks on both axes stage 3 is HSDP (MiCS, hpZ). The Actions that follow from a row are in ``plan/lists.py``.

Papers: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Zhao et al. 2023, arXiv:2304.11277 (FSDP).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.exchange import GradientExchange
from shardwise.plan.mesh import DENSE, Mesh, StateAxes
from shardwise.plan.placement import Partial, Placement, Replicate, Shard, Tier
from shardwise.plan.plan import BucketBuffers
from shardwise.plan.state_form import StateForm, stored_dtype
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Unit
from shardwise.precision.policy import BucketDtypes
from shardwise.tiers.offload import OffloadPolicy

_WHOLE, _CUT, _ADDEND = Replicate(), Shard(), Partial()


def strategy_of(
    policy: ZeroPolicy,
    mesh: Mesh,
    axes: StateAxes = DENSE,
    windows: bool = False,
    exchange: GradientExchange | None = None,
) -> Strategy:
    """Return the row of the table for state on ``axes``.

    On one shard rank every stage is stage 0, because there is nothing to cut.

    Args:
        policy: The ZeRO keys of the run.
        mesh: The mesh of the job.
        axes: The outer and the inner data-parallel axis of the state.
        windows: True gives weights that are not cut windows too: their parameters show memory only during the
            window, as cut weights do. Used for rows of stage 0 only.
        exchange: The way to sum gradients over the inner axis; None: its ranks lie on one host.

    Returns:
        The placements of weight, gradient and master.
    """
    if mesh.size(axes[1]) == 1 or policy.stage == 0:
        return Strategy((_WHOLE, _WHOLE), (_ADDEND, _ADDEND), (_WHOLE, _WHOLE), windows, axes=axes)
    reduces_each = policy.reduce == "microbatch" or (policy.reduce == "auto" and policy.stage >= 2)
    return Strategy(
        weight=(_WHOLE, _CUT if policy.stage == 3 else _WHOLE),
        grad=(_ADDEND, _CUT if reduces_each else _ADDEND),
        master=(_WHOLE, _CUT),
        exchange=exchange or GradientExchange(policy.exchange, mesh.size(axes[1])),
        axes=axes,
    )


def moved(policy: OffloadPolicy, units: Sequence[Unit]) -> list[bool]:
    """Return for each Unit whether some of its state lies on another tier than the device.

    ``policy.fraction`` of the Units that have state to move are moved. The first of these Units stay on the
    device, because they compute at the beginning of a step, while the updates of the others still run.
    """
    if policy.optimizer == "device":
        return [False] * len(units)
    weights_too = policy.parameters != "device"
    could = [any(bucket.key.trained or weights_too for bucket in unit.buckets) for unit in units]
    stay = sum(could) - math.ceil(policy.fraction * sum(could))
    found = []
    for each in could:
        found.append(each and stay <= 0)
        stay -= each
    return found


def strategies_of(
    policy: ZeroPolicy,
    mesh: Mesh,
    units: Sequence[Unit],
    offload: OffloadPolicy | None = None,
    gradients_leave: bool = False,
    saving: Collection[int] = (),
    exchanges: Mapping[str, GradientExchange] | None = None,
) -> list[Strategy]:
    """Return the strategy of each Unit.

    Args:
        policy: The ZeRO keys of the run.
        mesh: The mesh of the job.
        units: The Units, in order.
        offload: The tiers of the state; None keeps all state on the device.
        gradients_leave: True if nothing is added to a gradient after its sum over the data-parallel ranks, so
            that the gradient may leave the device.
        saving: Numbers of the Units whose forward pass may save activations on another tier.
        exchanges: The ways to sum gradients over the ranks of an axis, by axis; an axis that is left out lies on
            one host.

    Returns:
        One strategy per Unit, in the order of ``units``.
    """
    offload = offload or OffloadPolicy()
    found = []
    for unit, is_moved in zip(units, moved(offload, units), strict=True):
        strategy = strategy_of(policy, mesh, unit.axes, exchange=(exchanges or {}).get(unit.axes[1]))
        if is_moved:
            is_what_is_updated = strategy.cuts_grad or not strategy.cuts_master
            leaves = gradients_leave and is_what_is_updated
            is_alone = all(mesh.size(axis) == 1 for axis in unit.axes)
            strategy = replace(
                strategy,
                tier=offload.optimizer,
                weight_tier=offload.parameters,
                grad_tier=offload.optimizer if leaves else "device",
                leaves_each=leaves and is_alone,
                is_delayed=offload.step == "delayed" and any(bucket.key.trained for bucket in unit.buckets),
                waits_at_end=offload.step == "at_end" and offload.optimizer != "device",
            )
        if unit.index in saving:
            strategy = replace(strategy, saved_tier=offload.activations)
        found.append(strategy)
    return found


def buffers(
    strategy: Strategy,
    dtypes: BucketDtypes,
    trained: bool,
    moments: Sequence[str],
    form: StateForm = "fp32",
    exact: Collection[str] = (),
) -> tuple[BucketBuffers, ...]:
    """Return the persistent flat buffers of one bucket.

    A master of the compute dtype on the weight's tier is the weight itself (or a view of the weight) and takes
    no bytes of its own.

    Args:
        strategy: The placements and tiers of the bucket's Unit.
        dtypes: The dtypes of the bucket.
        trained: False for a frozen bucket, which has a weight only.
        moments: Names of the optimizer's moments.
        form: The form in which moments are stored, except the ``exact`` ones.
        exact: Names of the moments that are stored in the form of the masters.

    Returns:
        One row per buffer: kind, element size, placement, tier and form.
    """

    def placed(
        kind: str,
        itemsize: int,
        placement: tuple[Placement, Placement],
        tier: Tier = "device",
        form: StateForm = "fp32",
    ) -> BucketBuffers:
        return BucketBuffers(kind, itemsize, dict(zip(strategy.axes, placement, strict=True)), tier, form)

    rows = [placed("weight", dtypes.compute.itemsize, strategy.weight, strategy.weight_tier)]
    if trained:
        rows.append(placed("grad", dtypes.grad.itemsize, strategy.grad, strategy.grad_tier))
        if dtypes.master != dtypes.compute or strategy.tier != strategy.weight_tier:
            rows.append(placed("master", dtypes.master.itemsize, strategy.master, strategy.tier))
        for moment in moments:
            kept: StateForm = "fp32" if moment in exact else form
            itemsize = stored_dtype(kept, dtypes.master).itemsize
            rows.append(placed(moment, itemsize, strategy.master, strategy.tier, kept))
        if strategy.is_delayed:
            rows.append(placed("next weight", dtypes.compute.itemsize, strategy.master, "host"))
    return tuple(rows)
