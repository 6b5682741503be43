"""Keys of several features joined to the keys of one group: checked, numbered, and put into the order of their bags.

    f0: s0 s1 ...      by feature    f0: s0 s1 ... | f1: s0 s1 ...      + bases of the features' tables
    f1: s0 s1 ...      by sample     s0: f0 f1 ... | s1: f0 f1 ...

By sample, the vectors of all features of a sample are neighbours in memory, [B, F, D], in the order in which
interactions of features read them, and their gradients come in the order in which they are merged.

The loops read the features where they are, by their addresses: no copy is made before that of the numbered keys.

Cost:   one pass over the offsets and one over the keys.
Shapes: F features, B samples, N keys of all features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import array, loop, number_at, runs_compiled

_TOGETHER = 64
"""Samples whose keys are written together, so that the lines that are written stay in the cache in either order."""


_UNFIT, _BAGS, _ONES = 0, 1, 2
"""What the loop says of offsets: they do not fit the keys; bags of any size; one key in every bag."""


class JoinedKeys(NamedTuple):
    """Keys of several features as keys of their group."""

    keys: Tensor
    """Keys of all features: int64 [N]."""
    offsets: Tensor | None
    """Start of each bag in ``keys``, and the end: int64 [F·B + 1]; None if every bag has one key."""
    shortest: Tensor
    """Smallest number of keys of a sample, by feature: int64 [F]; 1 without samples."""
    longest: Tensor
    """Largest number of keys of a sample, by feature: int64 [F]; 1 without samples."""


def joined(
    values: Sequence[Tensor], offsets: Sequence[Tensor], bases: Tensor, limits: Tensor, by_sample: bool
) -> JoinedKeys | None:
    """Return the keys of the group; None if offsets do not fit their keys or a key is not 0 to its limit - 1.

    Args:
        values: keys of each feature, int64 [keys of the feature].
        offsets: start of each sample in the keys of each feature, and the end, int64 [B + 1].
        bases: key of the group at which each feature's table begins, int64 [F].
        limits: number of keys of each feature's table, int64 [F]; below 0 any key is allowed.
        by_sample: True orders the bags sample after sample, False feature after feature.

    Raises:
        ValueError: if dtypes or numbers of elements do not fit: the loops read memory by these numbers.
    """
    samples = _checked(values, offsets, bases, limits)
    if not runs_compiled(bases, limits) or not all(each.is_cpu for of in (values, offsets) for each in of):
        return plain_joined(values, offsets, bases, limits, by_sample)
    # Each look at a tensor costs a tenth of a microsecond, and a batch may have a hundred features.
    keys, ends = [each.contiguous() for each in values], [each.contiguous() for each in offsets]
    key_at, end_at = (np.array([each.data_ptr() for each in of], np.int64) for of in (keys, ends))
    counts = [each.numel() for each in keys]
    sizes, features = np.array(counts, np.int64), len(values)
    shortest, longest = torch.ones(2, features, dtype=torch.int64)
    form = _measured(end_at, sizes, samples, shortest.numpy(), longest.numpy())
    if form == _UNFIT:
        return None
    out = torch.empty(sum(counts), dtype=torch.int64)
    given = (array(bases), array(limits))
    if form == _ONES:
        placed = out.view(samples, features).t() if by_sample else out.view(features, samples)
        fits = _joined_ones(key_at, *given, placed.numpy())
        return JoinedKeys(out, None, shortest, longest) if fits else None
    starts = torch.zeros(features * samples + 1, dtype=torch.int64)
    join = _joined_by_sample if by_sample else _joined_by_feature
    fits = join(key_at, end_at, sizes, samples, *given, out.numpy(), starts.numpy())
    return JoinedKeys(out, starts, shortest, longest) if fits else None


def _checked(values: Sequence[Tensor], offsets: Sequence[Tensor], bases: Tensor, limits: Tensor) -> int:
    """Return the number of samples, or raise ValueError."""
    for name, tensors in (("values", values), ("offsets", offsets), ("bases and limits", (bases, limits))):
        for tensor in tensors:
            if tensor.dtype != torch.int64 or tensor.dim() != 1:
                raise ValueError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}; expected int64 of one dimension"
                )
    sizes = {each.numel() for each in offsets}
    if len(sizes) != 1 or 0 in sizes or {len(offsets), len(bases), len(limits)} != {len(values)}:
        raise ValueError(
            f"{len(values)} features with offsets of {sorted(sizes)} numbers, {len(bases)} bases and {len(limits)} "
            "limits; expected one of each for a feature, and offsets of one length"
        )
    return sizes.pop() - 1


def plain_joined(
    values: Sequence[Tensor], offsets: Sequence[Tensor], bases: Tensor, limits: Tensor, by_sample: bool
) -> JoinedKeys | None:
    """Run ``joined`` in torch operations, on any device."""
    ends = torch.stack(list(offsets))
    lengths = ends.diff()
    sizes = torch.tensor([each.numel() for each in values], device=ends.device)
    features, samples = lengths.shape
    if not bool(((ends[:, 0] == 0) & (ends[:, -1] == sizes) & (lengths >= 0).all(1)).all()):
        return None
    total = sum(each.numel() for each in values)
    feature = torch.arange(features, device=ends.device).repeat_interleave(sizes, output_size=total)
    keys, limit = torch.cat(list(values)), limits[feature]
    if not bool(((limit < 0) | ((keys >= 0) & (keys < limit))).all()):
        return None
    keys = keys + bases[feature]
    ones = torch.ones(features, dtype=torch.int64, device=ends.device)
    shortest = lengths.amin(1) if samples else ones
    longest = lengths.amax(1) if samples else ones
    if by_sample:
        bag = torch.arange(features * samples, device=ends.device).view(samples, features).t().reshape(-1)
        bag = bag.repeat_interleave(lengths.reshape(-1), output_size=total)
        keys, lengths = keys[bag.argsort(stable=True)], lengths.t()
    if bool((shortest == 1).all()) and bool((longest == 1).all()):
        return JoinedKeys(keys, None, shortest, longest)
    starts = ends.new_zeros(features * samples + 1)
    torch.cumsum(lengths.reshape(-1), 0, out=starts[1:])
    return JoinedKeys(keys, starts, shortest, longest)


@loop
def _measured(
    end_at: np.ndarray, sizes: np.ndarray, samples: int, shortest: np.ndarray, longest: np.ndarray
) -> int:
    """Write the smallest and the largest bag of each feature, and return the form of the offsets."""
    form = _ONES
    for feature in range(sizes.size):
        ends = end_at[feature]
        if number_at(ends, 0) != 0 or number_at(ends, samples) != sizes[feature]:
            return _UNFIT
        if samples == 0:
            continue
        least = most = number_at(ends, 1)
        for sample in range(1, samples):
            length = number_at(ends, sample + 1) - number_at(ends, sample)
            least, most = min(least, length), max(most, length)
        if least < 0:
            return _UNFIT
        shortest[feature], longest[feature] = least, most
        if least != 1 or most != 1:
            form = _BAGS
    return form


@loop
def _joined_ones(key_at: np.ndarray, bases: np.ndarray, limits: np.ndarray, out: np.ndarray) -> bool:
    features, samples = out.shape
    fits = True
    for begin in range(0, samples, _TOGETHER):
        end = min(samples, begin + _TOGETHER)
        for feature in range(features):
            keys, base, limit = key_at[feature], bases[feature], limits[feature]
            for sample in range(begin, end):
                key = number_at(keys, sample)
                fits &= (limit < 0) | ((key >= 0) & (key < limit))
                out[feature, sample] = key + base
    return fits


@loop
def _joined_by_feature(
    key_at: np.ndarray,
    end_at: np.ndarray,
    sizes: np.ndarray,
    samples: int,
    bases: np.ndarray,
    limits: np.ndarray,
    out: np.ndarray,
    starts: np.ndarray,
) -> bool:
    fits, before = True, 0
    for feature in range(sizes.size):
        keys, ends, base, limit = key_at[feature], end_at[feature], bases[feature], limits[feature]
        for place in range(sizes[feature]):
            key = number_at(keys, place)
            fits &= (limit < 0) | ((key >= 0) & (key < limit))
            out[before + place] = key + base
        for sample in range(samples):
            starts[feature * samples + sample + 1] = before + number_at(ends, sample + 1)
        before += sizes[feature]
    return fits


@loop
def _joined_by_sample(
    key_at: np.ndarray,
    end_at: np.ndarray,
    sizes: np.ndarray,
    samples: int,
    bases: np.ndarray,
    limits: np.ndarray,
    out: np.ndarray,
    starts: np.ndarray,
) -> bool:
    fits, place, bag = True, 0, 0
    for sample in range(samples):
        for feature in range(sizes.size):
            keys, ends, base, limit = key_at[feature], end_at[feature], bases[feature], limits[feature]
            for i in range(number_at(ends, sample), number_at(ends, sample + 1)):
                key = number_at(keys, i)
                fits &= (limit < 0) | ((key >= 0) & (key < limit))
                out[place] = key + base
                place += 1
            bag += 1
            starts[bag] = place
    return fits
