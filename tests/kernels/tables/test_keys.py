"""The mix of keys is MurmurHash3's finalizer, and buckets are even, stable and apart from the index's slots."""

import pytest
import torch

from shardwise.kernels.tables.keys import bucket, in_turn, mix, plain_in_turn, plain_mix

EDGES = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 7, 1 << 32])


def finalizer(key: int) -> int:
    """fmix64 as published, in unbounded integers."""
    mask = (1 << 64) - 1
    x = key & mask
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
    x ^= x >> 33
    return x - (1 << 64) if x >> 63 else x


@pytest.mark.parametrize("form", [mix, plain_mix])
def test_every_form_is_the_published_finalizer(form) -> None:  # type: ignore[no-untyped-def]
    keys = torch.cat([EDGES, torch.randint(-(2**62), 2**62, (200,))])
    assert form(keys).tolist() == [finalizer(key) for key in keys.tolist()]


def test_buckets_are_even_for_consecutive_keys_and_for_multiples() -> None:
    for step in (1, 1024, 1 << 40):
        counts = torch.bincount(bucket(torch.arange(64 * 1024) * step, 1024), minlength=1024)
        assert len(counts) == 1024
        assert 6 < counts.double().std() < 10, "as far from 64 as chance has it: 8"


def test_the_keys_of_one_bucket_spread_over_slots() -> None:
    keys = torch.arange(1 << 17)
    mine = keys[bucket(keys, 16) == 3]
    slots = torch.bincount(mix(mine) & 255, minlength=256)
    assert slots.min() > 0
    assert slots.max() < 2 * slots.double().mean()


def test_buckets_do_not_move() -> None:
    assert bucket(torch.tensor([0, 1, 2, 3, -1]), 1024).tolist() == [
        (finalizer(key) % (1 << 64) >> 33) * 1024 >> 31 for key in (0, 1, 2, 3, -1)
    ]


def test_a_number_of_buckets_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="expected 1 to 2147483648"):
        bucket(EDGES, 0)


@pytest.mark.parametrize("buckets", [6, 8, 1024])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_in_turn_are_dense_on_their_owners(buckets: int, ranks: int) -> None:
    keys = torch.arange(7 * buckets)
    ours, plain = in_turn(keys, buckets, ranks), plain_in_turn(keys, buckets, ranks)
    assert torch.equal(ours.owners, plain.owners) and torch.equal(ours.rows, plain.rows)
    for rank in range(ranks):
        rows = ours.rows[ours.owners == rank]
        assert rows.sort().values.tolist() == list(range(len(rows)))
