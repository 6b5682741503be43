"""The tensors of a .pt, .pth or .bin file of torch under dotted names; no code of the file is executed.

    {"model": {"a": t}, "steps": [u, v], "epoch": 3}    ->    model.a, steps.0, steps.1; left out: epoch

torch reads the file with ``weights_only``, which builds only tensors and plain containers. The sizes in the
pickle are compared with the file before memory is allocated: a tensor of one stored element expanded to a billion
elements is refused. Ambiguous names are refused too: two entries with the same dotted name, or a name that
safetensors reserves.

Cost: a map of the file; the memory of one tensor while tensors are written.
"""

import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.words import in_words
from shardwise.formats.safetensors import CODES, METADATA

SUFFIXES = (".pt", ".pth", ".bin")
_DEPTH_LIMIT = 50
_ENTRY_LIMIT = 100_000
_GROWTH_LIMIT = 16
"""Bytes written per byte of the file, at most: tied weights are written once per name."""
_SHOWN = 5


class TorchFile(NamedTuple):
    """The content of a file of torch."""

    tensors: dict[str, Tensor]
    """The tensors by dotted name. They are in the memory map of the file and may share storage."""
    left_out: list[str]
    """The dotted names of entries that are not tensors."""


def read_torch_file(path: Path) -> TorchFile:
    """Read the tensors of the file ``path``.

    Raises:
        CheckpointError: if the file cannot be read, or an entry cannot be written as it is; the error names the
            entry.
        DamagedError: if the file is damaged or was assembled by hand.
    """
    size_bytes, parts = check_torch_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types; in no case was code of the file executed
        raise CheckpointError(
            f"{path} does not load as plain tensors ({type(error).__name__}); a pickle can hold code, which is "
            f"never run here: save the tensors alone, as in torch.save(model.state_dict(), ...)"
        ) from error
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    for number, (name, value) in enumerate(_leaves(path, content, (), ())):
        if number >= _ENTRY_LIMIT:
            raise CheckpointError(
                f"{path} holds more than {_ENTRY_LIMIT} entries; that is not the state of a model"
            )
        if not isinstance(value, Tensor):
            left_out.append(name or type(value).__name__)
            continue
        _check_name(path, name)
        if name in tensors:
            raise CheckpointError(
                f"{path}: two entries are called {name!r} once their keys are joined with dots, and one file cannot "
                "hold both; rename one where the file was made"
            )
        _check_tensor(path, name, value)
        tensors[name] = value.detach()
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors under names")
    check_places(path, tensors.values(), parts)
    total_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    if total_bytes > _GROWTH_LIMIT * size_bytes:
        raise CheckpointError(
            f"{path}: its {len(tensors)} tensors share memory and would take {total_bytes} bytes each on its own, from "
            f"a file of {size_bytes}; at most {_GROWTH_LIMIT} times its size is written"
        )
    return TorchFile(tensors, left_out)


def check_torch_file(path: Path) -> tuple[int, dict[int, int]]:
    """Refuse any file but a regular file in torch's zip format, uncompressed and with correct checksums.

    Returns:
        The file's size, and the size of each of its parts by the offset at which the part begins, in bytes.

    Raises:
        CheckpointError: if the file is not such a file.
        DamagedError: if a checksum is wrong, or two parts have the same name.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is no regular file")
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            packed = [entry.filename for entry in parts if entry.compress_type != zipfile.ZIP_STORED]
            damaged = None if packed else archive.testzip()  # torch does not check these sums
            places = {_data_start(archive, entry): entry.file_size for entry in parts}
    except OSError as error:
        raise CheckpointError(f"{in_words(error)}; expected a file that torch.save wrote") from None
    except (
        zipfile.BadZipFile,
        ValueError,
        NotImplementedError,
        RuntimeError,
        EOFError,
        struct.error,
    ) as error:
        raise CheckpointError(
            f"{path} is cut short, damaged, or from before torch 1.6 ({error}); load it where it is trusted "
            "and torch.save its tensors again"
        ) from None
    # torch looks parts up by name without regard to case, so of two equal names it would silently read one.
    twice = [name for name, count in Counter(entry.filename.lower() for entry in parts).items() if count > 1]
    if twice:
        raise DamagedError(
            f"{path}: two of its parts are called {twice[0][:200]!r}, which torch.save never does; the file was put "
            "together by hand: save it again"
        )
    if packed:
        raise CheckpointError(
            f"{path}: its part {packed[0][:200]!r} is compressed, which torch.save never does"
        )
    if damaged is not None:
        raise DamagedError(
            f"{path}: the CRC-32 of its part {damaged[:200]!r} differs: its bytes changed after it was saved (or it "
            "was saved without sums, after torch.serialization.set_crc32_options(False); save it again with them)"
        )
    return found.st_size, places


def _data_start(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Return the offset of a part's bytes, which follow a header with a name and notes of any length."""
    stream = archive.fp
    assert stream is not None, "the archive is open"
    stream.seek(entry.header_offset + 26)
    name_bytes, note_bytes = struct.unpack("<HH", stream.read(4))
    return int(entry.header_offset + 30 + name_bytes + note_bytes)


def check_places(path: Path, tensors: Iterable[Tensor], parts: Mapping[int, int]) -> None:
    """Check that every storage is one whole part of the file.

    torch takes a storage's size from the pickle; for a part that is shorter it would read the following bytes, which
    belong to other tensors.

    Args:
        path: The file.
        tensors: The file's tensors, in the memory map of the file.
        parts: The sizes of the file's parts by their offsets, as :func:`check_torch_file` returns them.

    Raises:
        DamagedError: if a storage is not one of the parts.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    storages = {place: size for place, size in storages.items() if size}
    if not storages:
        return
    first = min(storages)
    bases = (first - start for start, size in parts.items() if size == storages[first])
    if not any(all(parts.get(place - base) == size for place, size in storages.items()) for base in bases):
        raise DamagedError(
            f"{path}: its tensors are not where its parts are: one was cut short, or the file was put together by hand"
        )


def _leaves(
    path: Path, value: Any, keys: tuple[str, ...], above: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for every value in nested dictionaries, lists and tuples."""
    if not isinstance(value, dict | list | tuple):
        yield ".".join(keys), value
        return
    if id(value) in above or len(keys) >= _DEPTH_LIMIT:
        raise CheckpointError(
            f"{path}: {'.'.join(keys)[:200]!r} contains itself, or is nested more than {_DEPTH_LIMIT} deep"
        )
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if not isinstance(key, str | int):
            raise CheckpointError(
                f"{path}: a key of {'.'.join(keys) or 'the file'} is a {type(key).__name__}; expected text or a number"
            )
        yield from _leaves(path, inner, (*keys, str(key)), (*above, id(value)))


def _check_name(path: Path, name: str) -> None:
    if name == METADATA:
        raise CheckpointError(
            f"{path}: a tensor is called {METADATA!r}, which safetensors reserves; rename it"
        )
    if not name:
        raise CheckpointError(f"{path} holds one tensor without a name; save it in a dictionary")
    if not name.isprintable():
        raise CheckpointError(f"{path}: a tensor is called {name!r:.200}; a name must be printable")


def _check_tensor(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{path}: {name} is {what}; safetensors holds plain tensors alone")
    if tensor.dtype not in CODES:
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype}, which the file cannot hold; it holds "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in CODES)}"
        )
    if tensor.numel() * tensor.dtype.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: {name} of shape {list(tensor.shape)} has only "
            f"{tensor.untyped_storage().nbytes()} bytes in the file: it is an expanded view. Save it contiguous, as "
            "in tensor.contiguous()"
        )


def summary(left_out: list[str]) -> str:
    """Return a short text about the entries that are not tensors; empty if there are none."""
    more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    return f"left out, no tensors: {', '.join(left_out[:_SHOWN])}{more}" if left_out else ""
