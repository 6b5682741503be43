"""The features of a batch that one group of tables serves, joined: feature after feature, sample after sample.

    keys      [ f0: s0 s1 ... | f1: s0 s1 ... ]      of the group, or of their own dynamic tables
    offsets   one bag for each feature and sample, F·B in all

    or [ s0: f0 f1 ... | s1: f0 f1 ... ], if no owner and no index needs a feature's keys side by side; and without
    offsets if each bag has one key

Means are sums with weights 1/n, so that features that are added and averaged go through one kernel together.

Shapes: F features of the group, B samples, N keys of all features.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import DataError
from shardwise.base.policy import nearest
from shardwise.base.ragged import Ragged
from shardwise.kernels.tables.joined import JoinedKeys, joined
from shardwise.parallel.embedding.group import GroupFeature, TableGroup


class FusedKeys(NamedTuple):
    """The keys of one group in one batch."""

    keys: Tensor
    """Keys of all features: int64 [N]."""
    offsets: Tensor | None
    """Start of each bag in ``keys``, and the end: int64 [F·B + 1]; None if every bag has one key."""
    weights: Tensor | None
    """Weight of each key: [N]; None if all are 1."""
    starts: list[int]
    """Start of each feature's keys, and the end: [F + 1]."""
    samples: int
    by_sample: bool = False
    """True if bags stand sample after sample, so that their vectors are [B, F, D] in memory: if the group allows this
    order for keys, or allows it for vectors and every sample has one key of each feature. ``starts`` then only has
    the numbers of keys.
    """
    keys_by_sample: bool = False
    """True if the keys stand sample after sample too; else the index of each key among the distinct ones is permuted
    into that order.
    """


def batch_size(features: Mapping[str, Ragged]) -> int:
    """Return the number of samples of a batch.

    Raises:
        DataError: if ``features`` is no mapping of Ragged, or if features differ in the number of samples.
    """
    if not isinstance(features, Mapping):
        hint = (
            "shardwise.Ragged.of makes it of a jagged tensor"
            if hasattr(features, "offsets")
            else "{name: Ragged}"
        )
        raise DataError(
            f"batch: the features are a {type(features).__name__}; expected a mapping from names to Ragged: {hint}"
        )
    for name, ragged in features.items():
        if not isinstance(ragged, Ragged):
            hint = "; Ragged.of_ones(keys) is one key for each sample" if isinstance(ragged, Tensor) else ""
            raise DataError(
                f"batch: feature {name!r} is a {type(ragged).__name__}; expected Ragged(values, offsets, weights or "
                f"None){hint}"
            )
        ragged.check_form(name)
    counts = {ragged.offsets.numel() - 1 for ragged in features.values()}
    if len(counts) > 1:
        sizes = {name: ragged.samples for name, ragged in features.items()}
        few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        raise DataError(
            f"batch: feature {few!r} has {sizes[few]} samples and {many!r} {sizes[many]}; expected the same number: a "
            "sample without keys is an empty stretch of its offsets"
        )
    return counts.pop() if counts else 0


def fuse(group: TableGroup, features: Mapping[str, Ragged], dtype: torch.dtype) -> FusedKeys:
    """Join the features of ``group``.

    Args:
        group: the group of tables.
        features: keys of the batch, by feature name.
        dtype: dtype of the weights.

    Raises:
        DataError: if a feature is missing or does not fit, or if a key lies outside its table.
    """
    given = _features_of(group, features)
    samples = given[0].samples
    is_weighted = any(ragged.weights is not None for ragged in given)
    in_order = group.keys_may_go_by_sample and not is_weighted
    found = _joined(group, given, in_order)
    if found is None:
        given = [
            _mended(group, feature, ragged) for feature, ragged in zip(group.features, given, strict=True)
        ]
        found = _joined(group, given, in_order)
        assert found is not None, "offsets are checked, and keys lie inside their tables"
    starts = [0]
    for ragged in given:
        starts.append(starts[-1] + ragged.values.numel())
    _check_concat(group, found)
    keys, offsets = found.keys, found.offsets
    if is_weighted:
        weights: Tensor | None = _weights(group, given, dtype)
    else:
        weights = _shares(group, found, in_order, samples, dtype)
    if in_order:
        return FusedKeys(keys, offsets, weights, starts, samples, True, True)
    if offsets is None:
        if group.may_go_by_sample:
            if group.keys_may_go_by_sample:
                keys = by_sample(keys, samples)
            weights = None if weights is None else by_sample(weights, samples)
            return FusedKeys(keys, None, weights, starts, samples, True, group.keys_may_go_by_sample)
        offsets = torch.arange(keys.numel() + 1, device=keys.device)
    return FusedKeys(keys, offsets, weights, starts, samples)


def _joined(group: TableGroup, given: Sequence[Ragged], in_order: bool) -> JoinedKeys | None:
    """Return the keys of the group, by sample if ``in_order``; None if a feature does not fit."""
    device = given[0].values.device
    return joined(
        [ragged.values for ragged in given],
        [ragged.offsets for ragged in given],
        group.feature_bases.to(device),
        group.feature_rows.to(device),
        in_order,
    )


def _features_of(group: TableGroup, features: Mapping[str, Ragged]) -> list[Ragged]:
    """Return the keys of the group's features, in the order of the group.

    Raises:
        DataError: if a feature is missing, or has weights that its pooling does not use.
    """
    given = []
    for feature in group.features:
        if feature.name not in features:
            table = group.tables[feature.table].name
            raise DataError(
                f"batch: feature {feature.name!r} of table {table!r} is missing{nearest(feature.name, features)}"
            )
        ragged = features[feature.name]
        if ragged.weights is not None and feature.pooling not in ("sum", "mean"):
            raise DataError(
                f"feature {feature.name!r}: keys have weights, and pooling {feature.pooling} has no use for them; "
                "leave them out, or pool by sum or mean"
            )
        given.append(ragged)
    return given


def by_sample(places: Tensor, samples: int) -> Tensor:
    """Permute values from feature after feature to sample after sample: [F·B] -> [B·F]."""
    return places.view(-1, samples).t().reshape(-1) if samples else places


def _mended(group: TableGroup, feature: GroupFeature, ragged: Ragged) -> Ragged:
    """Return a feature with all keys inside their table, or raise DataError."""
    ragged.check(feature.name)
    rows = group.tables[feature.table].rows
    if rows is None:
        return ragged
    outside = (ragged.values < 0) | (ragged.values >= rows)
    if not bool(outside.any()):
        return ragged
    keys = ragged.values.clone()
    _mend(group, feature.name, feature.table, keys, outside)
    return ragged._replace(values=keys)


def _mend(group: TableGroup, feature: str, table: int, keys: Tensor, outside: Tensor) -> None:
    """Bring keys into the range of their table, in place, or raise DataError."""
    policy = group.tables[table]
    assert policy.rows is not None, "a dynamic table has no outside"
    if policy.out_of_range == "clamp":
        keys.clamp_(0, policy.rows - 1)
    elif policy.out_of_range == "modulo":
        keys.remainder_(policy.rows)
    else:
        place = int(outside.nonzero()[0])
        raise DataError(
            f"feature {feature!r}: key {int(keys[place])} at {place} lies outside table {policy.name!r}, whose keys "
            f"are 0 to {policy.rows - 1}; {int(outside.sum())} of {keys.numel()} keys do. Give the table more rows, or "
            "set its out_of_range: clamp or modulo, or make it dynamic"
        )


def _weights(group: TableGroup, given: Sequence[Ragged], dtype: torch.dtype) -> Tensor:
    """Return the weight of each key in its bag, by feature, with means divided by the sum of weights."""
    lengths = torch.stack([ragged.offsets for ragged in given]).diff()
    total = sum(ragged.values.numel() for ragged in given)
    flat = lengths.view(-1)
    bag = torch.arange(flat.numel(), device=flat.device).repeat_interleave(flat, output_size=total)
    own = torch.cat(
        [
            ragged.values.new_ones(ragged.values.shape, dtype=dtype)
            if ragged.weights is None
            else ragged.weights.to(dtype)
            for ragged in given
        ]
    )
    sums = torch.zeros(flat.numel(), dtype=dtype, device=flat.device).index_add_(0, bag, own)
    means = group.features_of_means.to(flat.device).repeat_interleave(lengths.shape[1])
    divisors = torch.where(means & (sums != 0), sums, torch.ones_like(sums))
    return own / divisors[bag]


def _shares(
    group: TableGroup, found: JoinedKeys, in_order: bool, samples: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the share of each key in its bag, 1/n in a mean of n keys and 1 in a sum; None if all are 1."""
    is_mean = group.features_of_means.to(found.longest.device)
    if found.offsets is None or not bool((found.longest[is_mean] > 1).any()):
        return None
    lengths = found.offsets.diff()
    means = is_mean.repeat(samples) if in_order else is_mean.repeat_interleave(samples)
    divisors = torch.where(means, lengths, 1).to(dtype)
    divisors = divisors.repeat_interleave(lengths, output_size=found.keys.numel())
    return torch.ones_like(divisors) / divisors


def _check_concat(group: TableGroup, found: JoinedKeys) -> None:
    """Raise DataError if a feature with pooling concat has different numbers of keys in its samples."""
    for place, feature in enumerate(group.features):
        if feature.pooling == "concat":
            least, most = int(found.shortest[place]), int(found.longest[place])
            if least != most:
                raise DataError(
                    f"feature {feature.name!r}: pooling concat needs the same number of keys in every sample, here "
                    f"{least} to {most}; pad them, or use sum, mean, max or none"
                )
