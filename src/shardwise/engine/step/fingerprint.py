"""A fingerprint of the batches that a rank computed in its first step.

If two data-parallel ranks compute the same samples, they do the work of one, and neither loss nor gradients show it.
Ranks that share a model must be given the same samples, and if they are not, loss and gradients look plausible too.
Both errors are detected by 48 bits per rank, which are exchanged once, in the reduction that ends the first step
(step.py).
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.base.pytree import tensors_in

_BITS = 48
"""Bits of a fingerprint. The sum of one such number and zeros is exact in fp64."""


class Fingerprint:
    """A hash of batches that are added one after another."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_BITS // 8)
        self._tells = False

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

    @property
    def value(self) -> int:
        """The hash, from 1 to 2^48; 0 if no batch that distinguishes ranks was added."""
        return int.from_bytes(self._hash.digest(), "little") or 1 if self._tells else 0


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
