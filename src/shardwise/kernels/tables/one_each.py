"""Features that have one key in every sample, joined: checked, numbered and put sample after sample in one pass.

    values [F, B]   f0: s0 s1 ...       ->   s0: f0 f1 ... | s1: f0 f1 ...        + bases of the features' tables
                    f1: s0 s1 ...

So the vectors of all features of a sample are neighbours in memory, [B, F, D], in the order in which interactions of
features read them. Most click models have such features, so they get a separate form: no bags, no lengths.

Shapes: F features, B samples.
"""

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.tables.compiled import array, loop, runs_compiled


def one_each(
    values: Tensor, offsets: Tensor, bases: Tensor, limits: Tensor, by_sample: bool = True
) -> Tensor | None:
    """Return the keys of the group, or None if a sample has not one key, or if a key is not 0 to its limit - 1.

    Args:
        values: keys by feature, int64 [F, B].
        offsets: offsets by feature, int64 [F, B + 1].
        bases: key of the group at which each feature's table begins, int64 [F].
        limits: number of keys of each feature's table, int64 [F]; below 0 any key is allowed.
        by_sample: True orders the keys sample after sample, False feature after feature.

    Returns:
        int64 [F·B].
    """
    if not runs_compiled(values, offsets, bases, limits):
        return plain_one_each(values, offsets, bases, limits, by_sample)
    features, samples = values.shape
    out = torch.empty(features * samples, dtype=torch.int64)
    placed = out.view(samples, features).t() if by_sample else out.view(features, samples)
    fits = _one_each(array(values), array(offsets), array(bases), array(limits), placed.numpy())
    return out if fits else None


def plain_one_each(
    values: Tensor, offsets: Tensor, bases: Tensor, limits: Tensor, by_sample: bool = True
) -> Tensor | None:
    """Run ``one_each`` in torch operations, on any device."""
    inside = (limits[:, None] < 0) | ((values >= 0) & (values < limits[:, None]))
    if not bool(inside.all()) or not bool((offsets == torch.arange(offsets.shape[1]).to(offsets)).all()):
        return None
    numbered = values + bases[:, None]
    return (numbered.t() if by_sample else numbered).reshape(-1)


@loop
def _one_each(
    values: np.ndarray, offsets: np.ndarray, bases: np.ndarray, limits: np.ndarray, out: np.ndarray
) -> bool:
    features, samples = values.shape
    fits = True
    for feature in range(features):
        for sample in range(samples + 1):
            fits &= offsets[feature, sample] == sample
    if not fits:
        return False
    # A few samples at a time, so that the lines that are written stay in the cache in either order.
    for begin in range(0, samples, 64):
        end = min(samples, begin + 64)
        for feature in range(features):
            base, limit = bases[feature], limits[feature]
            for sample in range(begin, end):
                key = values[feature, sample]
                fits &= (limit < 0) | ((key >= 0) & (key < limit))
                out[feature, sample] = key + base
    return fits
