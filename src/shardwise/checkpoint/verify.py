"""Verification of every byte of a step against its manifest, and of the manifest against itself.

Verification finds a flipped bit anywhere (tensor data, headers, padding, JSON, the manifest with its own sums), a file
that is missing, of another size, swapped or left from another step, a header that describes other tensors than the
manifest, and a file that is not in the manifest (a reader without a manifest, such as plain safetensors, might use it).

Cost: one read of the step and its CRC-32, 1 to 2 GB/s per core.
"""

from pathlib import Path

import shardwise.checkpoint.manifest as manifests
from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.strict_json import JSON_BYTES
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.load import FileDamage, StepReader
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.steps import base_of, open_step
from shardwise.formats.safetensors import CODES, StoredTensor, header_of


def verify(directory: Path | str, files: FileSystem | None = None) -> list[FileDamage]:
    """Return all damage to one step; empty if the step is whole.

    Args:
        directory: Folder of the step.
        files: Access to the file system; tests replace it.
    """
    path = Path(directory)
    files = files or FileSystem()
    try:
        manifest = open_step(path, files)
    except DamagedError as damage:
        return _what_opens(path, damage, files)
    except CheckpointError as refusal:
        return [FileDamage(manifests.NAME, (), str(refusal))]
    reader = StepReader(path, manifest, files)
    found: list[FileDamage] = []
    for name in sorted(manifest.files):
        wrong = _check_file(reader, name)
        if wrong is None and name.endswith(".safetensors"):
            wrong = _check_header(reader, name)
        found += [wrong] if wrong else []
    return found + _unknown_files(path, manifest) + _of_base(path, manifest, files)


def _of_base(path: Path, manifest: Manifest, files: FileSystem) -> list[FileDamage]:
    """Return the damage to the full step that a step continues."""
    base = base_of(path, manifest, files)
    return (
        []
        if base is None
        else [each._replace(file=f"{base.name}/{each.file}") for each in verify(base, files)]
    )


def _what_opens(path: Path, problem: DamagedError, files: FileSystem) -> list[FileDamage]:
    """Return the damage of a step that does not open: to the manifest, or to files that it names."""
    try:
        manifest = Manifest.decode(
            files.read_bytes(path / manifests.NAME, JSON_BYTES), str(path / manifests.NAME)
        )
    except (OSError, CheckpointError):
        return [FileDamage(manifests.NAME, (), str(problem))]
    found = []
    for name, file in sorted(manifest.files.items()):
        place = path / name
        size = place.lstat().st_size if place.is_file() and not place.is_symlink() else None
        if size != file.bytes:
            tensors = tuple(
                f"{tensor.kind} {tensor.name!r}"
                for tensor in manifest.tensors
                if any(piece.file == name for piece in tensor.pieces)
            )
            what = "is missing" if size is None else f"is {size} bytes; {file.bytes} were written"
            found.append(FileDamage(name, tensors, what))
    return found or [FileDamage(manifests.NAME, (), str(problem))]


def _check_file(reader: StepReader, name: str) -> FileDamage | None:
    """Return the first bad block of a file, with every tensor of the file whose own sum fails."""
    file = reader.manifest.files[name]
    for block in range(file.blocks):
        try:
            reader.check([(name, block)])
        except DamagedError:
            start = block * reader.manifest.block_bytes
            stop = min(file.bytes, start + reader.manifest.block_bytes)
            what = f"bytes {start}..{stop} do not match their CRC-32"
            tensors = reader.suspects(name, start, file.bytes)
            return FileDamage(name, tensors, what if tensors else f"{what} (outside of every tensor)")
    return None


def _check_header(reader: StepReader, name: str) -> FileDamage | None:
    """Return the damage if plain safetensors would read other tensors from this file than the manifest lists."""
    wanted = {}
    for tensor in reader.manifest.tensors:
        for piece in tensor.pieces:
            if piece.file == name:
                bytes_ = (piece.stop - piece.start) * tensor.torch_dtype.itemsize
                wanted[piece.offset, piece.offset + bytes_, tensor.name] = tensor.dtype
    try:
        found = _header(reader.path / name, reader.manifest.files[name].bytes).values()
    except CheckpointError as error:
        return FileDamage(name, (), f"its header is not one of safetensors ({error})")
    described = {
        (each.offset, each.offset + each.elements * each.dtype.itemsize): (each.name, CODES[each.dtype])
        for each in found
    }
    for (start, end, tensor_name), dtype in wanted.items():
        key, code = described.get((start, end), ("", ""))
        if start != end and (code != dtype or tensor_name not in key):
            return FileDamage(name, (repr(tensor_name),), "the file's header and the manifest disagree")
    return None


def _header(path: Path, size: int) -> dict[str, StoredTensor]:
    """Return the header of a safetensors file, read through ``FileSystem``."""
    files = FileSystem()
    descriptor = files.open_for_reading(path)

    def read(start: int, count: int) -> bytes:
        data = bytearray(count)
        files.read_at(descriptor, memoryview(data), start)
        return bytes(data)

    try:
        return header_of(path, size, read)
    finally:
        files.close(descriptor)


def _unknown_files(path: Path, manifest: Manifest) -> list[FileDamage]:
    known = {manifests.NAME, *manifest.files}
    found = []
    for place in sorted(path.rglob("*")):
        name = place.relative_to(path).as_posix()
        if not (place.is_dir() and not place.is_symlink()) and name not in known:
            found.append(FileDamage(name, (), "is not in the manifest"))
    return found
