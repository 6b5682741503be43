"""Loading: all ranks choose a step together, then read their slices, checking every byte that is read.

    candidates   rank 0 scans the folder, newest first; all ranks take its list
    check        each rank opens the manifest, compares its tensors, and reads its share of all blocks against their
                 CRC-32, so that every block of the step is read once by some rank. All ranks get all results: damage
                 anywhere turns every rank to the next older step while no destination has been touched
    read         each rank reads the blocks that its pieces lie in, checks them once more as it reads, and copies

There are two passes instead of one with a second copy of the state, because memory is short when a run starts. The
second pass reads mostly from the page cache and costs a CRC. Because the second pass checks too, bytes that were
damaged in between are not used either: every rank then turns to the next older step, which fills every destination
anew. Only if no step is left does loading fail with destinations half filled, and the error says so.

Checks work on blocks: a slice is checked by the whole blocks around it, and a rank reads each block once, in file
order, however many of its slices lie in it.
"""

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardwise.checkpoint.manifest as manifests
from shardwise.base.errors import CheckpointError, DamagedError, MismatchError, TierError
from shardwise.base.strict_json import read_object
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.manifest import Manifest, ManifestTensor
from shardwise.checkpoint.peers import CheckpointCoordinator
from shardwise.checkpoint.piece import Flat, TensorPieces, bytes_of, check_pieces
from shardwise.checkpoint.steps import CheckpointFolder, StepDirectory, base_of, open_step, step_of
from shardwise.kernels.crc import sum_for

Choose = Sequence[TensorPieces] | Callable[[Manifest], Sequence[TensorPieces]]
"""Items to fill, or a function that returns them for the manifest of a step."""


class LoadedCheckpoint(NamedTuple):
    """The step that was loaded, with its trainer state and manifest."""

    step: int
    trainer: dict[str, Any]
    path: Path
    manifest: Manifest


class FileDamage(NamedTuple):
    """Damage to one file of a step, and the tensors that it affects."""

    file: str
    tensors: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        tensors = f" (tensor {', '.join(self.tensors)})" if self.tensors else ""
        return f"{self.file}{tensors}: {self.what}"


class StepReader:
    """Reads the bytes of one step, and returns none that fail their check. Uses one block of memory."""

    def __init__(self, path: Path, manifest: Manifest, files: FileSystem) -> None:
        self.path, self.manifest = path, manifest
        self._files = files
        largest = max(file.bytes for file in manifest.files.values())
        self._buffer = torch.empty(min(manifest.block_bytes, largest), dtype=torch.uint8)
        self._memory = bytes_of(self._buffer)
        self._sum = sum_for(sum(file.bytes for file in manifest.files.values()))

    def blocks(self, kinds: Collection[str] | None = None) -> list[tuple[str, int]]:
        """Return (file, block) for every block of the step, in order, or of the files with tensors of some kinds."""
        files = sorted(self.manifest.files.items())
        if kinds is not None:
            held = [
                piece.file for each in self.manifest.tensors if each.kind in kinds for piece in each.pieces
            ]
            files = [each for each in files if each[0] in {manifests.TRAINER, *held}]
        return [(name, block) for name, file in files for block in range(file.blocks)]

    def check(self, blocks: Iterable[tuple[str, int]]) -> None:
        """Read ``blocks`` and compare them with their CRC-32.

        Raises:
            DamagedError: at the first block that differs or cannot be read.
        """
        by_file: dict[str, list[int]] = {}
        for name, block in blocks:
            by_file.setdefault(name, []).append(block)
        for name, wanted in by_file.items():
            self._each_block(name, wanted, lambda block, data: None)

    def text(self, name: str) -> bytes:
        """Return the contents of a small file."""
        parts: list[bytes] = []
        file = self.manifest.files[name]
        self._each_block(name, range(file.blocks), lambda block, data: parts.append(data.numpy().tobytes()))
        return b"".join(parts)

    def fill(self, items: Sequence[TensorPieces]) -> None:
        """Copy the stored elements into the pieces of ``items``, casting if the dtype differs."""
        for name, requests in self._requests(items).items():
            requests.sort(key=lambda request: request.start)
            size = self.manifest.block_bytes
            touched = {
                block
                for request in requests
                for block in range(request.start // size, -(-request.stop // size))
            }
            self._each_block(name, sorted(touched), _copier(requests, size))

    def _requests(self, items: Sequence[TensorPieces]) -> dict[str, list["_ReadRequest"]]:
        requests: dict[str, list[_ReadRequest]] = {}
        for item in items:
            stored = self.manifest.find(item.kind, item.name)
            assert stored is not None, f"{item.name} was compared before it is read"
            for start, stop, tensor in item.pieces:
                for piece in stored.pieces:
                    a, b = max(start, piece.start), min(stop, piece.stop)
                    if a < b:
                        at = piece.offset + (a - piece.start) * stored.torch_dtype.itemsize
                        end = at + (b - a) * stored.torch_dtype.itemsize
                        request = _ReadRequest(
                            at, end, stored.torch_dtype, tensor.detach()[a - start : b - start]
                        )
                        requests.setdefault(piece.file, []).append(request)
        return requests

    def _each_block(self, name: str, blocks: Iterable[int], use: Callable[[int, Tensor], None]) -> None:
        """Read and check ``blocks`` of one file, and call ``use`` with each."""
        file = self.manifest.files[name]
        size = self.manifest.block_bytes
        place = self.path / name
        try:
            descriptor = self._files.open_for_reading(place)
        except OSError as error:
            raise DamagedError(f"{place}: cannot be opened ({error.strerror or error})") from None
        try:
            for block in blocks:
                length = min(size, file.bytes - block * size)
                data = self._memory[:length]
                try:
                    self._files.read_at(descriptor, data, block * size)
                except OSError as error:
                    what = f"cannot be read ({error})"
                    raise DamagedError(f"{self.path}: {self._damage(name, block, what)}") from None
                if self._sum(data) != file.block_crc(block):
                    what = (
                        f"bytes {block * size}..{block * size + length} do not match their CRC-32; they changed "
                        "after they were written"
                    )
                    raise DamagedError(f"{self.path}: {self._damage(name, block, what)}")
                use(block, self._buffer[:length])
        finally:
            os.close(descriptor)

    def _damage(self, name: str, block: int, what: str) -> FileDamage:
        size = self.manifest.block_bytes
        return FileDamage(name, self.suspects(name, block * size, (block + 1) * size), what)

    def suspects(self, name: str, start: int, stop: int) -> tuple[str, ...]:
        """Return the tensors within bytes ``[start, stop)`` of a file whose own CRC-32 no longer matches."""
        return tuple(
            f"{tensor.kind} {tensor.name!r}"
            for tensor in self.manifest.tensors
            for piece in tensor.pieces
            if piece.file == name
            and piece.offset < stop
            and (end := piece.offset + (piece.stop - piece.start) * tensor.torch_dtype.itemsize) > start
            and self._sum_of(name, piece.offset, end) != int(piece.crc32, 16)
        )

    def _sum_of(self, name: str, start: int, stop: int) -> int:
        """Return the CRC-32 of a range as it is now; -1 if it cannot be read."""
        total = 0
        part = bytearray(min(2**20, stop - start))
        try:
            descriptor = self._files.open_for_reading(self.path / name)
            try:
                while start < stop:
                    data = memoryview(part)[: stop - start]
                    self._files.read_at(descriptor, data, start)
                    total = zlib.crc32(data, total)
                    start += len(data)
            finally:
                os.close(descriptor)
        except OSError:
            return -1
        return total


class _ReadRequest(NamedTuple):
    """Bytes ``[start, stop)`` of a file, of dtype ``dtype``, to be copied into ``tensor``."""

    start: int
    stop: int
    dtype: torch.dtype
    tensor: Flat


def _copier(requests: Sequence[_ReadRequest], block_bytes: int) -> Callable[[int, Tensor], None]:
    """Return a function that serves sorted ``requests`` from blocks in rising order."""
    waiting = list(reversed(requests))
    open_requests: list[_ReadRequest] = []

    def use(block: int, data: Tensor) -> None:
        first = block * block_bytes
        last = first + data.numel()
        while waiting and waiting[-1].start < last:
            open_requests.append(waiting.pop())
        for start, stop, dtype, tensor in open_requests:
            a, b = max(start, first), min(stop, last)
            size = dtype.itemsize
            source = data[a - first : b - first].view(dtype)
            tensor[(a - start) // size : (b - start) // size].copy_(source)
        open_requests[:] = [request for request in open_requests if request.stop > last]

    return use


# ---------------------------------------------------------------------------------------------- which model


def differences(items: Sequence[TensorPieces], manifest: Manifest) -> list[str]:
    """Return the differences between this rank's items and the tensors of the step, as text."""
    found = []
    for item in items:
        stored = manifest.find(item.kind, item.name)
        if stored is None:
            found.append(f"{item.kind} {item.name!r} {tuple(item.shape)} is not in the checkpoint")
        elif tuple(stored.shape) != tuple(item.shape):
            found.append(
                f"{item.kind} {item.name!r} is {tuple(stored.shape)} in the checkpoint and "
                f"{tuple(item.shape)} in this model"
            )
        elif not _castable(stored, item.dtype):
            found.append(
                f"{item.kind} {item.name!r} is {stored.torch_dtype} in the checkpoint and {item.dtype} in this model"
            )
    return found


def _castable(stored: ManifestTensor, wanted: torch.dtype) -> bool:
    return stored.torch_dtype == wanted or (stored.torch_dtype.is_floating_point and wanted.is_floating_point)


def _requested(items: Sequence[TensorPieces], manifest: Manifest) -> str:
    """Return the manifest's tensors that this rank requests: a bit each, in hex."""
    wanted = {id(manifest.find(item.kind, name)) for item in items for name in manifest.names_of(item.name)}
    bits = "".join("1" if id(tensor) in wanted else "0" for tensor in manifest.tensors)
    return f"{int(bits, 2):x}" if bits else "0"


def _unrequested(answers: Sequence[dict[str, Any]], manifest: Manifest) -> list[str]:
    """Return the tensors that no rank requested, of kinds that some rank did request."""
    union = 0
    for answer in answers:
        union |= int(answer["requested"], 16)
    count = len(manifest.tensors)
    requested = [bool(union >> (count - 1 - i) & 1) for i in range(count)]
    kinds = {tensor.kind for tensor, yes in zip(manifest.tensors, requested, strict=True) if yes}
    return [
        f"{tensor.kind} {tensor.name!r} {tuple(tensor.shape)} is not in this model"
        for tensor, yes in zip(manifest.tensors, requested, strict=True)
        if not yes and tensor.kind in kinds
    ]


# ------------------------------------------------------------------------------------------------- together


class CheckpointLoad:
    """One load in progress, the same on every rank.

    Args:
        folder: Folder of the steps.
        files: Access to the file system.
        coordinator: Exchange with the other ranks.
        warn: Function that takes one line of a warning; called on rank 0 only.
        partial: Allow the step to hold more tensors of a kind than are requested.
        is_checked: True if every block of the step was checked before.
        examine: Function that may refuse a step by raising DamagedError.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        files: FileSystem,
        coordinator: CheckpointCoordinator,
        warn: Callable[[str], None],
        partial: bool,
        is_checked: bool = False,
        examine: Callable[[StepReader], None] | None = None,
    ) -> None:
        self._examine = examine
        self._folder, self._files, self._coordinator, self._partial = folder, files, coordinator, partial
        self._is_checked = is_checked
        self._warn = warn if coordinator.rank == 0 else lambda line: None
        self._touched = False

    def newest(self, choose: Choose, look_first: Callable[[], None] | None = None) -> LoadedCheckpoint | None:
        """Load the newest whole step; an older step if newer steps are damaged.

        Args:
            choose: Items to fill.
            look_first: Function that runs on rank 0 before it looks for steps.

        Returns:
            The loaded step; None if there is no step at all.

        Raises:
            DamagedError: if there are steps and none can be loaded.
        """
        steps: list[StepDirectory] = []

        def scan() -> list[str]:
            if self._coordinator.rank == 0:
                if look_first is not None:
                    look_first()
                steps.extend(self._folder.scan())
                self._pass_over(steps)
            return [one.path.name for one in steps if one.manifest is not None]

        names: list[str] = json.loads(self._coordinator.gather("candidates", scan)[0])
        problems: list[str] = []
        for number, name in enumerate(names):
            try:
                return self._one(self._folder.root / str(name), choose, str(number), name)
            except TierError:
                raise  # the destination on disk is damaged, not the step
            except DamagedError as damage:
                problems.append(str(damage))
                older = (
                    f"trying {names[number + 1]}" if number + 1 < len(names) else "and there is no older one"
                )
                self._warn(f"checkpoint {name} is damaged, {older}: {damage}")
        self._coordinator.gather("none left", lambda: self._none_left(steps, problems))
        return None

    def _pass_over(self, steps: Sequence[StepDirectory]) -> None:
        """Warn of damaged steps newer than the newest readable step; raise for a step of a newer format."""
        newest = max((one.step for one in steps if one.manifest is not None), default=-1)
        for one in steps:
            if one.problem is not None and one.step >= newest:
                if not isinstance(one.problem, DamagedError):
                    raise one.problem
                self._warn(f"checkpoint {one.path.name} is passed over: {one.problem}")

    def _none_left(self, steps: Sequence[StepDirectory], problems: Sequence[str]) -> None:
        stories = [*problems, *(str(one.problem) for one in steps if one.problem is not None)]
        if stories:
            touched = " The tensors given are half filled." if self._touched else ""
            raise DamagedError(
                f"{self._folder.root}: no step there can be loaded.{touched} Restore one from a copy, or start anew in "
                f"another folder. {'; '.join(stories)}"
            )

    def exactly(self, path: Path, choose: Choose) -> LoadedCheckpoint:
        """Load the step at ``path`` and no other.

        Args:
            path: Folder of the step.
            choose: Items to fill.

        Raises:
            CheckpointError: if the step cannot be loaded.
        """
        return self._one(path, choose, "only")

    def _one(self, path: Path, choose: Choose, turn: str, given_name: object = None) -> LoadedCheckpoint:
        """Check the step at ``path`` together with the other ranks, then fill.

        ``given_name`` is the step's name if another rank sent it.
        """
        opened: list[tuple[StepReader, Sequence[TensorPieces]]] = []

        def check() -> dict[str, Any]:
            manifest = open_step(
                path if given_name is None else step_of(self._folder.root, given_name), self._files
            )
            items = list(choose(manifest)) if callable(choose) else list(choose)
            check_pieces(items)
            reader = StepReader(path, manifest, self._files)
            opened.append((reader, items))
            wrong = differences(items, manifest)
            if not wrong and not self._is_checked:
                self._check_share(reader, reader.blocks())
                base = base_of(path, manifest, self._files)
                if base is not None and manifest.base is not None:
                    full = StepReader(base, open_step(base, self._files), self._files)
                    self._check_share(full, full.blocks(manifest.base.kinds))
            if not wrong and self._examine is not None:
                self._examine(reader)
            return {"seal": manifest.sha256, "requested": _requested(items, manifest), "wrong": wrong}

        answers = [json.loads(text) for text in self._coordinator.gather(f"check {turn}", check)]
        reader, items = opened[0]
        self._judge(answers, reader)

        trainer: dict[str, Any] = {}

        def read() -> None:
            text = reader.text(manifests.TRAINER)
            trainer.update(read_object(text, str(path / manifests.TRAINER)))
            self._touched = True
            reader.fill(items)

        self._coordinator.gather(f"read {turn}", read)
        return LoadedCheckpoint(reader.manifest.step, trainer, path, reader.manifest)

    def _check_share(self, reader: StepReader, blocks: Sequence[tuple[str, int]]) -> None:
        """Check this rank's share of the blocks."""
        rank, size = self._coordinator.rank, self._coordinator.size
        reader.check(blocks[len(blocks) * rank // size : len(blocks) * (rank + 1) // size])

    def _judge(self, answers: Sequence[dict[str, Any]], reader: StepReader) -> None:
        """Raise the same error on all ranks if the answers of any rank differ or refuse the step."""
        if len({answer["seal"] for answer in answers}) > 1:
            raise CheckpointError(
                f"{reader.path}: the ranks see different manifests under this name; the checkpoint folder must lie on "
                "a file system that all ranks share"
            )
        wrong = list(dict.fromkeys(line for answer in answers for line in answer["wrong"]))
        if not self._partial:
            wrong += _unrequested(answers, reader.manifest)
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise MismatchError(
                f"{reader.path}: a checkpoint of another model: {'; '.join(wrong[:5])}{more}. "
                "Load it into the model that wrote it, or start without it"
            )
