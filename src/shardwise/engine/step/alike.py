"""Checks at the end of a step that ranks agree, or differ, as they must; all ranks check the same totals.

learning rates and other rates   equal on all ranks: a scheduler that is fed with a rank's own loss makes the ranks'
                                 weights differ
batches of the first step        different on data-parallel ranks, equal on the ranks that share a model
the loss that is reported        equal on the ranks of one model: a loss that adds up a rank's own part of the weights
                                 is the loss of a slice

If two data-parallel ranks compute the same samples, they do the work of one, and neither loss nor gradients show it.
Ranks that share a model must be given the same samples, and if they are not, loss and gradients look plausible too.
Both errors are detected by a fingerprint of 48 bits per rank, which is exchanged once, in the reduction that ends the
first step (end.py).
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import DataError, UsageError
from shardwise.base.pytree import tensors_in
from shardwise.config.run import RunConfig
from shardwise.engine.parts.weighing import UNEVEN, are_uneven
from shardwise.engine.step.end import StepTotals

if TYPE_CHECKING:
    from shardwise.engine.parts.parts import EngineParts

_BITS = 48
"""Bits of a fingerprint. The sum of one such number and zeros is exact in fp64."""


class BatchFingerprint:
    """A hash of batches that are added one after another."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_BITS // 8)
        self._tells = False
        self._is_dropped = False

    def add(self, batch: Any) -> None:
        """Add a batch to the hash, unless every tensor in it is empty or holds only one value.

        Any rank might hold such a batch, so it cannot show that two ranks have the same data.
        """
        tensors = list(tensors_in(batch))
        if all(_is_plain(tensor) for tensor in tensors):
            return
        self._tells = True
        for tensor in tensors:
            self._hash.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            self._hash.update(_bytes_of(tensor))

    def drop(self) -> None:
        """Drop the hash: a batch was left out that other ranks may have added."""
        self._is_dropped = True

    @property
    def value(self) -> int:
        """The hash, from 1 to 2^48; 0 if no batch that distinguishes ranks was added, or if it was dropped."""
        tells = self._tells and not self._is_dropped
        return int.from_bytes(self._hash.digest(), "little") or 1 if tells else 0


def _is_plain(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return True
    values = tensor.detach()
    return bool((values == values.reshape(-1)[0]).all()) or bool(values.isnan().all())


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        return b""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(values: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of indices whose fingerprints are equal and not 0."""
    first: dict[int, int] = {}
    for index, value in enumerate(values):
        if value and value in first:
            yield first[value], index
        first.setdefault(value, index)


class LossTolerance(NamedTuple):
    """The largest difference between the losses that ranks of one model report.

    Ranks of one model compute a loss from the same bits, or from bits that were rounded once more or less: 2^-8 of each
    other in bf16, 2^-24 in fp32.
    """

    relative: float
    """Largest difference relative to the mean loss."""
    absolute: float
    """Largest absolute difference, for a loss whose terms cancel and that may be 0."""


def loss_tolerance(parts: "EngineParts", config: RunConfig) -> LossTolerance:
    """Return the tolerance for the dtypes that the model computes in."""
    dtypes = {config.precision.dtypes(e.name, e.dtype).compute for e in parts.spec.parameters.values()}
    precision = config.precision
    if (
        precision.operations is not None
        or precision.linear is not None
        or dtypes & {torch.bfloat16, torch.float16}
    ):
        return LossTolerance(2.0**-5, 1e-5)
    return LossTolerance(1e-4, 1e-12 if dtypes == {torch.float64} else 1e-8)


def _check_batches(batches: Sequence[int], duplicates: Literal["error", "allow"], sharers: int) -> None:
    """Raise DataError if ranks along "cp" have different batches, or other data-parallel ranks the same ones."""
    # A rank whose part of the batches has no targets has the fingerprint 0.
    shared = [{*batches[place : place + sharers]} - {0} for place in range(0, len(batches), sharers)]
    if any(len(each) > 1 for each in shared):
        raise DataError(
            "the ranks that share a sequence (along cp) were given different batches in the first step, so each worked "
            "on tokens of another sequence; use engine.loader(...), which gives them the same batches"
        )
    pair = next(same([max(each, default=0) for each in shared]), None)
    if pair is not None and duplicates == "error":
        raise DataError(
            f"data-parallel ranks {pair[0]} and {pair[1]} were given the same batches in the first step, so one of "
            "them does nothing new; iterate over engine.loader(your DataLoader or Dataset), which gives each rank a "
            "share of its own, or, where that is meant, set batch.duplicates: allow"
        )


def check_alike(
    totals: StepTotals,
    duplicates: Literal["error", "allow"],
    finite: bool,
    tolerance: LossTolerance,
    sharers: int = 1,
) -> None:
    """Check that ranks agree in the rates and losses, and have batches of their own, at the end of a step.

    Args:
        totals: the sums over all ranks that the step's reduction returned.
        duplicates: ``error`` if equal batches on data-parallel ranks are an error, else ``allow``.
        finite: True if the gradients are finite; the losses are compared only then.
        tolerance: the largest difference between losses.
        sharers: neighbouring data-parallel ranks that share their samples (context parallelism).

    Raises:
        UsageError: if rates differ, if weights of microbatches were guessed and are uneven, and if the ranks of one
            model report different losses.
        DataError: if ranks of one model have different batches, or data-parallel ranks the same ones.
    """
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
    _check_batches(totals.batches, duplicates, sharers)
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
