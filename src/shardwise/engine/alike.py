"""What ranks must have in common, or must not, at the end of a step; all ranks see the same totals and decide alike.

learning rates and their like    equal on all ranks: a scheduler fed with a rank's own loss parts their weights
batches of the first step        different on data-parallel ranks, equal on the ranks that share a model
the loss that is reported        equal on the ranks of one model: one that adds up what a rank holds of the weights
                                 is a loss of slices
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from shardwise.config.run import RunConfig
from shardwise.engine.fingerprint import same
from shardwise.engine.step import Totals
from shardwise.engine.weighing import UNEVEN, are_uneven
from shardwise.plan.errors import DataError, UsageError

if TYPE_CHECKING:
    from shardwise.engine.parts import Parts


class LossTolerance(NamedTuple):
    """The largest difference between the losses that ranks of one model report.

    Ranks of one model compute a loss from the same bits, or from bits that were rounded once more or less: 2^-8 of each
    other in bf16, 2^-24 in fp32.
    """

    relative: float
    """Of the mean loss."""
    absolute: float
    """Of a loss whose terms cancel, which may be 0."""


def loss_tolerance(parts: "Parts", config: RunConfig) -> LossTolerance:
    """Return the tolerance for the dtypes that the model computes in."""
    dtypes = {config.precision.dtypes(e.name, e.dtype).compute for e in parts.spec.parameters.values()}
    if config.precision.operations is not None or dtypes & {torch.bfloat16, torch.float16}:
        return LossTolerance(2.0**-5, 1e-5)
    return LossTolerance(1e-4, 1e-12 if dtypes == {torch.float64} else 1e-8)


def check_alike(
    totals: Totals, duplicates: Literal["error", "allow"], finite: bool, tolerance: LossTolerance
) -> None:
    """``duplicates``: what to do about equal batches. Errors: UsageError, DataError."""
    if not totals.rates_agree:
        raise UsageError(
            "optimizer: the ranks work with different learning rates (or betas, momentum, weight decay), so their "
            "weights would part; step schedulers alike on every rank, and give one that looks at a value "
            "(ReduceLROnPlateau) the same value everywhere: the result's loss, or what engine.evaluate returns"
        )
    if not totals.batches_agree:
        raise DataError(
            "the ranks that share a model (along tp and pp) were given different batches in the first step, so the "
            "parts of the model worked on different samples; use engine.loader(...), which gives them the same ones"
        )
    if are_uneven(totals.guesses):
        raise UsageError(UNEVEN)
    pair = next(same(list(totals.batches)), None)
    if pair is not None and duplicates == "error":
        raise DataError(
            f"data-parallel ranks {pair[0]} and {pair[1]} were given the same batches in the first step, so one of "
            "them does nothing new; iterate over engine.loader(your DataLoader or Dataset), which gives each rank a "
            "share of its own, or, where that is meant, set batch.duplicates: allow"
        )
    mean = abs(totals.loss / totals.weight) if totals.weight else 0.0
    if finite and totals.loss_spread > max(tolerance.relative * mean, tolerance.absolute):
        raise UsageError(
            f"the ranks of one model (along tp) report losses that differ by {totals.loss_spread:.3g} around "
            f"{mean:.6g}, so the loss is made of what each rank holds alone. "
            + (
                "The forward pass draws random numbers: drawn in the shape of a slice of the tokens or features, they "
                "are no slice of what is drawn for the whole (functional dropout, noise on the residual stream); use "
                "nn.Dropout, or draw in the shape of the batch. Else it is "
                if totals.draws
                else "It is "
            )
            + "of a slice of the weights or of the tokens; take it from the model's output, or from whole weights "
            "(engine.full_parameters)"
        )
