"""AUC against the definition, on any number of ranks, with ties, infinities and bounded exchange."""

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.ranks import RankPool
from torch import Tensor

from shardwise.base.errors import DataError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.observe import auc as module
from shardwise.observe.auc import ClickMetrics, ClickScore, auc


def by_curve(scores: Tensor, labels: Tensor) -> float:
    """The textbook's and scikit-learn's way: sort by score, walk the ROC curve, add trapezoids."""
    order = np.argsort(-scores.numpy(), kind="stable")
    s, y = scores.numpy()[order], labels.double().numpy()[order]
    ends = np.r_[np.flatnonzero(np.diff(s)), y.size - 1]
    true = np.r_[0, np.cumsum(y)[ends]]
    false = np.r_[0, 1 + ends] - true
    return float(np.trapezoid(true / true[-1], false / false[-1]))


def by_pairs(scores: Tensor, labels: Tensor) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    difference = positive[:, None] - negative[None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def samples(n: int, seed: int = 0, levels: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, generator=generator) * 3
    if levels:
        scores = (scores * levels).round() / levels
    labels = (torch.rand(n, generator=generator) < (scores - 1).sigmoid()).float()
    return scores, labels


@pytest.mark.parametrize("levels", [None, 1, 8])
def test_equals_the_definition(levels: int | None) -> None:
    scores, labels = samples(700, levels=levels)
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), abs=1e-13)
    assert auc(scores, labels) == pytest.approx(by_curve(scores, labels), abs=1e-12)


def test_equals_the_curve_on_many_samples() -> None:
    scores, labels = samples(200_000, levels=1000)
    assert auc(scores, labels) == pytest.approx(by_curve(scores, labels), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.0, 1.0], [0, 1], 1.0),
        ([1.0, 0.0], [0, 1], 0.0),
        ([2.0, 2.0], [0, 1], 0.5),
        ([-0.0, 0.0], [0, 1], 0.5),
        ([-1.0, -2.0, 0.5], [1, 0, 0], 0.5),
        ([math.inf, -math.inf, 3.0], [1, 0, 0], 1.0),
        ([-1e-45, 1e-45], [0, 1], 1.0),
    ],
)
def test_known_cases(scores: list[float], labels: list[int], expected: float) -> None:
    assert auc(torch.tensor(scores), torch.tensor(labels)) == expected


def test_one_class_or_nothing_has_no_auc() -> None:
    assert math.isnan(auc(torch.randn(5), torch.ones(5)))
    empty = ClickMetrics().result()
    assert math.isnan(empty.auc) and math.isnan(empty.log_loss) and empty.samples == 0


def test_log_loss_and_rates() -> None:
    scores, labels = samples(500)
    metrics = ClickMetrics()
    for x, y in zip(scores.split(64), labels.split(64), strict=True):
        metrics.add(x[:, None], y)
    metrics.add(torch.empty(0), torch.empty(0))
    result = metrics.result()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores.double(), labels.double())
    assert result.log_loss == pytest.approx(float(expected), rel=1e-12)
    assert result.click_rate == pytest.approx(float(labels.mean()))
    assert result.predicted_rate == pytest.approx(float(scores.double().sigmoid().mean()), rel=1e-12)
    assert result.samples == 500


def test_sure_and_right_costs_nothing_sure_and_wrong_everything() -> None:
    right, wrong = ClickMetrics(), ClickMetrics()
    right.add(torch.tensor([math.inf, -math.inf]), torch.tensor([1.0, 0.0]))
    assert right.result().log_loss == 0
    wrong.add(torch.tensor([math.inf]), torch.tensor([0.0]))
    assert wrong.result().log_loss == math.inf


def test_what_cannot_be_counted_is_named() -> None:
    nan = math.nan
    metrics = ClickMetrics()
    metrics.add(torch.tensor([nan, 1.0, 1.0, 2.0]), torch.tensor([1.0, nan, 0.0, 0.5]))
    with pytest.raises(DataError, match="1 predictions that are NaN and 1 labels that are NaN and 1 labels"):
        metrics.result()
    with pytest.raises(DataError, match="3 predictions .* for 2 labels"):
        ClickMetrics().add(torch.zeros(3), torch.zeros(2))


def test_ranges_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, labels = samples(20_000, levels=500)
    expected = auc(scores, labels)
    bins = np.bincount(module._ordered(scores.numpy()) >> 16, minlength=1 << 16)
    for limit in (1, 100, 5000):
        cuts = list(module._cuts(bins, limit))
        assert sum(int(bins[a:b].sum()) for a, b in cuts) == 20_000
        assert all(bins[a:b].sum() <= limit or np.count_nonzero(bins[a:b]) == 1 for a, b in cuts)
    monkeypatch.setattr(module, "_RANGE_ENTRIES", 1)
    monkeypatch.setattr(module, "_BINS", 1 << 16)
    monkeypatch.setattr(module, "_cuts", lambda bins, limit, real=module._cuts: list(real(bins, 100)))
    assert auc(scores, labels) == expected


def test_counts_beyond_64_bits() -> None:
    """Three billion positives above three billion negatives: 1.8e19 pairs, doubled."""
    count = 3_000_000_000
    table = np.array([[5, 1 << 20], [0, count], [count, 0]], np.int64)
    assert module._doubled_wins(table, module._SingleMetricRank()) == 2 * count * count


def test_the_memory_of_a_score_is_foreseen() -> None:
    """numpy counts its arrays itself; torch's two, of padded and of gathered scores, have 24 bytes a score each."""
    count = 300_000
    scores, labels = samples(count)
    metrics = ClickMetrics()
    metrics.add(scores, labels)
    tracemalloc.start()
    try:
        metrics.result()
        taken = tracemalloc.get_traced_memory()[1] + 2 * 24 * count
    finally:
        tracemalloc.stop()
    distinct = int(scores.unique().numel())
    assert module.most_bytes(distinct, 1) == pytest.approx(taken, rel=0.1)


def on_rank(world: World, n: int, levels: int | None, narrow: bool) -> tuple[ClickScore, int]:
    """Every rank takes an uneven share of the samples; the first takes none."""
    if narrow:
        original = module._cuts
        module._cuts = lambda bins, limit: original(bins, 50)  # type: ignore[assignment]
    try:
        traffic = Traffic()
        group = world.group_among(tuple(range(world.size)), "dp", CommPolicy(), StepClock(60.0), traffic)
        scores, labels = samples(n, levels=levels)
        cuts = [0, 0] + [n * i * i // (world.size - 1) ** 2 for i in range(1, world.size)]
        metrics = ClickMetrics()
        mine = slice(cuts[world.rank], cuts[world.rank + 1])
        metrics.add(scores[mine], labels[mine])
        return metrics.result(group), traffic.total("gradients", "weights").calls
    finally:
        if narrow:
            module._cuts = original


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("n", "levels", "narrow"), [(5000, 20, True), (5000, None, False), (1, None, False)])
def test_the_same_on_ranks(
    ranks: Callable[[int], RankPool], size: int, n: int, levels: int | None, narrow: bool
) -> None:
    scores, labels = samples(n, levels=levels)
    alone = ClickMetrics()
    alone.add(scores, labels)
    expected = alone.result()
    results = ranks(size).run(on_rank, n, levels, narrow)
    assert all(str(score) == str(results[0][0]) for score, _ in results), "the same on every rank"
    score, other_traffic = results[0]
    assert (score.auc, score.samples, score.click_rate) == pytest.approx(
        (expected.auc, expected.samples, expected.click_rate), abs=0, nan_ok=True
    )
    assert score.log_loss == pytest.approx(expected.log_loss, rel=1e-13)
    assert other_traffic == 0, "counted as control"
