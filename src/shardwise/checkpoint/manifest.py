"""The manifest: the contents of a step, and the checksums of its bytes.

    {"format":1, "run":..., "generation":..., "writer":..., "step":1234, "block_bytes":16777216,
     "files":   {"model/model.safetensors": {"bytes":..., "crc32":"<8 hex digits per block>"}, ...},
     "tensors": [{"kind","name","shape","dtype","pieces":[{"file","offset","start","stop","crc32"}, ...]}, ...],
     "aliases": {"embed.weight": ["head.weight"]},
     "versions": {"shardwise": "0.1.0", "torch": "2.13.0", "python": "3.13.1"},
     "base":    null, or {"step", "sha256", "kinds"} of the full step before a step that holds only changes,
     "sha256":  "<of every byte before this field>"}

One CRC-32 per block lets a reader check what it reads without reading the rest; one per piece names the tensor that a
damaged block belongs to. The SHA-256 covers the sums, so that a flipped bit in them is found too. None of this is
a signature: it finds accidents, not forgery. The protection against forgery is that no content is ever executed: JSON
with a fixed schema, bounded in size and in nodes before it is parsed, duplicate keys and NaN refused, file names plain.
Unknown keys are ignored, an unknown format is refused.
"""

import hashlib
import json
import platform
import re
from functools import cached_property
from math import prod
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from shardwise import __version__
from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.strict_json import Count, StrictModel, read_object, validated
from shardwise.base.words import plain_name
from shardwise.checkpoint.piece import TensorSpec, check_spec
from shardwise.formats.safetensors import DTYPES

FORMAT = 1
NAME = "manifest.json"
TRAINER = "trainer.json"
_TAIL = re.compile(rb',\n"sha256":"([0-9a-f]{64})"\}\n', re.ASCII)
_TAIL_BYTES = len(b',\n"sha256":""}\n') + 64
_PATH = re.compile(r"(?:(?:model|state)/)?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", re.ASCII)

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


def is_plain_path(path: str) -> bool:
    """Return whether ``path`` may name a file of a step: one plain name, or one in ``model/`` or ``state/``."""
    return _PATH.fullmatch(path) is not None and path != NAME


def versions() -> dict[str, str]:
    """Return the versions of the programs that write a step; for people."""
    return {"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()}


def write_json(value: dict[str, Any], where: str) -> bytes:
    """Return ``value`` as JSON that ``read_object`` accepts.

    The check runs when a step is saved, so that a value does not fail when the run is resumed.

    Args:
        value: Value to write.
        where: Name of the file, for errors.

    Raises:
        CheckpointError: if ``value`` cannot be written or read back.
    """
    try:
        data = json.dumps(value, allow_nan=False, indent=1).encode() + b"\n"
        read_object(data, where)
    except (TypeError, ValueError, DamagedError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: cannot be written as JSON ({error}); keep to finite numbers, text, lists and dictionaries "
            "with text keys"
        ) from None
    return data


# -------------------------------------------------------------------------------------------------- schema


class StoredPiece(StrictModel):
    """Elements ``[start, stop)`` of a tensor, stored at ``offset`` of ``file``."""

    file: str
    offset: Count
    start: Count
    stop: Count
    crc32: Hash


class ManifestTensor(StrictModel):
    """One tensor and the pieces that make up the whole, in order."""

    kind: str
    name: str
    shape: Annotated[list[Count], Field(max_length=64)]
    dtype: str
    pieces: Annotated[list[StoredPiece], Field(min_length=1)]

    @property
    def spec(self) -> TensorSpec:
        """Spec of the tensor."""
        return TensorSpec(self.kind, self.name, tuple(self.shape), DTYPES[self.dtype])

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch dtype of the elements."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @model_validator(mode="after")
    def _is_whole(self) -> "ManifestTensor":
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        try:
            check_spec(self.spec)
        except CheckpointError as error:
            raise ValueError(str(error)) from None
        position = 0
        for piece in self.pieces:
            if piece.start != position or piece.stop < piece.start:
                raise ValueError(
                    f"piece {piece.start}..{piece.stop} of {self.name!r} does not follow {position}"
                )
            if piece.offset % DTYPES[self.dtype].itemsize:
                raise ValueError(f"piece {piece.start}..{piece.stop} of {self.name!r} is not aligned")
            position = piece.stop
        if position != prod(self.shape):
            raise ValueError(f"{self.name!r} of shape {self.shape} is stored up to element {position}")
        return self


class StoredFile(StrictModel):
    """One file: its size and the CRC-32 of each block, eight hex digits each."""

    bytes: Count
    crc32: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]

    def block_crc(self, block: int) -> int:
        """Return the CRC-32 of one block."""
        return int(self.crc32[8 * block : 8 * block + 8], 16)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.crc32) // 8


class BaseStep(StrictModel):
    """The full step that a step continues: of some kinds of tensors the step holds only what changed since."""

    step: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 in the manifest of the full step."""
    kinds: Annotated[list[str], Field(max_length=100)]
    """Kinds of tensors that are read from both steps."""


class Manifest(StrictModel):
    """The contents of ``manifest.json``."""

    format: int
    run: Annotated[str, Field(max_length=200)]
    """Name of the run that wrote the step."""
    generation: Count
    """Number of earlier writers of this folder: a later life of a run counts one more, whatever its step."""
    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    """Random number that distinguishes two writers of the same generation."""
    step: Count
    block_bytes: Annotated[int, Field(ge=64, le=2**26)]
    files: dict[str, StoredFile]
    tensors: list[ManifestTensor]
    aliases: dict[str, list[str]]
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=20)] = {}
    """Versions of the programs that wrote the step, by name; empty in steps written before this key existed."""
    base: BaseStep | None = None
    """The full step that this one continues; None if the step is whole by itself."""
    sha256: str = ""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Manifest":
        if not self.run.isprintable():
            raise ValueError("the run's name is not printable")
        if self.block_bytes % 16:
            raise ValueError(f"block_bytes {self.block_bytes} is no multiple of 16")
        if TRAINER not in self.files:
            raise ValueError(f"{TRAINER} is not among the files")
        for path, file in self.files.items():
            if not is_plain_path(path):
                raise ValueError(f"{path!r} is not a plain relative name")
            if file.blocks != -(-file.bytes // self.block_bytes):
                raise ValueError(f"{path}: {file.blocks} sums for {file.bytes} bytes")
        if len({path.lower() for path in self.files}) != len(self.files):
            raise ValueError("two file names differ in case alone")
        self._check_tensors()
        return self

    def _check_tensors(self) -> None:
        seen: set[tuple[str, str]] = set()
        ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in self.tensors:
            if (tensor.kind, tensor.name) in seen:
                raise ValueError(f"{tensor.kind} {tensor.name!r} stands twice")
            seen.add((tensor.kind, tensor.name))
            for piece in tensor.pieces:
                end = piece.offset + (piece.stop - piece.start) * tensor.torch_dtype.itemsize
                if piece.file not in self.files or end > self.files[piece.file].bytes:
                    raise ValueError(f"{tensor.name!r} lies outside the file {piece.file!r}")
                ranges.setdefault(piece.file, []).append((piece.offset, end))
        for path, taken in ranges.items():
            taken.sort()
            if any(first[1] > second[0] for first, second in zip(taken, taken[1:], strict=False)):
                raise ValueError(f"two tensors overlap in {path}")

    def find(self, kind: str, name: str) -> ManifestTensor | None:
        """Return a tensor by any of its names, with or without the prefix that ``torch.compile`` adds."""
        return self._by_name.get((kind, name)) or self._by_name.get((kind, plain_name(name)))

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor called ``name``."""
        return self._ties.get(name, (name,))

    @cached_property
    def _ties(self) -> dict[str, tuple[str, ...]]:
        groups = [(name, *others) for name, others in self.aliases.items()]
        return {name: group for group in groups for name in group}

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], ManifestTensor]:
        index = {}
        for tensor in self.tensors:
            for alias in self.aliases.get(tensor.name, ()):
                index[tensor.kind, alias] = tensor
        index.update({(tensor.kind, plain_name(tensor.name)): tensor for tensor in self.tensors})
        index.update({(tensor.kind, tensor.name): tensor for tensor in self.tensors})
        return index

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of all tensors, by kind."""
        totals: dict[str, int] = {}
        for tensor in self.tensors:
            totals[tensor.kind] = totals.get(tensor.kind, 0) + tensor.bytes
        return totals

    def encode(self) -> bytes:
        """Return the bytes of ``manifest.json``, with its SHA-256."""
        body = json.dumps(self.model_dump(exclude={"sha256"}), separators=(",", ":"))[:-1].encode()
        return body + b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'

    @staticmethod
    def seal_of(data: bytes) -> str:
        """Return the SHA-256 that ``encode`` wrote into the bytes of ``manifest.json``."""
        return hashlib.sha256(data[:-_TAIL_BYTES]).hexdigest()

    @staticmethod
    def decode(data: bytes, where: str) -> "Manifest":
        """Check the SHA-256, then the JSON, then the format, then the schema, and return the manifest.

        Args:
            data: Bytes of ``manifest.json``.
            where: Name of the file, for errors.

        Raises:
            DamagedError: if the bytes changed or do not fit the schema.
            CheckpointError: if the format is not that of this version.
        """
        tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
        body = data[:-_TAIL_BYTES]
        if tail is None or hashlib.sha256(body).hexdigest().encode() != tail.group(1):
            raise DamagedError(f"{where}: its bytes do not match its SHA-256; it was cut short or changed")
        found = read_object(data, where)
        if found.get("format") != FORMAT:
            raise CheckpointError(
                f"{where}: format {found.get('format')!r:.40}; this version reads format {FORMAT}. "
                "Read it with the version of shardwise that wrote it, or a later one"
            )
        return validated(Manifest, found, where)
