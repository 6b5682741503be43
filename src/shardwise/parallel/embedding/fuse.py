"""The features of a batch that one group of tables serves, joined: feature after feature, sample after sample.

    keys      [ f0: s0 s1 ... | f1: s0 s1 ... ]      of the group, or of their own dynamic tables
    offsets   one bag for each feature and sample, F·B in all

    or, if each bag has one key: [ s0: f0 f1 ... | s1: f0 f1 ... ], and no offsets

Means are sums with weights 1/n, so that features that are added and averaged go through one kernel together.

Shapes: F features of the group, B samples, N keys of all features.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import DataError
from shardwise.base.policy import nearest
from shardwise.base.ragged import Ragged
from shardwise.kernels.tables.one_each import one_each
from shardwise.parallel.embedding.group import TableGroup


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
    order and every sample has one key of each feature. ``starts`` then does not describe bags.
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
    sizes = {name: ragged.samples for name, ragged in features.items()}
    if len(set(sizes.values())) > 1:
        few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        raise DataError(
            f"batch: feature {few!r} has {sizes[few]} samples and {many!r} {sizes[many]}; expected the same number: a "
            "sample without keys is an empty stretch of its offsets"
        )
    return next(iter(sizes.values()), 0)


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
    if group.may_go_by_sample and all(
        ragged.weights is None and ragged.values.shape == (samples,) for ragged in given
    ):
        keys = one_each(
            torch.stack([ragged.values for ragged in given]),
            torch.stack([ragged.offsets for ragged in given]),
            group.feature_bases.to(given[0].values.device),
            group.feature_rows.to(given[0].values.device),
            group.keys_may_go_by_sample,
        )
        if keys is not None:
            places = [place * samples for place in range(len(given) + 1)]
            return FusedKeys(keys, None, None, places, samples, True, group.keys_may_go_by_sample)
    starts = [0]
    for ragged in given:
        starts.append(starts[-1] + ragged.values.numel())
    offsets = torch.stack([ragged.offsets for ragged in given])
    lengths = offsets.diff()
    ends = torch.tensor([starts[1:], starts[:-1]], device=offsets.device)
    sizes = ends[0] - ends[1]
    fits = (offsets[:, 0] == 0) & (offsets[:, -1] == sizes) & (lengths >= 0).all(1)
    if not bool(fits.all()):
        for feature, ragged in zip(group.features, given, strict=True):
            ragged.check(feature.name)
    keys = torch.cat([ragged.values for ragged in given])
    if not group.is_dynamic:
        keys = _numbered(group, keys, sizes, starts)
    joined = torch.zeros(len(given) * samples + 1, dtype=torch.int64, device=keys.device)
    torch.add(offsets[:, 1:], ends[1][:, None], out=joined[1:].view(len(given), samples))
    weights = _weights(group, given, lengths, dtype)
    _check_concat(group, lengths)
    if group.may_go_by_sample and keys.numel() == lengths.numel() and bool((lengths == 1).all()):
        if group.keys_may_go_by_sample:
            keys = by_sample(keys, samples)
        if weights is not None:
            weights = by_sample(weights, samples)
        return FusedKeys(keys, None, weights, starts, samples, True, group.keys_may_go_by_sample)
    return FusedKeys(keys, joined, weights, starts, samples)


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


def _numbered(group: TableGroup, keys: Tensor, sizes: Tensor, starts: list[int]) -> Tensor:
    """Convert keys of the tables to keys of the group, in place: ``keys`` is a copy already."""
    tables = [feature.table for feature in group.features]
    rows = torch.tensor([group.tables[table].rows for table in tables], device=keys.device)
    bases = torch.tensor([group.bases[table] for table in tables], device=keys.device)
    if starts[-1] and all(start == starts[1] * place for place, start in enumerate(starts)):
        block = keys.view(len(tables), -1)  # every feature has the same number of keys
        low, high = block.aminmax(dim=1)
        if bool(((low >= 0) & (high < rows)).all()):
            block += bases[:, None]
            return keys
    limits = rows.repeat_interleave(sizes, output_size=keys.numel())
    outside = (keys < 0) | (keys >= limits)
    if bool(outside.any()):
        for place, feature in enumerate(group.features):
            stretch = slice(starts[place], starts[place + 1])
            if bool(outside[stretch].any()):
                _mend(group, feature.name, feature.table, keys[stretch], outside[stretch])
    return keys.add_(bases.repeat_interleave(sizes, output_size=keys.numel()))


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


def _weights(group: TableGroup, given: list[Ragged], lengths: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the weight of each key in its bag, with means divided by the number or by the sum of weights.

    None if all weights are 1.
    """
    weighted = any(ragged.weights is not None for ragged in given)
    is_mean = torch.tensor([feature.pooling == "mean" for feature in group.features], device=lengths.device)
    if not weighted and not bool((lengths[is_mean] > 1).any()):
        return None
    total = sum(ragged.values.numel() for ragged in given)
    flat = lengths.view(-1)
    bag = torch.arange(flat.numel(), device=flat.device).repeat_interleave(flat, output_size=total)
    if weighted:
        own = torch.cat(
            [
                ragged.values.new_ones(ragged.values.shape, dtype=dtype)
                if ragged.weights is None
                else ragged.weights.to(dtype)
                for ragged in given
            ]
        )
        sums = torch.zeros(flat.numel(), dtype=dtype, device=flat.device).index_add_(0, bag, own)
    else:
        own = torch.ones(total, dtype=dtype, device=flat.device)
        sums = flat.to(dtype)
    means = is_mean.repeat_interleave(lengths.shape[1])
    divisors = torch.where(means & (sums != 0), sums, torch.ones_like(sums))
    return own / divisors[bag]


def _check_concat(group: TableGroup, lengths: Tensor) -> None:
    """Raise DataError if a feature with pooling concat has different numbers of keys in its samples."""
    for place, feature in enumerate(group.features):
        if feature.pooling == "concat" and lengths.shape[1]:
            least, most = int(lengths[place].min()), int(lengths[place].max())
            if least != most:
                raise DataError(
                    f"feature {feature.name!r}: pooling concat needs the same number of keys in every sample, here "
                    f"{least} to {most}; pad them, or use sum, mean, max or none"
                )
