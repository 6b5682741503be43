"""Ragged: one feature of a batch, with any number of keys per sample.

    values   7 3 | | 9 9 4      keys, int64 [N]
    offsets  0 2 2 5            sample b has values[offsets[b] : offsets[b+1]], int64 [B+1]
    weights  1. .5 | | ...      weights of the keys, fp32 [N], or None

A sample without a key is an empty range; a batch of no samples has offsets [0].
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import DataError


class Ragged(NamedTuple):
    """Keys of one feature for B samples."""

    values: Tensor
    """Keys: int64 [N]."""
    offsets: Tensor
    """Start of each sample's keys, and the end: int64 [B+1]."""
    weights: Tensor | None = None
    """Weight of each key in its sample: fp32 [N]; None: 1 for every key."""

    @property
    def samples(self) -> int:
        """Number of samples, B."""
        return self.offsets.numel() - 1

    def check_form(self, name: str) -> None:
        """Check the types and shapes of the parts without reading any value.

        Args:
            name: Name of the feature, for the error.

        Raises:
            DataError: if a part has the wrong type, dtype or shape.
        """
        values, offsets, weights = self
        if weights is None and _is_keys(values) and _is_keys(offsets) and offsets.numel():
            return  # a batch has dozens of features, and each look at one costs time
        for part, tensor in (("values", values), ("offsets", offsets), ("weights", weights)):
            if not isinstance(tensor, Tensor) and (tensor is not None or part != "weights"):
                raise DataError(
                    f"feature {name!r}: {part} are a {type(tensor).__name__}; expected a tensor. Ragged.of_lists takes "
                    "the keys of each sample as lists"
                )
        if values.dtype != torch.int64 or values.dim() != 1:
            raise DataError(
                f"feature {name!r}: values are {_kind(values)}; expected keys as int64 [N]: values.long().flatten()"
            )
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
            raise DataError(f"feature {name!r}: offsets are {_kind(offsets)}; expected int64 [B+1]")
        if weights is not None and (weights.shape != values.shape or not weights.is_floating_point()):
            raise DataError(
                f"feature {name!r}: weights are {_kind(weights)}; expected one float for each of "
                f"{values.numel()} values"
            )

    def check(self, name: str) -> None:
        """Check that the parts fit together.

        Args:
            name: Name of the feature, for the error.

        Raises:
            DataError: if a part has the wrong form, or the offsets fall or do not cover the values.
        """
        self.check_form(name)
        values, offsets, _ = self
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != values.numel():
            raise DataError(
                f"feature {name!r}: offsets go from {first} to {last}, but there are {values.numel()} values; expected "
                f"them to go from 0 to {values.numel()}"
            )
        falls = offsets[1:] < offsets[:-1]
        if bool(falls.any()):
            sample = int(falls.nonzero()[0])
            raise DataError(
                f"feature {name!r}: sample {sample} begins at {int(offsets[sample])} and ends at "
                f"{int(offsets[sample + 1])}; offsets must not fall"
            )

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]]) -> "Ragged":
        """Build a feature from a list of keys for each sample.

        Raises:
            DataError: if a key is no whole number of 64 bits.
        """
        try:
            lengths = torch.tensor([len(keys) for keys in lists], dtype=torch.int64)
            keys = [key for keys in lists for key in keys]
            values = torch.tensor(keys) if keys else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DataError(
                f"Ragged.of_lists: {error}; expected a list of keys for each sample, each a whole number from -2^63 to "
                "2^63 - 1"
            ) from error
        if values.is_floating_point() or values.is_complex() or values.dim() != 1:
            raise DataError(f"Ragged.of_lists: the keys are {_kind(values)}; expected whole numbers [N]")
        return cls(values.long(), offsets_of(lengths))

    @classmethod
    def of_ones(cls, values: Tensor) -> "Ragged":
        """Build a feature with one key for each sample from ``values`` [B]."""
        return cls(values, torch.arange(values.numel() + 1, device=values.device))

    @classmethod
    def of(cls, jagged: Any) -> "dict[str, Ragged]":
        """Return the features of a jagged tensor with keys, as views without copies.

        An example of such a tensor is TorchRec's ``KeyedJaggedTensor``.

        Args:
            jagged: An object with ``keys()``, ``values()``, ``offsets()`` (feature after feature, sample after sample:
                [F·B+1]) and, optionally, ``weights_or_none()``.

        Returns:
            Features by name.

        Raises:
            DataError: if ``jagged`` is anything else, or its features differ in their number of samples.
        """
        try:
            names, values, offsets = list(jagged.keys()), jagged.values(), jagged.offsets()
            weights = jagged.weights_or_none() if hasattr(jagged, "weights_or_none") else None
        except (AttributeError, TypeError) as error:
            raise DataError(
                f"a {type(jagged).__name__} is no jagged tensor with keys; expected keys(), values() and offsets(), as "
                "TorchRec's KeyedJaggedTensor has them"
            ) from error
        bags = offsets.numel() - 1
        if getattr(jagged, "variable_stride_per_key", bool)() or not names or bags % len(names):
            raise DataError(
                f"a jagged tensor of {len(names)} features with {bags} bags; expected as many samples of each feature"
            )
        samples = bags // len(names)
        offsets, values = offsets.long(), values.long()
        ends = offsets[::samples].tolist() if samples else [0] * (len(names) + 1)
        found = {}
        for place, name in enumerate(names):
            keys = slice(ends[place], ends[place + 1])
            own = offsets[place * samples : (place + 1) * samples + 1] - ends[place]
            found[name] = cls(values[keys], own, None if weights is None else weights[keys])
        return found


def samples_in(batch: Any) -> int | None:
    """Return the number of samples of a batch, which its first feature or tensor with a dimension tells.

    The first tensor of a feature is as long as its keys are many, so a feature is asked itself.

    Args:
        batch: Tensors and features in any nesting of tuples, lists, mappings and dataclasses.

    Returns:
        The number; None if the batch has neither a feature nor a tensor with a dimension.
    """
    if isinstance(batch, Ragged):
        return batch.samples if isinstance(batch.offsets, Tensor) else None
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in fields(batch))
    sizes = (samples_in(part) for part in parts)
    return next((size for size in sizes if size is not None), None)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets [B+1] of ranges with ``lengths`` [B]."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _is_keys(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == torch.int64 and tensor.dim() == 1


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
