"""The position of every byte: a pure function of the tensors' names, shapes and dtypes.

    step_00001234/
      model/model.safetensors                  whole tensors under the model's own names; or, above ``file_bytes``,
      model/model-00001-of-00003.safetensors   several files and model.safetensors.index.json
      state/master.safetensors                 "master/<name>/<r0>-<r1>": rows r0..r1 of dim 0, cut on a grid
      state/exp_avg.safetensors                of at most ``piece_elements`` elements
      trainer.json, manifest.json

A safetensors file is 8 bytes of header length, a JSON header with the byte range of each tensor, then the bytes. So
each rank computes every header and offset by itself, and a rank that holds elements [a, b) of a tensor writes them at
``slot.offset + (a - slot.start) * itemsize``: there is no all-to-all before a save, no rank ever holds a whole tensor,
and no file depends on how the job was cut. Tensors are ordered by falling itemsize and then by name, which keeps every
element aligned; the header is padded with spaces so that data starts on a page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.piece import MODEL_KINDS, TensorSpec
from shardwise.formats.safetensors import encoded_header

PAGE_BYTES = 4096


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes at which files, tensors and blocks are cut. They are fixed in format version 1; tests use tiny values."""

    file_bytes: int = 5_000_000_000
    """Largest size of a file with several tensors; one larger tensor has a file of its own."""
    piece_elements: int = 2**28
    """Grid of state tensors: as many whole rows as fit, at least one."""
    block_bytes: int = 2**24
    """Bytes covered by one CRC-32; a multiple of 16, so that no element lies in two blocks."""


class FileSlot(NamedTuple):
    """Elements ``[start, stop)`` of one tensor, stored at ``offset`` of a file under the name ``key``."""

    spec: TensorSpec
    start: int
    stop: int
    key: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Offset of the byte after the last element."""
        return self.offset + (self.stop - self.start) * self.spec.dtype.itemsize


class FileLayout(NamedTuple):
    """One safetensors file: its header and the positions of the tensors behind it."""

    path: str
    header: bytes
    slots: tuple[FileSlot, ...]
    bytes: int


def arrange(
    specs: Iterable[TensorSpec], sizes: LayoutSizes, aliases: Mapping[str, Sequence[str]]
) -> list[FileLayout]:
    """Return the layout of every safetensors file of a step.

    Args:
        specs: All tensors of the step.
        sizes: Sizes at which files and tensors are cut.
        aliases: Other names of tied tensors, which the headers note.

    Raises:
        CheckpointError: if a weight and a buffer have the same name.
    """
    groups: dict[str, list[FileSlot]] = {}
    for spec in specs:
        group = "model/model" if spec.kind in MODEL_KINDS else f"state/{spec.kind}"
        groups.setdefault(group, []).extend(_cut(spec, sizes.piece_elements))
    layouts: list[FileLayout] = []
    for group in sorted(groups):
        slots = sorted(
            groups[group], key=lambda slot: (-slot.spec.dtype.itemsize, slot.spec.name, slot.start)
        )
        keys: set[str] = set()
        for slot in slots:
            if slot.key in keys:
                raise CheckpointError(f"{slot.key!r} is the name of both a weight and a buffer; rename one")
            keys.add(slot.key)
        layouts += _files(group, slots, sizes.file_bytes, aliases)
    return layouts


def _cut(spec: TensorSpec, piece_elements: int) -> list[FileSlot]:
    """Return the slots of one tensor, offsets unset: one slot for a tensor of the model, else rows of the grid."""
    if spec.kind in MODEL_KINDS:
        return [FileSlot(spec, 0, spec.elements, spec.name, spec.shape, 0)]
    rows = spec.shape[0] if spec.shape else 1
    row_shape = spec.shape[1:]
    row_elements = prod(row_shape)
    step = max(1, piece_elements // max(1, row_elements))
    slots = []
    for first in range(0, max(1, rows), step):
        last = min(first + step, rows)
        shape = (last - first, *row_shape) if spec.shape else ()
        key = f"{spec.kind}/{spec.name}/{first}-{last}"
        slots.append(FileSlot(spec, first * row_elements, last * row_elements, key, shape, 0))
    return slots


def _files(
    group: str, slots: list[FileSlot], file_bytes: int, aliases: Mapping[str, Sequence[str]]
) -> list[FileLayout]:
    """Return files that are filled in order up to ``file_bytes``."""
    fills: list[list[FileSlot]] = [[]]
    filled = 0
    for slot in slots:
        if fills[-1] and filled + slot.end - slot.offset > file_bytes:
            fills.append([])
            filled = 0
        fills[-1].append(slot)
        filled += slot.end - slot.offset
    count = len(fills)
    names = [f"{group}-{i + 1:05d}-of-{count:05d}" for i in range(count)] if count > 1 else [group]
    return [_file(f"{name}.safetensors", fill, aliases) for name, fill in zip(names, fills, strict=True)]


def _file(path: str, slots: list[FileSlot], aliases: Mapping[str, Sequence[str]]) -> FileLayout:
    """Return the layout of one file: its header and the slots at their offsets."""
    # An alias maps to the name that holds the tensor, as safetensors.torch.save_model writes it.
    notes = {
        alias: slot.key
        for slot in slots
        if slot.spec.kind in MODEL_KINDS
        for alias in aliases.get(slot.key, ())
    }
    header, _ = encoded_header(((slot.key, slot.spec.dtype, slot.shape) for slot in slots), notes, PAGE_BYTES)
    placed = []
    offset = len(header)
    for slot in slots:
        placed.append(slot._replace(offset=offset))
        offset = placed[-1].end
    return FileLayout(path, header, tuple(placed), offset)


def index_text(layouts: Sequence[FileLayout]) -> bytes | None:
    """Return ``model.safetensors.index.json`` if the model has more than one file, else None."""
    files = [layout for layout in layouts if layout.path.startswith("model/")]
    if len(files) < 2:
        return None
    weights = {slot.key: layout.path.partition("/")[2] for layout in files for slot in layout.slots}
    total = sum(slot.end - slot.offset for layout in files for slot in layout.slots)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
