"""Contents of a checkpoint for ``shardwise inspect``: one step, or a folder of steps."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardwise.checkpoint.manifest as manifests
from shardwise.base.errors import CheckpointError
from shardwise.base.strict_json import read_object
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.load import FileDamage, StepReader
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.steps import LATEST, CheckpointFolder, open_step
from shardwise.checkpoint.verify import verify


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a step, for display."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class StepSummary:
    """Contents of one step.

    If ``problem`` is set, the step cannot be opened and all fields but ``path`` and ``damage`` are empty.
    """

    path: Path
    problem: str = ""
    step: int = 0
    run: str = ""
    generation: int = 0
    base: int | None = None
    """Number of the full step that the step continues; None if the step is whole by itself."""
    bytes_by_kind: dict[str, int] | None = None
    bytes_by_file: dict[str, int] | None = None
    tensors: tuple[TensorRow, ...] = ()
    aliases: dict[str, list[str]] | None = None
    versions: dict[str, str] | None = None
    """Versions of the programs that wrote the step; empty if it does not record them."""
    trainer: dict[str, Any] | None = None
    damage: tuple[FileDamage, ...] | None = None
    """Damage that verification found; None if verification was not requested."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum((self.bytes_by_file or {}).values())

    @property
    def elements(self) -> int:
        """Number of elements of the model's weights."""
        sizes = [
            row.bytes // manifests.DTYPES[row.dtype].itemsize for row in self.tensors if row.kind == "weight"
        ]
        return sum(sizes)

    @property
    def is_whole(self) -> bool:
        """True if the step opens and no damage was found."""
        return not self.problem and not self.damage


@dataclass(frozen=True)
class FolderSummary:
    """A folder of steps, newest first."""

    path: Path
    steps: tuple[StepSummary, ...]
    latest: str
    """Contents of the file ``latest``."""
    leftovers: tuple[str, ...]
    """Directories of saves in progress or of writers that died; the next save removes the latter."""


def describe(directory: Path | str, check: bool = True) -> StepSummary | FolderSummary:
    """Summarise a step, or a folder of steps.

    Args:
        directory: Folder of a step, or of steps.
        check: Verify every byte of each step.

    Raises:
        CheckpointError: if ``directory`` is neither.
    """
    path = Path(directory)
    if not os.path.isdir(path):  # False for a name too long, too
        if not os.path.exists(path):
            raise CheckpointError(f"{path}: no such directory; expected a step or a folder of steps")
        hint = "; shardwise convert reads it" if path.suffix in (".pt", ".pth", ".bin") else ""
        raise CheckpointError(f"{path} is a file; expected a folder: a step, or a folder of steps{hint}")
    if (path / manifests.NAME).exists():
        return _describe_step(path, check)
    files = FileSystem()
    found = CheckpointFolder(path, files).scan()
    if not found:
        raise CheckpointError(
            f"{path}: neither a step (it has no {manifests.NAME}) nor a folder with directories step_NNNNNNNN"
        )
    try:
        latest = files.read_bytes(path / LATEST, 4096).decode(errors="replace").strip()
    except OSError:
        latest = ""
    leftovers = sorted(p.name for p in path.iterdir() if ".tmp-" in p.name or p.name.startswith(".trash-"))
    steps = tuple(_describe_step(one.path, check) for one in found)
    return FolderSummary(path, steps, latest if latest.isprintable() else "", tuple(leftovers))


def _describe_step(path: Path, check: bool) -> StepSummary:
    files = FileSystem()
    damage = tuple(verify(path, files)) if check else None
    try:
        manifest = open_step(path, files)
        text = StepReader(path, manifest, files).text(manifests.TRAINER)
        trainer = read_object(text, str(path / manifests.TRAINER))
    except CheckpointError as problem:
        return StepSummary(path, problem=str(problem), damage=damage)
    return StepSummary(
        path=path,
        step=manifest.step,
        run=manifest.run,
        generation=manifest.generation,
        base=None if manifest.base is None else manifest.base.step,
        bytes_by_kind=manifest.kinds,
        bytes_by_file={name: file.bytes for name, file in sorted(manifest.files.items())},
        tensors=_rows(manifest),
        aliases=manifest.aliases,
        versions=manifest.versions,
        trainer=trainer,
        damage=damage,
    )


def _rows(manifest: Manifest) -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(
            kind=tensor.kind,
            name=tensor.name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            bytes=tensor.bytes,
            files=tuple(dict.fromkeys(piece.file for piece in tensor.pieces)),
        )
        for tensor in manifest.tensors
    )
