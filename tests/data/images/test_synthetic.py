"""Synthetic pictures: each shows its class."""

import numpy as np

from shardwise.data.images import SyntheticImagePolicy, SyntheticImages


def test_synthetic_pictures_show_their_class() -> None:
    policy = SyntheticImagePolicy(classes=3, noise=0)
    pictures = SyntheticImages(policy, 16, 3, 9)
    assert pictures.labels.tolist() == [0, 1, 2, 0, 1, 2]
    a, b, other = (pictures.picture(index).astype(int) for index in (0, 3, 1))
    # The same pattern moved about has the same values, another pattern has others.
    assert np.array_equal(np.sort(a, None), np.sort(b, None)) and not np.array_equal(a, b)
    assert not np.array_equal(np.sort(a, None), np.sort(other, None))
    assert np.array_equal(SyntheticImages(policy, 16, 0, 9).picture(3), a)
