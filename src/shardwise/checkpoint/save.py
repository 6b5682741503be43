"""Saving one step: every rank writes its own ranges, and one rename commits the step.

    specs       the ranks agree on the list of tensors, and from it on every file and offset     (layout.py)
    directory   rank 0 takes the lock, removes leftovers, checks for 1.1 x the space, makes step_N.tmp-* and its files
    write       every rank writes its pieces at their offsets, syncs, and reports the CRC-32 of each extent
    read back   rank 0 combines the sums and checks coverage; every rank re-reads its share of the blocks
    commit      rank 0 compares, writes the manifest (tmp, sync, rename), syncs the directories, renames step_N.tmp-*
                to step_N, syncs the folder

If a rank fails, it reports the failure in its phase and all ranks raise; if a rank dies, the other ranks time out.
Until the last rename, only a directory that no reader opens has changed. Older steps are removed after the rename,
once the new step was read back.

Cost: the bytes of the model state once to the disk; CRC-32 twice (write, read back; kernels/crc.py), without the
interpreter's lock. Memory: nothing beyond the pieces given.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import shardwise.checkpoint.manifest as manifests
from shardwise.base.errors import CheckpointError
from shardwise.base.words import bytes_text, in_words
from shardwise.checkpoint.coverage import FileExtent, FileSums, cut_at_blocks, stored_tensors, sum_up
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.layout import FileLayout, FileSlot, LayoutSizes, arrange, index_text
from shardwise.checkpoint.manifest import BaseStep, Manifest
from shardwise.checkpoint.peers import CheckpointCoordinator
from shardwise.checkpoint.piece import (
    MODEL_KINDS,
    Flat,
    TensorPieces,
    TensorSpec,
    bytes_of,
    check_pieces,
    specs_of,
)
from shardwise.checkpoint.steps import LATEST, LOCK, CheckpointFolder, step_name, temporary_of
from shardwise.formats.safetensors import CODES, DTYPES
from shardwise.kernels.crc import Sum, sum_for


@dataclass(frozen=True)
class StepContents:
    """Contents of one step on this rank."""

    step: int
    items: Sequence[TensorPieces]
    trainer: Mapping[str, Any]
    """State of the trainer. Only rank 0's is written."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other names of tied tensors, by the name under which they are saved."""
    write_aliases: bool = False
    """Write tied tensors under all their names, for readers without support for ties."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Contents of more small files by path: ``model/config.json`` and the like. Only rank 0's are written."""
    best: Sequence[int] = ()
    """Numbers of the steps that were saved with a score, best first; the first of them that exist are not removed."""
    base: BaseStep | None = None
    """The full step that this one continues; None if the step is whole by itself."""
    mark: int = 0
    """Number of the save, by which the caller knows a full step again."""


class FullStep(NamedTuple):
    """The last committed step that is whole by itself, which later steps may continue."""

    mark: int
    """Number of the save, by which the caller knows it."""
    step: int
    sha256: str
    """SHA-256 in its manifest."""
    increments: int
    """Number of steps that were committed since and continue it."""


@dataclass
class CheckpointWriter:
    """Settings of a writer, and its generation among all writers of the folder."""

    run: str
    keep_last: int | None
    keep_every: int | None
    keep_best: int
    """Number of the best steps that are kept."""
    read_back: bool
    warn: Callable[[str], None]
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    full: FullStep | None = None
    """The last full step of this writer, on rank 0."""
    generation: int | None = None
    """Generation of this writer, set on rank 0 by its first save."""


def with_aliases(contents: StepContents) -> list[TensorPieces]:
    """Return the items, with a copy under every alias if ``write_aliases`` is set."""
    items = list(contents.items)
    if contents.write_aliases:
        for item in contents.items:
            if item.kind in MODEL_KINDS:
                items += [item._replace(name=alias) for alias in contents.aliases.get(item.name, ())]
    return items


class CheckpointSave:
    """One save in progress. ``run`` executes it, in any thread."""

    def __init__(
        self,
        folder: CheckpointFolder,
        files: FileSystem,
        sizes: LayoutSizes,
        writer: CheckpointWriter,
        coordinator: CheckpointCoordinator,
        contents: StepContents,
    ) -> None:
        self._folder, self._files, self._sizes, self._writer = folder, files, sizes, writer
        self._coordinator, self._contents = coordinator, contents
        self._leads = coordinator.rank == 0
        self._unlock: Callable[[], None] | None = None
        self._temporary: Path | None = None
        self._committed: Path | None = None
        self._texts: dict[str, bytes] = {}
        self._aliases: dict[str, list[str]] = {}
        self._sum: Sum = sum_for(0)

    def run(self) -> None:
        """Run all phases of the save.

        Raises:
            CheckpointError: if any rank fails.
            TierError: if state on disk cannot be read.
        """
        items = with_aliases(self._contents)
        try:
            layouts = self._agree(items)
            self._sum = sum_for(2 * sum(layout.bytes for layout in layouts) // self._coordinator.size)
            name = json.loads(self._coordinator.gather("directory", lambda: self._prepare(layouts))[0])
            temporary = self._folder.root / str(name)
            answers = self._coordinator.gather(
                "write", lambda: self._write(temporary_of(self._folder.root, name), layouts, items)
            )
            sums: list[FileSums] = []
            crcs = self._coordinator.gather(
                "read back", lambda: self._read_back(temporary, layouts, answers, sums)
            )
            self._coordinator.gather("commit", lambda: self._commit(temporary, layouts, sums, crcs))
            if self._leads:
                self._tidy()
        except Exception:
            # If a rank died, other ranks may still be writing; their files are removed meanwhile, which is harmless.
            if self._leads and self._temporary is not None:
                with contextlib.suppress(OSError):
                    self._folder.trash(self._temporary)
            raise
        finally:
            self._coordinator.end()
            if self._unlock is not None:
                self._unlock()

    # -- specs

    def _agree(self, items: Sequence[TensorPieces]) -> list[FileLayout]:
        """Return the layout of every file, the same on every rank."""
        own: list[TensorSpec] = []

        def digest() -> str:
            check_pieces(items)
            own.extend(specs_of(items))
            return hashlib.sha256(self._describe(own).encode()).hexdigest()

        aliases: dict[str, list[str]] = {k: list(v) for k, v in self._contents.aliases.items()}
        if (
            len(set(self._coordinator.gather("specs", digest))) > 1
        ):  # ranks of a pipeline have only the tensors of their own stages
            answers = self._coordinator.gather("all specs", lambda: json.loads(self._describe(own)))
            own, aliases = _merge(answers)
        self._aliases = aliases
        return arrange(own, self._sizes, {} if self._contents.write_aliases else aliases)

    def _describe(self, specs: Sequence[TensorSpec]) -> str:
        rows = [[s.kind, s.name, list(s.shape), CODES[s.dtype]] for s in specs]
        aliases = {name: list(others) for name, others in sorted(self._contents.aliases.items())}
        return json.dumps([self._contents.step, self._contents.write_aliases, rows, aliases])

    # -- directory

    def _prepare(self, layouts: Sequence[FileLayout]) -> str:
        """Make, on rank 0, a directory with every file at its size, headers and small files written."""
        if not self._leads:
            return ""
        root, files = self._folder.root, self._files
        self._texts = self._small_files(layouts)
        if self._writer.generation is not None and not root.is_dir():
            self._writer.warn(f"{root} is gone since the last save: renamed or removed; it is made anew")
        files.make_folder(root)
        self._unlock = files.lock(root / LOCK)
        if self._unlock is not None:
            self._folder.remove_leftovers()
        if self._writer.generation is None:
            self._writer.generation = 1 + max(
                (generation for generation, _ in self._folder.claims()), default=0
            )
        self._check_space(sum(layout.bytes for layout in layouts) + sum(map(len, self._texts.values())))
        name = f"{step_name(self._contents.step)}.tmp-{self._writer.generation}-{secrets.token_hex(6)}"
        self._temporary = temporary = root / name
        files.make_directory(temporary)
        paths = [*self._texts, *(layout.path for layout in layouts)]
        for directory in sorted({path.partition("/")[0] for path in paths if "/" in path}):
            files.make_directory(temporary / directory)
        for path, text in self._texts.items():
            self._put(temporary / path, text, len(text))
        for layout in layouts:
            self._put(temporary / layout.path, layout.header, layout.bytes)
        return name

    def _small_files(self, layouts: Sequence[FileLayout]) -> dict[str, bytes]:
        texts = {manifests.TRAINER: manifests.write_json(dict(self._contents.trainer), manifests.TRAINER)}
        index = index_text(layouts)
        if index is not None:
            texts["model/model.safetensors.index.json"] = index
        for path, text in self._contents.texts.items():
            taken = path in texts or any(path == layout.path for layout in layouts)
            if taken or not manifests.is_plain_path(path):
                raise CheckpointError(
                    f"{path!r} cannot be the name of a file of a step: taken, or not a plain name"
                )
            texts[path] = text.encode()
        return texts

    def _check_space(self, total_bytes: int) -> None:
        free = self._files.free_bytes(self._folder.root)
        if free < 1.1 * total_bytes:
            raise CheckpointError(
                f"it takes {bytes_text(total_bytes)} and {bytes_text(free)} are free; a save asks for 1.1 times its "
                "size. Free space, keep fewer steps, or choose another folder; the steps there are untouched"
            )

    def _put(self, path: Path, head: bytes, size: int) -> None:
        descriptor = self._files.create(path, size)
        try:
            self._files.write_at(descriptor, path, head, 0)
            self._files.sync(descriptor, path)
        finally:
            self._files.close(descriptor)

    # -- write

    def _write(
        self, temporary: Path, layouts: Sequence[FileLayout], items: Sequence[TensorPieces]
    ) -> list[FileExtent]:
        """Write this rank's ranges of every file; rank 0 also reports the headers that it wrote."""
        jobs = _jobs(layouts, items)
        extents: list[FileExtent] = []
        for number, layout in enumerate(layouts):
            if self._leads:
                for start, stop in cut_at_blocks(0, len(layout.header), self._sizes.block_bytes):
                    extents.append(FileExtent(number, start, stop, self._sum(layout.header[start:stop])))
            if jobs[number]:
                extents += self._write_file(temporary / layout.path, number, jobs[number])
        return extents

    def _write_file(self, path: Path, number: int, jobs: list[tuple[int, Flat]]) -> list[FileExtent]:
        extents = []
        try:
            descriptor = self._files.open_for_writing(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} was made by rank 0 and cannot be seen by rank {self._coordinator.rank}: "
                "the checkpoint folder must lie on a file system that all ranks share"
            ) from None
        try:
            for offset, tensor in sorted(jobs, key=lambda job: job[0]):
                itemsize = tensor.dtype.itemsize
                for start, stop in cut_at_blocks(
                    offset, offset + tensor.numel() * itemsize, self._sizes.block_bytes
                ):
                    part = tensor[(start - offset) // itemsize : (stop - offset) // itemsize]
                    data = bytes_of(part.cpu())
                    extents.append(FileExtent(number, start, stop, self._sum(data)))
                    self._files.write_at(descriptor, path, data, start)
            self._files.sync(descriptor, path)
        finally:
            self._files.close(descriptor)
        return extents

    # -- read back

    def _read_back(
        self, temporary: Path, layouts: Sequence[FileLayout], answers: Sequence[str], sums: list[FileSums]
    ) -> list[int]:
        """Return the CRC-32 of this rank's share of blocks as the file system returns them; rank 0 also fills ``sums``.

        Reading back detects a write that was lost between two writers of one file, while the step is not yet committed
        and the older steps are not yet removed. It reads what any reader would get, cached pages included.
        """
        if self._leads:
            extents = [[FileExtent(*row) for row in json.loads(text)] for text in answers]
            sums += sum_up(layouts, extents, self._sizes.block_bytes)
        if not self._writer.read_back:
            return []
        return [
            self._block_crc(temporary / layouts[file].path, layouts[file].bytes, block)
            for file, block in _share(
                layouts, self._sizes.block_bytes, self._coordinator.rank, self._coordinator.size
            )
        ]

    def _block_crc(self, path: Path, size: int, block: int) -> int:
        start = block * self._sizes.block_bytes
        buffer = bytearray(min(self._sizes.block_bytes, size - start))
        descriptor = self._files.open_for_reading(path)
        try:
            self._files.read_at(descriptor, memoryview(buffer), start)
        finally:
            self._files.close(descriptor)
        return self._sum(buffer)

    # -- commit

    def _commit(
        self, temporary: Path, layouts: Sequence[FileLayout], sums: Sequence[FileSums], answers: Sequence[str]
    ) -> None:
        if not self._leads:
            return
        if self._writer.read_back:
            self._compare(layouts, sums, answers)
        files = {layout.path: file.stored() for layout, file in zip(layouts, sums, strict=True)}
        for path, text in self._texts.items():
            blocks = cut_at_blocks(0, len(text), self._sizes.block_bytes)
            crcs = [self._sum(text[start:stop]) for start, stop in blocks]
            files[path] = FileSums(len(text), crcs).stored()
        assert self._writer.generation is not None, "rank 0 set it in the directory phase"
        manifest = Manifest(
            format=manifests.FORMAT,
            run=self._writer.run,
            generation=self._writer.generation,
            writer=self._writer.nonce,
            step=self._contents.step,
            block_bytes=self._sizes.block_bytes,
            files=files,
            tensors=stored_tensors(layouts, sums),
            aliases={name: list(others) for name, others in self._aliases.items()},
            versions=manifests.versions(),
            base=self._contents.base,
        )
        encoded = manifest.encode()
        self._files.replace(temporary / manifests.NAME, encoded)
        for directory in sorted({(temporary / path).parent for path in files} | {temporary}):
            self._files.sync_directory(directory)
        self._check_claim()
        self._committed = self._folder.commit(temporary, self._contents.step)
        self._temporary = None
        full = self._writer.full
        if manifest.base is None:
            sha256 = Manifest.seal_of(encoded)
            self._writer.full = FullStep(self._contents.mark, manifest.step, sha256, 0)
        elif full is not None:
            self._writer.full = full._replace(increments=full.increments + 1)

    def _compare(
        self, layouts: Sequence[FileLayout], sums: Sequence[FileSums], answers: Sequence[str]
    ) -> None:
        for rank, text in enumerate(answers):
            share = _share(layouts, self._sizes.block_bytes, rank, self._coordinator.size)
            for (file, block), crc in zip(share, json.loads(text), strict=True):
                if sums[file].blocks[block] != crc:
                    raise CheckpointError(
                        f"{layouts[file].path}, block {block}: rank {rank} read back other bytes than were written. "
                        "The file system lost or changed a write; step "
                        f"{self._contents.step} was not committed and the older ones are untouched"
                    )

    def _check_claim(self) -> None:
        """Refuse to commit if a later process of the run has saved: this one was cut off and has come back."""
        for generation, writer in self._folder.claims():
            if generation >= (self._writer.generation or 0) and writer != self._writer.nonce:
                raise CheckpointError(
                    f"{self._folder.root}: a newer process (generation {generation}) saves into this folder; this "
                    f"one (generation {self._writer.generation}) no longer may. Stop it, or give it its own folder"
                )

    # -- after the commit

    def _tidy(self) -> None:
        """Write the hint and remove older steps; a failure leaves the committed step intact."""
        assert self._committed is not None, "only a committed step is followed by tidying"
        try:
            self._files.replace(self._folder.root / LATEST, f"{self._committed.name}\n".encode())
            writer = self._writer
            self._folder.retain(
                writer.keep_last, writer.keep_every, self._committed, self._contents.best, writer.keep_best
            )
        except (OSError, CheckpointError) as error:
            why = in_words(error) if isinstance(error, OSError) else error
            self._writer.warn(f"step {self._contents.step} is saved, but cleaning up after it failed: {why}")


def _merge(answers: Sequence[str]) -> tuple[list[TensorSpec], dict[str, list[str]]]:
    """Return the tensors of all ranks; a tensor that several ranks hold must be the same on all of them."""
    specs: dict[tuple[str, str], TensorSpec] = {}
    aliases: dict[str, list[str]] = {}
    first: tuple[Any, Any] | None = None
    for rank, answer in enumerate(answers):
        step, write_aliases, rows, others = json.loads(answer)
        first = first or (step, write_aliases)
        if (step, write_aliases) != first:
            raise CheckpointError(
                f"rank {rank} saves step {step} (write_aliases={write_aliases}), "
                f"rank 0 step {first[0]} (write_aliases={first[1]})"
            )
        aliases.update(others)
        for kind, name, shape, code in rows:
            spec = TensorSpec(kind, name, tuple(shape), DTYPES[code])
            known = specs.setdefault((kind, name), spec)
            if known != spec:
                raise CheckpointError(
                    f"{kind} {name!r} is {tuple(shape)} {code} on rank {rank}, "
                    f"{known.shape} {CODES[known.dtype]} on a rank before it; give the global shape everywhere"
                )
    return [specs[key] for key in sorted(specs)], dict(sorted(aliases.items()))


def _jobs(layouts: Sequence[FileLayout], items: Sequence[TensorPieces]) -> list[list[tuple[int, Flat]]]:
    """Return for each file the offsets and tensors that this rank writes."""
    slots: dict[tuple[str, str], list[tuple[int, FileSlot]]] = {}
    for number, layout in enumerate(layouts):
        for slot in layout.slots:
            slots.setdefault((slot.spec.kind, slot.spec.name), []).append((number, slot))
    jobs: list[list[tuple[int, Flat]]] = [[] for _ in layouts]
    for item in items:
        for piece in item.pieces:
            for number, slot in slots[item.kind, item.name]:
                start, stop = max(piece.start, slot.start), min(piece.stop, slot.stop)
                if start < stop:
                    offset = slot.offset + (start - slot.start) * item.dtype.itemsize
                    part = piece.tensor.detach()[start - piece.start : stop - piece.start]
                    jobs[number].append((offset, part))
    return jobs


def _share(layouts: Sequence[FileLayout], block_bytes: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return (file, block) for the range of blocks that ``rank`` reads back: each block on one rank, in file order."""
    blocks = [
        (number, block)
        for number, file in enumerate(layouts)
        for block in range(-(-file.bytes // block_bytes))
    ]
    return blocks[len(blocks) * rank // size : len(blocks) * (rank + 1) // size]
