"""FlatSlice and TensorPieces: the form in which checkpoints receive model state, flat element ranges of whole tensors.

A checkpoint is independent of meshes and stages. However a tensor is cut, each rank names the elements that it holds:

    element e of tensor t  =  t.reshape(-1)[e]          FlatSlice(start, stop) = elements [start, stop)

Saving takes the pieces that a rank writes; loading takes pieces to fill. The caller handles replicas: on saving,
each element comes from exactly one rank; on loading, any rank may request any element.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.formats.safetensors import CODES

MODEL_KINDS = ("weight", "buffer")
"""Kinds that are stored whole under the model's own names; all other kinds are cut on the grid of ``layout``."""


class ElementSource(NamedTuple):
    """Functions that read and write the elements of a flat tensor."""

    read: Callable[[int, int], Tensor]
    """Function that returns elements [start, stop)."""
    write: Callable[[int, Tensor], None]
    """Function that stores new elements from a position on."""


class LazySlice:
    """A range of a flat tensor that is not in memory; ``source`` reads elements, which must be used at once."""

    def __init__(self, source: ElementSource, elements: int, dtype: torch.dtype, start: int = 0):
        self._source, self._elements, self._start = source, elements, start
        self.dtype = dtype
        self.device = torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """Shape, with one dimension."""
        return torch.Size((self._elements,))

    def numel(self) -> int:
        """Return the number of elements."""
        return self._elements

    def dim(self) -> int:
        """Return 1, the number of dimensions."""
        return 1

    def stride(self) -> tuple[int, ...]:
        """Return the stride, (1,)."""
        return (1,)

    def is_contiguous(self) -> bool:
        """Return True, because elements follow one another."""
        return True

    def detach(self) -> "LazySlice":
        """Return self, because there is no autograd graph."""
        return self

    def __getitem__(self, wanted: slice) -> "LazySlice":
        start, stop, _ = wanted.indices(self._elements)
        return LazySlice(self._source, max(stop - start, 0), self.dtype, self._start + start)

    def cpu(self) -> Tensor:
        """Read and return the elements."""
        return self._source.read(self._start, self._start + self._elements).cpu()

    def copy_(self, values: Tensor) -> None:
        """Store ``values`` as the new elements."""
        self._source.write(self._start, values)


Flat = Tensor | LazySlice
"""Tensor or range from which elements are read, or into which they are written."""


class FlatSlice(NamedTuple):
    """Elements ``[start, stop)`` of the flattened global tensor, held in a contiguous 1-D ``tensor``."""

    start: int
    stop: int
    tensor: Flat


class TensorPieces(NamedTuple):
    """One global tensor and this rank's pieces, to be written (save) or filled in place (load)."""

    kind: str
    """``weight``, ``buffer``, or a kind of optimizer state: ``master``, ``exp_avg``, ..."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[FlatSlice]


class TensorSpec(NamedTuple):
    """Properties of a tensor from which every rank computes the position of its bytes."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def specs_of(items: Iterable[TensorPieces]) -> list[TensorSpec]:
    """Return the specs of ``items`` in canonical order.

    Raises:
        CheckpointError: if the format cannot hold a name, or a tensor is given twice.
    """
    seen: dict[tuple[str, str], TensorSpec] = {}
    for item in items:
        spec = TensorSpec(item.kind, item.name, tuple(item.shape), item.dtype)
        check_spec(spec)
        if (spec.kind, spec.name) in seen:
            raise CheckpointError(
                f"{spec.kind} {spec.name!r} is given twice; merge its pieces into one TensorPieces"
            )
        seen[spec.kind, spec.name] = spec
    return [seen[key] for key in sorted(seen)]


def check_spec(spec: TensorSpec) -> None:
    """Check that a tensor can be read back.

    Raises:
        CheckpointError: if the kind, the name or the dtype cannot be stored.
    """
    if not (spec.kind.isascii() and spec.kind.isidentifier() and spec.kind == spec.kind.lower()):
        raise CheckpointError(
            f"kind {spec.kind!r} of {spec.name!r}: a kind becomes part of a file name and is a lower-case "
            "identifier, such as 'exp_avg'"
        )
    if not spec.name or not spec.name.isprintable() or spec.name == "__metadata__":
        raise CheckpointError(f"{spec.kind} name {spec.name!r}: expected a printable name")
    if spec.dtype not in CODES:
        raise CheckpointError(
            f"{spec.kind} {spec.name!r} has dtype {spec.dtype}, which safetensors cannot hold; "
            f"it holds {', '.join(str(dtype) for dtype in CODES)}"
        )


def check_pieces(items: Sequence[TensorPieces]) -> None:
    """Check that the shape, range and dtype of every piece agree with its tensor.

    Raises:
        CheckpointError: if not.
    """
    for item in items:
        elements = prod(item.shape)
        for start, stop, tensor in item.pieces:
            where = f"{item.kind} {item.name!r}, piece {start}..{stop}"
            if not 0 <= start <= stop <= elements:
                raise CheckpointError(f"{where}: the tensor of shape {item.shape} has elements 0..{elements}")
            if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != stop - start:
                raise CheckpointError(
                    f"{where}: expected a contiguous 1-D tensor of {stop - start} elements, "
                    f"given shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            if tensor.dtype != item.dtype:
                raise CheckpointError(f"{where}: the item says {item.dtype}, its tensor is {tensor.dtype}")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D CPU tensor without a copy; writable."""
    return tensor.detach().view(torch.uint8).numpy().data
