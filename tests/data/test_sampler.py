"""The order is a permutation, drawn by (seed, step) alone; the shares of all ranks make up the step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.sampler import BatchShare, Permutation, Sampler


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 2000), seed=st.integers(-5, 1 << 40), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025])
def test_small_and_border_sizes_are_permutations(size: int) -> None:
    assert sorted(Permutation(size, 0, 0)(np.arange(size)).tolist()) == list(range(size))


def test_huge_sizes_cost_no_memory_and_collide_never() -> None:
    image = Permutation(10**15 + 7, 1, 0)(np.arange(20_000) * 1_000_003)
    assert len(np.unique(image)) == 20_000
    assert image.min() >= 0
    assert image.max() < 10**15 + 7


def test_every_sample_comes_first_equally_often() -> None:
    """400 seeds on 8 samples: 50 each, standard deviation 6.6; a network with too few rounds is far off."""
    first = [int(Permutation(8, seed, 0)(np.arange(1))[0]) for seed in range(400)]
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 23
    assert counts.max() < 77


def test_neighbours_are_torn_apart() -> None:
    """Consecutive positions land a third of the range apart on average, as for a uniform order."""
    image = Permutation(10_000, 0, 0)(np.arange(10_000))
    assert abs(np.abs(np.diff(image)).mean() / 10_000 - 1 / 3) < 0.02


def test_seed_and_epoch_change_the_order() -> None:
    orders = [
        tuple(Permutation(100, seed, epoch)(np.arange(100))) for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert len(set(orders)) == 3


def test_order_is_pinned() -> None:
    """A resumed run relies on the order of the release that began it."""
    assert Sampler(10, seed=0).at(0, 10).tolist() == [2, 1, 8, 5, 3, 9, 6, 0, 7, 4]
    assert Sampler(10**9, seed=7).at(3, 6).tolist() == [419838204, 867905087, 605800753]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 60), batch=st.integers(1, 50), seed=st.integers(0, 100))
def test_steps_lie_end_to_end_over_epochs(size: int, batch: int, seed: int) -> None:
    sampler = Sampler(size, seed)
    joined = [index for step in range(5) for index in sampler.indices(step, batch)]
    assert joined == sampler.at(0, 5 * batch).tolist()
    for epoch in range(5 * batch // size):
        assert sorted(joined[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_without_shuffling_samples_come_as_they_lie() -> None:
    assert Sampler(5, shuffle=False).indices(1, 4) == [4, 0, 1, 2]


def test_no_samples_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        Sampler(0)


@settings(max_examples=60, deadline=None)
@given(micro=st.integers(1, 5), accumulation=st.integers(1, 4), exponent=st.integers(0, 3))
def test_blocks_of_all_ranks_are_the_step_for_any_dp(micro: int, accumulation: int, exponent: int) -> None:
    global_batch = micro * accumulation * 8
    dp = 2**exponent
    shares = [BatchShare(global_batch, micro, rank, dp) for rank in range(dp)]
    dealt = sorted((block.start, block.stop) for share in shares for block in share.blocks())
    assert dealt == [(start, start + micro) for start in range(0, global_batch, micro)]
    assert all(
        len(list(share.blocks())) == share.accumulation == global_batch // (micro * dp) for share in shares
    )
    for share in shares:
        assert all(share.owner(block.start // micro) == share.dp_index for block in share.blocks())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((10, 4, 0, 2), "10, which is no multiple of micro batch 4 x dp 2 = 8; set it to 8 or 16"),
        ((4, 4, 0, 2), "set it to 8, or"),
        ((8, 0, 0, 1), "micro batch 0"),
        ((8, 1, 2, 2), "rank 2 of 2"),
    ],
)
def test_batches_that_do_not_divide_are_refused(given: tuple[int, int, int, int], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        BatchShare(*given)
