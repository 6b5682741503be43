"""A folder of steps: names, order, and the rules of removal.

    runs/gpt/checkpoints/
      step_00000200/                     committed: contains a manifest, complete by construction
      step_00000400/
      step_00000400.old-1f0a.../         the step of that number which a later life of the run is replacing
      step_00000600.tmp-2-9c31.../       being written, or left by a writer that died
      .trash-77d0.../                    being removed, or left by a writer that died
      latest                             a hint for people; never read
      .writing                           exists and is locked while a rank 0 is saving

One rename, ``step_N.tmp-*`` to ``step_N``, commits a step; nothing else makes a step loadable. Removal takes the
reverse way: rename to ``.trash-*``, sync, then unlink. So a half-removed step is never visible, not even after a power
loss that keeps the unlinks and loses the rename.

A step may be a link to a folder elsewhere, such as an archive, and loads as any other. When such a step is removed,
only the link is removed, and its target stays.

Order: newest first is by (generation, step). A run that went back to step 300 and is now at step 350 is newer than the
step 400 of its earlier life, and is kept longer.
"""

import contextlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import shardwise.checkpoint.manifest as manifests
from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.strict_json import JSON_BYTES
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.manifest import Manifest

_STEP = re.compile(r"step_(\d{8,15})(\.old-[0-9a-f]+)?", re.ASCII)
_STALE = re.compile(r"step_\d{8,15}\.tmp-.*|\.trash-.*", re.ASCII)
_TEMPORARY = re.compile(r"step_\d{8,15}\.tmp-\d+-[0-9a-f]{12}", re.ASCII)
LATEST = "latest"
LOCK = ".writing"


class StepDirectory(NamedTuple):
    """A directory with the name of a step. Either ``manifest`` or ``problem`` is None."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: CheckpointError | None

    @property
    def order(self) -> tuple[int, int, bool]:
        """Key of the order: the newest step has the largest."""
        generation = -1 if self.manifest is None else self.manifest.generation
        return generation, self.step, ".old-" not in self.path.name


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step_{step:08d}"


def steps_at(path: Path) -> Path | None:
    """Return the step at ``path``, or the folder of steps there, or that of the run there; None if there is none."""
    if (path / manifests.NAME).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and any(_STEP.fullmatch(each.name) and each.is_dir() for each in folder.iterdir()):
            return folder
    return None


def folder_of(path: Path) -> Path:
    """Return the folder of steps that a path names: the path itself, or the parent of a step."""
    found = steps_at(path) or path
    return found.parent if (found / manifests.NAME).is_file() else found


def newest_until(root: Path, step: int) -> str:
    """Return the name of the newest readable step of a folder whose number is at most ``step``; "" if there is none."""
    for each in CheckpointFolder(root, FileSystem()).scan():
        if each.manifest is not None and each.step <= step:
            return each.path.name
    return ""


def temporary_of(root: Path, name: object) -> Path:
    """Return the directory in which a step is written, by the name that another rank posted.

    Args:
        root: Folder of the steps.
        name: Posted name.

    Raises:
        CheckpointError: if ``name`` has not the form of such a name.
    """
    return _named(root, name, _TEMPORARY)


def step_of(root: Path, name: object) -> Path:
    """Return the directory of a step, by the name that another rank posted.

    Args:
        root: Folder of the steps.
        name: Posted name.

    Raises:
        CheckpointError: if ``name`` has not the form of such a name.
    """
    return _named(root, name, _STEP)


def _named(root: Path, name: object, form: re.Pattern[str]) -> Path:
    """Return ``root / name`` if ``name`` matches ``form``.

    The check is needed because a name from a store may be absolute or lead out of the folder.
    """
    if isinstance(name, str) and form.fullmatch(name):
        return root / name
    raise CheckpointError(
        f"{root}: rank 0 is recorded as having named the directory {str(name)[:100]!r}, which no rank makes; nothing "
        "was read or written there. Another program writes into the store of this job"
    )


def base_of(path: Path, manifest: Manifest, files: FileSystem) -> Path | None:
    """Return the folder of the full step that a step continues; None if the step is whole by itself.

    Args:
        path: Folder of the step.
        manifest: Manifest of the step.
        files: Access to the file system.

    Raises:
        DamagedError: if the full step is not beside the step, is another one, or does not open.
    """
    base = manifest.base
    if base is None:
        return None
    name = step_name(base.step)
    what = f"{path}: holds only the rows that changed since step {base.step}"
    found = sorted(each for each in path.parent.glob(f"{name}*") if _STEP.fullmatch(each.name))
    for place in found:
        try:
            full = _opened(place, files)
        except CheckpointError as problem:
            if len(found) == 1:
                raise DamagedError(f"{what}, and that step cannot be read: {problem}") from None
            continue
        if full.sha256 == base.sha256 and full.base is None:
            return place
    if found:
        raise DamagedError(f"{what} of the same run, and {found[0]} is another one; restore both from a copy")
    raise DamagedError(f"{what}, and {path.parent / name} is not there; restore it from a copy")


def open_step(path: Path, files: FileSystem) -> Manifest:
    """Return the manifest of one step after checking that every file exists and has its size; contents are not read.

    A step that continues a full step opens only if that one opens.

    Args:
        path: Folder of the step.
        files: Access to the file system.

    Raises:
        DamagedError: if the manifest or a file is missing or damaged.
        CheckpointError: if the manifest has another format.
    """
    found = _opened(path, files)
    base_of(path, found, files)
    return found


def _opened(path: Path, files: FileSystem) -> Manifest:
    """Return the manifest of one step after checking its files, without the full step that it continues."""
    try:
        data = files.read_bytes(path / manifests.NAME, JSON_BYTES)
    except OSError as error:
        raise DamagedError(f"{path / manifests.NAME}: cannot be read ({error.strerror or error})") from None
    found = Manifest.decode(data, str(path / manifests.NAME))
    for name, file in found.files.items():
        place = path / name
        try:
            if place.parent != path and place.parent.is_symlink():
                raise DamagedError(f"{place.parent}: a link where a directory was written")
            size = place.lstat().st_size
        except OSError as error:
            raise DamagedError(
                f"{place}: {_holding(found, name)}cannot be found ({error.strerror})"
            ) from None
        if size != file.bytes:
            raise DamagedError(f"{place}: {_holding(found, name)}is {size} bytes; {file.bytes} were written")
    return found


def _holding(manifest: Manifest, file: str) -> str:
    """Return the tensors that a file holds, for an error."""
    names = [f"{t.kind} {t.name!r}" for t in manifest.tensors if any(p.file == file for p in t.pieces)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"(holds {', '.join(names[:3])}{more}) "


class CheckpointFolder:
    """The folder of steps at ``root``."""

    def __init__(self, root: Path, files: FileSystem) -> None:
        self.root = root
        self._files = files
        self._claims: dict[tuple[str, int, int], tuple[int, str]] = {}

    def scan(self) -> list[StepDirectory]:
        """Return every directory with the name of a step: readable steps first, newest first."""
        found = []
        for path, step in self._paths():
            try:
                manifest = open_step(path, self._files)
                if manifest.step != step:
                    raise DamagedError(
                        f"{path}: its manifest is that of step {manifest.step}; it was renamed"
                    )
                found.append(StepDirectory(path, step, manifest, None))
            except CheckpointError as problem:
                found.append(StepDirectory(path, step, None, problem))
        return sorted(found, key=lambda one: one.order, reverse=True)

    def _paths(self) -> list[tuple[Path, int]]:
        if not self.root.is_dir():
            return []
        matches = [(path, _STEP.fullmatch(path.name)) for path in self.root.iterdir()]
        return [(path, int(match.group(1))) for path, match in matches if match and path.is_dir()]

    def claims(self) -> list[tuple[int, str]]:
        """Return (generation, writer) of every readable step; each manifest is parsed once in a writer's life."""
        known = self._claims
        self._claims = {}
        for path, _ in self._paths():
            try:
                stat = (path / manifests.NAME).stat()
                key = (path.name, stat.st_ino, stat.st_mtime_ns)
                claim = known.get(key)
                if claim is None:
                    manifest = open_step(path, self._files)
                    claim = (manifest.generation, manifest.writer)
                self._claims[key] = claim
            except (OSError, CheckpointError):
                continue  # unreadable: claims nothing
        return list(self._claims.values())

    def commit(self, temporary: Path, step: int) -> Path:
        """Rename ``temporary`` to the step's directory, which commits the step.

        An existing step of that number is not removed but renamed to a name that still loads.
        """
        final = self.root / step_name(step)
        if final.is_dir() or final.is_symlink():
            self._files.rename(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
        self._files.rename(temporary, final)
        self._files.sync_directory(self.root)
        return final

    def trash(self, path: Path) -> None:
        """Remove a step or a leftover; if it is a link, only the link."""
        if not path.name.startswith(".trash-"):
            trash = self.root / f".trash-{secrets.token_hex(8)}"
            self._files.rename(path, trash)
            self._files.sync_directory(self.root)
            path = trash
        self._files.remove_tree(path)

    def remove_leftovers(self) -> None:
        """Remove what dead writers left.

        Call only under the lock: a live writer's directory has the same form of name.
        """
        for path in sorted(self.root.iterdir()):
            if _STALE.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                self.trash(path)

    def tidy(self) -> None:
        """Remove what a killed save left, unless a live save is running, and the folder if it is empty.

        A run calls this at its start.
        """
        if not self.root.is_dir():
            return
        try:
            unlock = self._files.lock(self.root / LOCK)
        except CheckpointError:
            return
        if unlock is None:
            return
        try:
            self.remove_leftovers()
        finally:
            unlock()
        with contextlib.suppress(OSError):  # fails if the folder is not empty, the usual case
            self.root.rmdir()

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None,
        committed: Path,
        best: Sequence[int] = (),
        keep_best: int = 1,
    ) -> None:
        """Remove steps older than the newest ``keep_last``, except every ``keep_every``-th step and the best steps.

        A full step stays as long as a kept step continues it. Only readable steps count, so damaged steps never push
        out the last good one; damaged steps are left to the user.

        Args:
            keep_last: Number of steps to keep; None: all.
            keep_every: Interval of steps that are kept in addition.
            committed: The step just committed.
            best: Numbers of steps, best first; steps among them that do not exist, because their save failed, are
                passed over.
            keep_best: Number of the best steps to keep.

        Raises:
            DamagedError: if ``committed`` cannot be read; nothing is removed then.
        """
        if keep_last is None and not any(".old-" in path.name for path, _ in self._paths()):
            return
        found = self.scan()
        readable = [one for one in found if one.manifest is not None]
        if all(one.path != committed for one in readable):
            raise DamagedError(
                f"{committed}: cannot be read right after it was committed; nothing was removed"
            )
        kept: set[int] = set()
        needed: set[Path | None] = set()
        """Full steps that kept steps continue. They are older, and so come later."""
        there = {one.step for one in readable}
        best_kept = set([step for step in best if step in there][:keep_best])
        for one in found:
            # Remove the old step, readable or not, if the step that replaced it is readable.
            if one.path in needed:
                continue
            if ".old-" in one.path.name:
                if any(other.step == one.step and ".old-" not in other.path.name for other in readable):
                    self.trash(one.path)
                continue
            if one.manifest is None:
                continue
            wanted = keep_last is None or len(kept) < keep_last or one.path == committed
            if wanted:
                kept.add(one.step)
            if wanted or one.step in best_kept or (keep_every and one.step % keep_every == 0):
                needed.add(base_of(one.path, one.manifest, self._files))
            else:
                self.trash(one.path)
