"""The order of samples, and each rank's share of it.

The samples of all epochs form one endless line of positions. Position p lies in epoch e = p div n and holds sample

    order(p) = permutation[seed, e](p mod n)

Step s of a run with global batch G takes positions [s·G, s·G + G). Ranks are not in the formula: the order depends on
(seed, step) only. Within a step the positions are cut into blocks of one microbatch of size m, and

    microbatch j of data-parallel rank r = block j·dp + r = positions s·G + (j·dp + r)·m + [0, m)

so the blocks are the same for any dp; only their assignment to ranks changes.

The permutation is a balanced Feistel network on 2h bits, the least with 4^h >= n, iterated until the result is below n
(at most 4 rounds of it on average): a bijection computed for the positions that are requested, so no array of size n
exists. Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
Cost: about 0.2 ms for 1,024 positions, whatever n.
Shapes: n samples in the dataset, G global batch, m micro batch.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError, DataError

_ROUNDS = 8
_U64 = npt.NDArray[np.uint64]


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key computed from the parts; the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def splitmix64(value: _U64) -> _U64:
    """Return a 64-bit mix of ``value``: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Permutation:
    """Pseudo-random bijection of ``range(size)``, drawn by (seed, epoch).

    Args:
        size: number of samples.
        seed: seed of the order.
        epoch: epoch of the order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        half = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = [np.uint64(key_of("order", seed, epoch, i)) for i in range(_ROUNDS)]

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the images of indices below ``size``."""
        image = self._once(indices.astype(np.uint64))
        while (outside := image >= self.size).any():
            image[outside] = self._once(image[outside])
        return image.astype(np.int64)

    def _once(self, value: _U64) -> _U64:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right + key) & self._mask)
        return (left << self._half) | right


@dataclass(frozen=True)
class Sampler:
    """Map from positions to samples.

    Args:
        size: number of samples in the dataset.
        seed: seed of the order.
        shuffle: False keeps the order of the dataset.

    Raises:
        DataError: if the dataset is empty.
    """

    size: int
    """Number of samples in the dataset."""
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the dataset holds no samples; give data that does")

    def at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions ``[start, stop)``, which may extend over the end of an epoch."""
        positions = np.arange(start, stop, dtype=np.int64)
        samples = positions % self.size
        if not self.shuffle:
            return samples
        epochs = positions // self.size
        for epoch in range(start // self.size, -(-stop // self.size)):
            here = epochs == epoch
            samples[here] = Permutation(self.size, self.seed, epoch)(samples[here])
        return samples

    def indices(self, step: int, global_batch: int) -> list[int]:
        """Return the samples of optimizer step ``step``, in the order that all layouts share."""
        return [int(index) for index in self.at(step * global_batch, (step + 1) * global_batch)]


@dataclass(frozen=True)
class BatchShare:
    """Assignment of a step's positions to the microbatches of one data-parallel rank.

    Args:
        global_batch: samples of one optimizer step over all ranks.
        micro_batch: samples of one microbatch.
        dp_index: data-parallel rank.
        dp_size: number of data-parallel ranks.

    Raises:
        ConfigError: if the global batch is no multiple of micro batch times ``dp_size``.
    """

    global_batch: int
    micro_batch: int
    dp_index: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.dp_size < 1 or not 0 <= self.dp_index < self.dp_size:
            raise ConfigError(
                f"micro batch {self.micro_batch} on data-parallel rank {self.dp_index} of {self.dp_size}: "
                "the first must be at least 1, the second below the third"
            )
        unit = self.micro_batch * self.dp_size
        if self.global_batch < 1 or self.global_batch % unit:
            below = self.global_batch // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            raise ConfigError(
                f"batch.global_size is {self.global_batch}, which is no multiple of micro batch {self.micro_batch} x "
                f"dp {self.dp_size} = {unit}; set it to {near}, or change batch.micro_size"
            )

    @property
    def accumulation(self) -> int:
        """Number of microbatches for each rank and step."""
        return self.global_batch // (self.micro_batch * self.dp_size)

    def blocks(self) -> Iterator[range]:
        """Yield the positions of each of this rank's microbatches, counted from the start of the step."""
        for j in range(self.accumulation):
            start = (j * self.dp_size + self.dp_index) * self.micro_batch
            yield range(start, start + self.micro_batch)

    def owner(self, block: int) -> int:
        """Return the data-parallel rank that takes block ``block`` of a step."""
        return block % self.dp_size
