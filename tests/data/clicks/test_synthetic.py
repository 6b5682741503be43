"""Synthetic clicks: a function of (seed, sample), with the distribution and the best score that are promised."""

import math

import numpy as np
import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.data.clicks import ClickRows, SyntheticClicks
from shardwise.observe.auc import ClickMetrics, auc


def columns(rows: ClickRows) -> list[bytes]:
    return [rows.labels.tobytes(), rows.dense.tobytes(), *(keys.values.tobytes() for keys in rows.keys)]


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    clicks = SyntheticClicks(10_000, (1000, 30, 1), seed=5)
    at = np.random.default_rng(0).integers(0, 10_000, 300)
    together = clicks.rows(at)
    for i in (0, 17, 299):
        alone = clicks.rows(at[i : i + 1])
        assert alone.labels[0] == together.labels[i]
        assert (alone.dense[0] == together.dense[i]).all()
        assert [k.values[0] for k in alone.keys] == [k.values[i] for k in together.keys]
    assert clicks.rows(np.empty(0, np.int64)).dense.shape == (0, 13)
    assert columns(SyntheticClicks(10_000, (1000, 30, 1), seed=5).rows(at)) == columns(together)
    assert columns(SyntheticClicks(10_000, (1000, 30, 1), seed=6).rows(at)) != columns(together)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.3])
def test_keys_follow_the_power_law(exponent: float) -> None:
    """P(rank <= r) of the bounded power law, within five standard errors."""
    n, size = 200_000, 500
    clicks = SyntheticClicks(n, (size,), exponent=exponent)
    counts = np.bincount(clicks._ranks(np.arange(n))[0], minlength=size)
    assert counts.size == size, "ranks lie in the table"

    def integral(x: float) -> float:
        return math.log(x) if exponent == 1 else (x ** (1 - exponent) - 1) / (1 - exponent)

    for r in (1, 5, 50, 300):
        p = integral(r + 1) / integral(size + 1)
        assert abs(counts[:r].sum() / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_keys_are_moved_about_but_stay_one_to_one() -> None:
    clicks = SyntheticClicks(1, (1000, 64, 7, 2, 1))
    for f, size in enumerate(clicks.table_rows):
        ranks = np.tile(np.arange(size), (5, 1)) % np.asarray(clicks.table_rows)[:, None]
        assert sorted(clicks._keys(ranks)[f].tolist()) == list(range(size))


def test_hashed_keys_are_the_same_sets_in_63_bits_and_fresh_ones_occur_once() -> None:
    n = 20_000
    dense = SyntheticClicks(n, (300, 40), seed=1)
    hashed = SyntheticClicks(n, (300, 40), seed=1, keys="hashed")
    for a, b in zip(dense.rows(np.arange(n)).keys, hashed.rows(np.arange(n)).keys, strict=True):
        pairs = set(zip(a.values.tolist(), b.values.tolist(), strict=True))
        assert len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs}), (
            "renamed, no two merged"
        )
        assert b.values.min() >= 0 and b.values.max() > 1 << 60
    fresh = SyntheticClicks(n, (300, 40), seed=1, keys="hashed", fresh=0.05)
    for keys in fresh.rows(np.arange(n)).keys:
        _, counts = np.unique(keys.values, return_counts=True)
        assert abs((counts == 1).sum() / n - 0.05) < 0.01
    with pytest.raises(ConfigError, match="set keys: hashed"):
        SyntheticClicks(n, (300,), fresh=0.1)


def test_labels_are_drawn_from_the_teacher() -> None:
    n = 200_000
    clicks = SyntheticClicks(n, (200, 50, 1000), click_rate=0.1)
    logits = clicks.logits(np.arange(n))
    labels = clicks.rows(np.arange(n)).labels
    p = 1 / (1 + np.exp(-logits))
    assert abs(p.mean() - 0.1) < 0.003
    for low, high in ((-9, -3), (-3, -2), (-2, -1), (-1, 9)):
        here = (logits > low) & (logits <= high)
        error = math.sqrt(float((p[here] * (1 - p[here])).sum())) / here.sum()
        assert abs(labels[here].mean() - p[here].mean()) < 5 * error


def test_the_best_score_is_that_of_the_teacher_on_drawn_labels() -> None:
    n = 300_000
    clicks = SyntheticClicks(n, (200, 50, 1000))
    metrics = ClickMetrics()
    labels = torch.from_numpy(clicks.rows(np.arange(n)).labels)
    metrics.add(torch.from_numpy(clicks.logits(np.arange(n))), labels)
    drawn, best = metrics.result(), clicks.best_of(n)
    assert abs(drawn.auc - best.auc) < 0.003
    assert abs(drawn.log_loss - best.log_loss) < 0.003
    assert 0.7 < best.auc < 0.9
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0))
    worse = auc(torch.from_numpy(clicks.logits(np.arange(n))).float() + noise, labels)
    assert worse < best.auc - 0.03


def test_the_best_auc_by_all_pairs() -> None:
    """The estimate is the definition: all pairs of a small sample, weighted by their probabilities."""
    clicks = SyntheticClicks(1, (50,), dense=2)
    at = np.arange(1 << 62, (1 << 62) + 300)
    p = 1 / (1 + np.exp(-clicks.logits(at)))
    weight = p[:, None] * (1 - p)[None, :]
    np.fill_diagonal(weight, 0)
    wins = weight[p[:, None] > p[None, :]].sum() + 0.5 * weight[p[:, None] == p[None, :]].sum()
    assert clicks.best_of(300).auc == pytest.approx(wins / weight.sum(), abs=1e-12)


def test_terms_have_the_promised_size() -> None:
    n = 100_000
    for term in ("dense_signal", "key_signal", "pair_signal"):
        strengths = {"dense_signal": 0.0, "key_signal": 0.0, "pair_signal": 0.0} | {term: 1.0}
        clicks = SyntheticClicks(n, (5000,) * 10, exponent=0.5, **strengths)  # type: ignore[arg-type]
        assert clicks.logits(np.arange(n)).std() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    "given",
    [{"samples": 0}, {"table_rows": ()}, {"table_rows": (3, 0)}, {"click_rate": 1.0}, {"exponent": 0.0}],
)
def test_what_makes_no_log_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="synthetic clicks"):
        SyntheticClicks(**({"samples": 10, "table_rows": (5,)} | given))  # type: ignore[arg-type]


def newton(x: np.ndarray, y: np.ndarray, rounds: int = 8) -> np.ndarray:
    """Weights of a logistic regression with a little decay."""
    weights = np.zeros(x.shape[1])
    for _ in range(rounds):
        p = 1 / (1 + np.exp(-x @ weights))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 0.1 * np.eye(x.shape[1])
        weights += np.linalg.solve(hessian, x.T @ (y - p) - 0.1 * weights)
    return weights


def test_the_best_score_can_be_reached_and_pairs_are_needed_for_it() -> None:
    """A weight for each pair of keys represents the teacher; a weight for each key does not."""
    n, size = 60_000, 6
    clicks = SyntheticClicks(2 * n, (size, size), dense=2, exponent=0.5, pair_signal=1.0, seed=3)
    rows = clicks.rows(np.arange(2 * n))
    a, b = (keys.values for keys in rows.keys)
    numbers = np.c_[np.log1p(rows.dense), np.ones(2 * n)]
    pairs = np.c_[numbers, np.eye(size * size)[a * size + b]]
    keys = np.c_[numbers, np.eye(size)[a], np.eye(size)[b]]
    labels = torch.from_numpy(rows.labels[n:])

    def score(x: np.ndarray) -> tuple[float, float]:
        metrics = ClickMetrics()
        metrics.add(torch.from_numpy(x[n:] @ newton(x[:n], rows.labels[:n])), labels)
        result = metrics.result()
        return result.auc, result.log_loss

    metrics = ClickMetrics()
    metrics.add(torch.from_numpy(clicks.logits(np.arange(n, 2 * n))), labels)
    teacher = metrics.result()
    auc_of_pairs, loss_of_pairs = score(pairs)
    assert teacher.auc - 0.001 < auc_of_pairs < teacher.auc + 0.0005
    assert abs(loss_of_pairs - teacher.log_loss - pairs.shape[1] / (2 * n)) < 0.0005
    assert score(keys)[0] < teacher.auc - 0.01
    assert abs(teacher.auc - clicks.best_of(1 << 18).auc) < 0.005
