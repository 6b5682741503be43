"""Synthetic pictures with planted classes: picture i is a function of (seed, i), and no file exists.

    pattern of class c    3 channels of waves with up to 3 periods along each side, drawn by (seed, c)
    picture i             class i mod C; its pattern, rolled by a random number of pixels along both sides,
                          + noise · N(0, 1)

A rolled pattern has the same waves with other phases, so that position tells nothing about the class, and a picture of
any side shows the same pattern.
Cost: about 25 ns a number.   Shapes: S side of a picture, C classes.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from shardwise.data.images.pictures import Pictures, Pixels
from shardwise.data.images.policy import SyntheticImagePolicy
from shardwise.data.placed import draws_at
from shardwise.data.sampler import key_of

_PERIODS = 3
_WAVES = 4
"""Number of waves of each channel of a pattern."""
_CONTRAST = 48.0
"""Standard deviation of a pattern, on the scale of 0 to 255."""


class SyntheticImages(Pictures):
    """Pictures [start, stop) of the synthetic set, of one side.

    Args:
        policy: the policy of the set.
        size: side of a picture in pixels, S.
        start: first picture.
        stop: end of the pictures.
    """

    def __init__(self, policy: SyntheticImagePolicy, size: int, start: int, stop: int) -> None:
        self._policy, self._size, self._start = policy, size, start
        self._key = key_of("pictures", policy.seed)
        self._patterns = [_pattern(policy.seed, each, size) for each in range(policy.classes)]
        self.labels = np.arange(start, stop, dtype=np.int64) % policy.classes
        self.class_names = tuple(f"pattern {each}" for each in range(policy.classes))

    def picture(self, index: int) -> Pixels:
        """Return the pixels of a picture: [S, S, 3]."""
        draws = draws_at(self._key, self._start + index)
        down, right = draws.integers(0, self._size, 2)
        moved = np.roll(self._patterns[self.labels[index]], (int(down), int(right)), (0, 1))
        noise = draws.standard_normal(moved.shape, dtype=np.float32)
        noise *= np.float32(self._policy.noise)
        noise += moved
        return np.clip(noise, 0, 255, out=noise).astype(np.uint8)

    def fingerprint(self) -> str:
        """Return a digest of the values that determine the pictures."""
        said = f"{self._policy.model_dump_json()} {self._size} {self._start} {len(self)}"
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def _pattern(seed: int, number: int, size: int) -> npt.NDArray[np.float32]:
    """Return the pattern of a class: [S, S, 3], of mean 128."""
    draws = draws_at(key_of("pattern", seed), number)
    across = 2 * np.pi * np.arange(size) / size
    pattern = np.zeros((size, size, 3))
    for channel in range(3):
        for _ in range(_WAVES):
            down, right = draws.integers(-_PERIODS, _PERIODS + 1, 2)
            phase, strength = draws.uniform(0, 2 * np.pi), draws.uniform(0.5, 1)
            pattern[..., channel] += strength * np.cos(down * across[:, None] + right * across + phase)
    spread = max(float(pattern.std()), 1e-6)
    return (128 + _CONTRAST * (pattern - pattern.mean()) / spread).astype(np.float32)
