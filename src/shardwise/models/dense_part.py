"""The dense part of a model with embedding tables, in a file beside the rows: its parameters and buffers.

    dense.safetensors    each tensor whole, under its name in the model, in the dtype in which a step saves it
    entry of the index   {"file", "sha256", "bytes", "about": {"click_model", "target", "step"}}

Full vectors (vectors.py) and increments (increments.py) have such a file each, of the step of their rows. Tensors are
written in the order of their names, so that one step has one file, whoever writes it and on however many ranks.

Cost: the bytes of the weights in the dtype that computes. A writer holds one part of a tensor, a reader all tensors.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import DamagedError, MismatchError
from shardwise.base.regular_files import open_regular
from shardwise.base.strict_json import Count, StrictModel
from shardwise.formats.safetensors import SafetensorsWriter, read_header

_PIECE_BYTES = 1 << 20
_SHOWN = 3
"""Most names that an error lists."""


class DenseToWrite(NamedTuple):
    """The dense part of a model to be written, with a function that yields its elements."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of each tensor, by its name in the model."""
    dtypes: dict[str, torch.dtype]
    """The dtype of each tensor."""
    about: dict[str, Any]
    """What a reader needs to build the model, as JSON values."""
    parts: Callable[[], Iterator[tuple[str, int, Tensor]]]
    """A function that yields parts of the tensors until all are covered: (name, first element, elements)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())


class DensePart(NamedTuple):
    """The parameters and buffers of a model beside its tables, and what says which model it is."""

    tensors: dict[str, Tensor]
    """The tensors by their names in the model."""
    about: dict[str, Any]
    """What a reader needs to build the model, as JSON values."""

    def to_write(self) -> DenseToWrite:
        """Return this part in the form in which it is written."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        return DenseToWrite(
            shapes, dtypes, self.about, lambda: ((name, 0, each) for name, each in self.tensors.items())
        )


class DenseEntry(StrictModel):
    """The entry of the dense part in an index."""

    file: str
    sha256: str = Field(pattern=r"^([0-9a-f]{64})?$")
    """SHA-256 of the file; empty in the list of files of an export that has not ended."""
    bytes: Count = 0
    """Bytes of the tensors; 0 in folders of versions that did not write them."""
    about: dict[str, Any]


def dense_file_stem(tables: Sequence[str]) -> str:
    """Return the name of the file of the dense part without its ending, which is none of the tables' names."""
    name = "dense"
    while name in tables:
        name += "_"
    return name


def write_dense(file: Path, dense: DenseToWrite) -> str:
    """Write the file of a dense part, and return its SHA-256.

    Raises:
        MismatchError: if the parts do not cover a tensor.
    """
    shapes = {name: dense.shapes[name] for name in sorted(dense.shapes)}
    with SafetensorsWriter(file, shapes, dense.dtypes) as writer:
        for name, start, values in dense.parts():
            writer.write_part(name, start, values)
    return sum_of(file)


def read_dense(folder: Path, index: str, entry: DenseEntry) -> DensePart:
    """Read a dense part into memory, after checking the bytes of its file.

    Args:
        folder: The folder of the file.
        index: Name of the index that names the file, for errors.
        entry: The entry of the index.

    Raises:
        FileNotFoundError: if the file does not exist.
        DamagedError: if the file lies outside the folder, or its bytes changed after it was written.
    """
    file = folder / entry.file
    if Path(entry.file).name != entry.file:
        raise DamagedError(f"{folder / index}: the dense part names a file outside the folder")
    if sum_of(file) != entry.sha256:
        raise DamagedError(f"{file}: its bytes do not match their SHA-256 in {index}; export again")
    tensors = {name: each.read(0, each.elements).view(each.shape) for name, each in read_header(file).items()}
    return DensePart(tensors, entry.about)


def sum_of(file: Path) -> str:
    """Return the SHA-256 of a regular file."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def check_same_model(what: str, coming: DensePart, here: DensePart) -> None:
    """Check that a dense part that comes is of the model of the one that is here.

    Args:
        what: The increment that brings the part, for errors.
        coming: The dense part that comes.
        here: The dense part of the reader.

    Raises:
        MismatchError: if a tensor is in one of them alone or has another shape or dtype, or the models differ.
    """
    differ = [
        f"{name!r} is only in the {'increment' if name in coming.tensors else 'reader'}"
        for name in sorted(coming.tensors.keys() ^ here.tensors.keys())
    ]
    for name in sorted(coming.tensors.keys() & here.tensors.keys()):
        new, old = coming.tensors[name], here.tensors[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            differ.append(
                f"{name!r} is {list(new.shape)} in {new.dtype} in the increment and {list(old.shape)} in {old.dtype} "
                "in the reader"
            )
    if not differ and coming.about.get("click_model") != here.about.get("click_model"):
        differ = [
            "the descriptions of the model differ (model:, its numbers of dense features, or its tables)"
        ]
    if differ:
        more = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise MismatchError(
            f"{what}: its dense part is of another model: {'; '.join(differ[:_SHOWN])}{more}",
            "Export the run again, and open it anew",
        )
