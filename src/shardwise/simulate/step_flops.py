"""Floating-point operations of a step, in four ways of counting, and what follows from the seconds of the step.

    model       what the model needs: 6·P + 12·L·T·D a token, by its own formula, or counted once without repetition
    causal      the same with half of the attention's products: 6·P + 6·L·T·D
    hardware    model and the forward passes of what is recomputed
    executed    every product of the step, as counted, on all ranks

    mfu = model FLOPs / (seconds · peaks of all devices)        hfu = hardware FLOPs / (seconds · peaks)
    seconds at a given mfu = model FLOPs / (mfu · peaks)

Papers: Chowdhery et al. 2022, arXiv:2204.02311 (mfu); Korthikanti et al. 2022, arXiv:2205.05198 (hardware FLOPs).
Cost: a sum over stages and Units.
Shapes: P weights in products, L layers, T tokens of a sequence, D width of the attention.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.base.errors import UsageError
from shardwise.base.hardware import Hardware
from shardwise.observe.flops import mfu, pf_days
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.work import peak_dtype

_DAY_S = 86_400


class StepFlops(NamedTuple):
    """FLOPs of one step of a whole job."""

    model_per_token: float | None
    """FLOPs of one token that the model needs; None without a number of tokens."""
    model_per_step: float
    causal_per_step: float
    """FLOPs that the model needs if attention is causal; ``model_per_step`` if its formula is unknown."""
    hardware_per_step: float
    executed_per_step: float

    def total(self, steps: int) -> float:
        """Return the model FLOPs of a run."""
        return self.model_per_step * steps

    def pf_days(self, steps: int) -> float:
        """Return the model FLOPs of a run in petaflop/s-days."""
        return pf_days(self.total(steps))


class RunTime(NamedTuple):
    """Figures of a run that follow from the seconds of a step."""

    step_s: float
    mfu: float | None
    """Model FLOPs over what the devices could do; None if their peak is unknown."""
    hfu: float | None
    """Hardware FLOPs over what the devices could do."""
    tokens_per_s: float | None
    days: float | None
    """Days of the run; None without a number of steps."""
    device_hours: float | None


def step_flops(
    passed: Mapping[int, MeasuredPass],
    microbatches: int,
    replicas: int,
    slices: int = 1,
    tokens: int | None = None,
    per_token: int | None = None,
    causal_per_token: int | None = None,
) -> StepFlops:
    """Return the FLOPs of a step.

    Args:
        passed: Measured pass of one microbatch on one rank, by stage.
        microbatches: Microbatches of a step.
        replicas: Data-parallel ranks, which compute different batches.
        slices: Ranks that share each stage ("tp", "cp").
        tokens: Tokens of a step over all ranks.
        per_token: FLOPs of a token by the model's own formula; None: the products are counted.
        causal_per_token: The same with causal attention.
    """
    ranks = microbatches * replicas * slices
    shares = [share for each in passed.values() for share in each.shares.values()]
    executed = ranks * sum(share.work.flops for share in shares)
    repeated = ranks * sum(share.work.repeated_flops for share in shares)
    model = float(executed - repeated)
    if per_token is not None and tokens is not None:
        model = float(per_token * tokens)
    causal = model if causal_per_token is None or tokens is None else float(causal_per_token * tokens)
    each = model / tokens if tokens else None
    return StepFlops(each, model, causal, model + repeated, float(executed))


def run_time(
    flops: StepFlops,
    step_s: float,
    hardware: Hardware,
    dtype: str,
    ranks: int,
    tokens: int | None = None,
    steps: int | None = None,
) -> RunTime:
    """Return what follows from the seconds of a step, foreseen, measured or given.

    Args:
        flops: FLOPs of the step.
        step_s: Seconds of the step.
        hardware: Rates of a rank.
        dtype: Name of the dtype in which the model computes.
        ranks: Ranks of the job.
        tokens: Tokens of a step over all ranks.
        steps: Steps of the run.
    """
    peaks = hardware.peaks[peak_dtype(hardware, dtype)] * ranks if hardware.peaks else None
    run_s = None if steps is None else steps * step_s
    return RunTime(
        step_s,
        mfu(flops.model_per_step, step_s, peaks),
        mfu(flops.hardware_per_step, step_s, peaks),
        None if tokens is None or step_s <= 0 else tokens / step_s,
        None if run_s is None else run_s / _DAY_S,
        None if run_s is None else run_s / 3600 * ranks,
    )


def seconds_at(share: float, flops: StepFlops, hardware: Hardware, dtype: str, ranks: int) -> float:
    """Return the seconds of a step that reaches a given model FLOP/s utilisation.

    Args:
        share: The utilisation, above 0 and at most 1.
        flops: FLOPs of the step.
        hardware: Rates of a rank.
        dtype: Name of the dtype in which the model computes.
        ranks: Ranks of the job.

    Raises:
        UsageError: if ``share`` is no share, or the hardware has no peak.
    """
    if not 0 < share <= 1:
        raise UsageError(f"mfu: {share} is no share; expected a number above 0 and at most 1, such as 0.4")
    if not hardware.peaks:
        raise UsageError(f"mfu: hardware {hardware.name!r} has no peak; give the seconds of a step instead")
    return flops.model_per_step / (share * hardware.peaks[peak_dtype(hardware, dtype)] * ranks)
