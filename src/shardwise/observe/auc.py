"""Quality of click predictions: exact area under the ROC curve and log loss, over the samples of all ranks.

    AUC = P(score of a positive > score of a negative), a tie counts one half
        = sum over distinct scores s of  positives(s) · (2 · negatives below s + negatives(s))  /  2 · P · N

Numerator and denominator are whole numbers, so the result does not depend on how samples lie on ranks or in batches.
No rank ever holds all samples. Each rank keeps its own scores as sorted distinct values with two counts. A histogram
over the upper 16 bits of the scores, summed over the ranks, cuts the line of scores into ranges of bounded size. Range
by range the ranks exchange their counts, and rank i mod W merges and sums range i.

    log loss = mean of softplus(x) where y = 0, softplus(-x) where y = 1,  x the logit;  in fp64, nothing is clipped

Scores are compared as fp32. They are logits, not probabilities, because many probabilities round to 1.
Cost:  n log n / W and 24 bytes sent per distinct score of a rank; memory 4 bytes a sample, plus at most
       24 · max(4 M, 65,536 W) bytes for a range.
Shapes: n samples over all ranks, P + N = n positives and negatives, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from shardwise.base.errors import DataError

_BINS = 1 << 16
_RANGE_ENTRIES = 1 << 22
_WORD_BITS = 40
"""Bits of the words in which a count of pairs is sent: sums of such words over 2^23 ranks fit into int64."""
_WORDS = 4

_Counts = npt.NDArray[np.int64]


class MetricRanks(Protocol):
    """The ranks that hold different samples: the part of ``comm``'s Group that is used."""

    index: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: Tensor, what: str, purpose: Literal["control"]) -> "PendingSum":
        """Sum ``tensor`` over the ranks in place."""
        ...

    def all_gather(
        self, output: Tensor, shard: Tensor, what: str, purpose: Literal["control"]
    ) -> "PendingSum":
        """Gather the ranks' shards into ``output``."""
        ...


class PendingSum(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait until the collective is done."""
        ...


@dataclass
class _SingleMetricRank:
    """A single rank, whose sums are the sums of all ranks."""

    index: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor, what: str, purpose: Literal["control"]) -> "_SingleMetricRank":
        return self

    def all_gather(
        self, output: Tensor, shard: Tensor, what: str, purpose: Literal["control"]
    ) -> "_SingleMetricRank":
        output.copy_(shard)
        return self

    def wait(self) -> None: ...


class ClickScore(NamedTuple):
    """Quality of predictions on one set of samples, over all ranks."""

    auc: float
    """Area under the ROC curve; NaN if all samples have the same label."""
    log_loss: float
    click_rate: float
    """Mean label of the samples."""
    predicted_rate: float
    """Mean predicted probability; equal to ``click_rate`` if a model is calibrated."""
    samples: int


_ENTRY_BYTES = 24
"""Bytes of a distinct score with its two counts."""
_MERGED_BYTES = 100
"""Bytes for each distinct score of a range while its ranks' scores are merged: the gathered and the joined entries, the
order, the sorted keys and counts, the first places of equal keys, and their sums."""


def most_bytes(samples: int, ranks: int) -> int:
    """Return the most host memory that one rank takes for the score of an evaluation whose predictions all differ.

    Args:
        samples: Samples over all ranks.
        ranks: Number of ranks.
    """
    own = -(-samples // ranks)
    at_once = min(samples, max(_RANGE_ENTRIES, _BINS * ranks))
    keys = own * np.dtype(np.uint32).itemsize
    return keys + _ENTRY_BYTES * (own + 2 * -(-at_once // ranks)) + _MERGED_BYTES * at_once


@dataclass
class ClickMetrics:
    """Collector of the predictions of one evaluation on each rank.

    >>> metrics = ClickMetrics()
    >>> for batch in batches:
    ...     metrics.add(model(batch), batch["labels"])
    >>> metrics.result(group).auc                       # every rank of the group calls this
    """

    _keys: tuple[list[npt.NDArray[np.uint32]], list[npt.NDArray[np.uint32]]] = field(
        default_factory=lambda: ([], [])
    )
    """Scores of negatives and of positives as integers of the same order."""
    _sums: _Counts = field(default_factory=lambda: np.zeros(5, np.int64))
    """Counts of samples, positives, NaN scores, NaN labels, and labels that are neither 0 nor 1."""
    _loss: float = 0.0
    _predicted: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the predictions of a batch.

        Values that cannot be counted are reported by ``result``, on every rank at once.

        Args:
            logits: Predictions [b] or [b, 1]; b may be 0.
            labels: Labels, 0 or 1, of the same number.

        Raises:
            DataError: if the numbers of predictions and labels differ.
        """
        if logits.numel() != labels.numel():
            raise DataError(
                f"{logits.numel()} predictions {list(logits.shape)} for {labels.numel()} labels "
                f"{list(labels.shape)}; expected one for each"
            )
        x = logits.detach().reshape(-1).to("cpu", torch.float32)
        y = labels.detach().reshape(-1).to("cpu", torch.float32)
        nan_scores, nan_labels = x.isnan(), y.isnan()
        other = ~nan_labels & (y != 0) & (y != 1)
        good = ~(nan_scores | nan_labels | other)
        x, y = x[good], y[good]
        wide, target = x.double(), y.double()
        loss = softplus(torch.where(target > 0.5, -wide, wide))  # not softplus(x) - y·x: inf - inf is NaN
        self._loss += float(loss.sum())
        self._predicted += float(wide.sigmoid().sum())
        keys = _ordered(x.numpy())
        is_positive = y.numpy() > 0.5
        self._keys[0].append(keys[~is_positive])
        self._keys[1].append(keys[is_positive])
        counts = (x.numel(), is_positive.sum(), nan_scores.sum(), nan_labels.sum(), other.sum())
        self._sums += np.asarray([int(count) for count in counts])

    def result(self, ranks: MetricRanks | None = None) -> ClickScore:
        """Return the score over all samples that the ranks have added.

        Args:
            ranks: Ranks with different samples; None: only this process.

        Raises:
            DataError: if predictions are NaN, or labels neither 0 nor 1.
        """
        ranks = ranks or _SingleMetricRank()
        sums = torch.from_numpy(self._sums.copy())
        ranks.all_reduce(sums, "samples of the evaluation", "control").wait()
        samples, positives, nan_scores, nan_labels, other = (int(each) for each in sums)
        if nan_scores + nan_labels + other:
            found = [
                f"{count} {what}"
                for count, what in (
                    (nan_scores, "predictions that are NaN"),
                    (nan_labels, "labels that are NaN"),
                    (other, "labels that are neither 0 nor 1"),
                )
                if count
            ]
            raise DataError(
                f"evaluation: {' and '.join(found)} among {samples + nan_scores + nan_labels + other} samples; "
                "predictions must be numbers and labels 0 or 1: look for a loss that diverged, or at the labels"
            )
        totals = torch.tensor([self._loss, self._predicted], dtype=torch.float64)
        ranks.all_reduce(totals, "losses of the evaluation", "control").wait()
        loss, predicted = totals.tolist()
        pairs = 2 * positives * (samples - positives)
        doubled = _doubled_wins(_distinct(*(_joined(keys) for keys in self._keys)), ranks)
        count = max(samples, 1)
        return ClickScore(
            auc=doubled / pairs if pairs else float("nan"),
            log_loss=loss / count if samples else float("nan"),
            click_rate=positives / count,
            predicted_rate=predicted / count,
            samples=samples,
        )


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the exact AUC of one process's samples.

    Args:
        scores: Predictions [b].
        labels: Labels [b], 0 or 1.
    """
    metrics = ClickMetrics()
    metrics.add(scores, labels)
    return metrics.result().auc


def _ordered(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Return integers in the order of the scores, equal if the scores are equal (-0 is 0)."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))


def _joined(parts: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _distinct(negatives: npt.NDArray[np.uint32], positives: npt.NDArray[np.uint32]) -> _Counts:
    """Return the sorted distinct keys of one rank with their counts: rows key, positives, negatives."""
    parts = [np.unique(each, return_counts=True) for each in (positives, negatives)]
    keys = np.union1d(parts[0][0], parts[1][0])
    table = np.zeros((3, keys.size), np.int64)
    table[0] = keys
    for row, (own, counts) in enumerate(parts, start=1):
        table[row, np.searchsorted(keys, own)] = counts
    return table


def _doubled_wins(table: _Counts, ranks: MetricRanks) -> int:
    """Return twice the number of (positive, negative) pairs in the right order, ties counting one."""
    ours, negatives_below = 0, 0
    for i, entries in enumerate(_ranges(table, ranks)):
        if i % ranks.size == ranks.index:
            ours += _wins_in(entries, negatives_below)
        negatives_below += int(entries[2].sum())
    words = torch.tensor([ours >> (_WORD_BITS * i) & ((1 << _WORD_BITS) - 1) for i in range(_WORDS)])
    ranks.all_reduce(words, "pairs of the AUC", "control").wait()
    return sum(int(word) << (_WORD_BITS * i) for i, word in enumerate(words))


def _wins_in(entries: _Counts, negatives_below: int) -> int:
    order = np.argsort(entries[0], kind="stable")
    keys, counts = entries[0, order], entries[1:, order]
    if not keys.size:
        return 0
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    positives, negatives = np.add.reduceat(counts, starts, axis=1)
    below = np.cumsum(negatives) - negatives
    if 2 * int(positives.sum()) * int(negatives.sum()) >= 1 << 63:
        positives, negatives, below = (each.astype(object) for each in (positives, negatives, below))
    return int((positives * (2 * below + negatives)).sum()) + 2 * negatives_below * int(positives.sum())


def _ranges(table: _Counts, ranks: MetricRanks) -> Iterator[_Counts]:
    """Yield the entries of all ranks by range of scores, from low to high: [3, entries], not merged."""
    bins = np.bincount(table[0] >> 16, minlength=_BINS)
    starts = np.r_[0, np.cumsum(bins)]
    everyone = torch.from_numpy(bins.copy())
    ranks.all_reduce(everyone, "histogram of the AUC", "control").wait()
    limit = max(_RANGE_ENTRIES // ranks.size, _BINS)
    for first, stop in _cuts(everyone.numpy(), limit):
        mine = torch.from_numpy(np.ascontiguousarray(table[:, starts[first] : starts[stop]]))
        longest = torch.zeros(ranks.size, dtype=torch.int64)
        ranks.all_gather(longest, torch.tensor([mine.shape[1]]), "range of the AUC", "control").wait()
        width = int(longest.max())
        padded = torch.zeros(3, width, dtype=torch.int64)
        padded[:, : mine.shape[1]] = mine
        everything = torch.empty(ranks.size * 3 * width, dtype=torch.int64)
        ranks.all_gather(everything, padded.view(-1), "scores of the AUC", "control").wait()
        parts = everything.view(ranks.size, 3, width)
        yield np.concatenate(
            [part[:, : int(n)].numpy() for part, n in zip(parts, longest, strict=True)], axis=1
        )


def _cuts(bins: _Counts, limit: int) -> Iterator[tuple[int, int]]:
    """Yield neighbouring bins that together hold at most ``limit`` entries, or one bin.

    Empty bins between them are left out.
    """
    held = np.flatnonzero(bins)
    start = 0
    while start < held.size:
        total = np.cumsum(bins[held[start:]])
        count = max(int(np.searchsorted(total, limit, side="right")), 1)
        yield int(held[start]), int(held[start + count - 1]) + 1
        start += count
