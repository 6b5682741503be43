"""A folder of steps: names, order, and what may be removed when.

    runs/gpt/checkpoints/
      step_00000200/                     committed: carries a manifest, complete by construction
      step_00000400/
      step_00000400.old-1f0a.../         the step of that number which a later life of the run is replacing
      step_00000600.tmp-2-9c31.../       being written, or left by a writer that died
      .trash-77d0.../                    being removed, or left by a writer that died
      latest                             a hint for people; never read
      .writing                           there and locked while a rank 0 is saving

One rename, ``step_N.tmp-*`` to ``step_N``, commits a step; nothing else makes one loadable. Removal goes the other way:
rename to ``.trash-*``, sync, then unlink, so that no step is ever seen half removed, not even after a power loss that
keeps the unlinks and forgets the rename.

A step may be a link to a folder elsewhere: an archive. It loads as any other. Where it is due to go, the link goes, and
what it points to stays.

Order: newest first is by (generation, step). A run that went back to step 300 and now stands at 350 is newer than the
step 400 of its earlier life, and outlives it.
"""

import contextlib
import re
import secrets
from pathlib import Path
from typing import NamedTuple

import shardwise.checkpoint.manifest as manifests
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import Manifest
from shardwise.plan.errors import CheckpointError, DamagedError
from shardwise.plan.strict_json import JSON_BYTES

_STEP = re.compile(r"step_(\d{8,15})(\.old-[0-9a-f]+)?", re.ASCII)
_STALE = re.compile(r"step_\d{8,15}\.tmp-.*|\.trash-.*", re.ASCII)
_TEMPORARY = re.compile(r"step_\d{8,15}\.tmp-\d+-[0-9a-f]{12}", re.ASCII)
LATEST = "latest"
LOCK = ".writing"


class StepDirectory(NamedTuple):
    """A directory under the name of a step; ``manifest`` is None where ``problem`` says why."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: CheckpointError | None

    @property
    def order(self) -> tuple[int, int, bool]:
        generation = -1 if self.manifest is None else self.manifest.generation
        return generation, self.step, ".old-" not in self.path.name


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def steps_at(path: Path) -> Path | None:
    """The step at ``path``, or the folder of steps that it is, or that the run there has; None where there is none."""
    if (path / manifests.NAME).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and any(_STEP.fullmatch(each.name) and each.is_dir() for each in folder.iterdir()):
            return folder
    return None


def temporary_of(root: Path, name: object) -> Path:
    """The directory in which a step is written, by the name that another rank posted. Errors: CheckpointError."""
    return _named(root, name, _TEMPORARY)


def step_of(root: Path, name: object) -> Path:
    """The directory of a step, by the name that another rank posted. Errors: CheckpointError."""
    return _named(root, name, _STEP)


def _named(root: Path, name: object, form: re.Pattern[str]) -> Path:
    """What comes over a wire may be an absolute path, or lead out of the folder: names of our own form alone."""
    if isinstance(name, str) and form.fullmatch(name):
        return root / name
    raise CheckpointError(
        f"{root}: rank 0 is recorded as having named the directory {str(name)[:100]!r}, which no rank makes; nothing "
        "was read or written there. Another program writes into the store of this job"
    )


def open_step(path: Path, files: Files) -> Manifest:
    """The manifest of one step, with every file there and of its size. Contents are not read."""
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
    """Which tensors a file holds, for an error about it."""
    names = [f"{t.kind} {t.name!r}" for t in manifest.tensors if any(p.file == file for p in t.pieces)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"(holds {', '.join(names[:3])}{more}) "


class Folder:
    """The folder of steps at ``root``."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self._files = files
        self._claims: dict[tuple[str, int, int], tuple[int, str]] = {}

    def scan(self) -> list[StepDirectory]:
        """Every directory under the name of a step: readable ones first, newest first."""
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
        """(generation, writer) of every readable step; a manifest is parsed once per writer's life."""
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
        """The commit point. A step of that number is set aside under a name that still loads, not removed."""
        final = self.root / step_name(step)
        if final.is_dir() or final.is_symlink():
            self._files.rename(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
        self._files.rename(temporary, final)
        self._files.sync_directory(self.root)
        return final

    def trash(self, path: Path) -> None:
        """Remove a step or a leftover; of a link the link alone."""
        if not path.name.startswith(".trash-"):
            trash = self.root / f".trash-{secrets.token_hex(8)}"
            self._files.rename(path, trash)
            self._files.sync_directory(self.root)
            path = trash
        self._files.remove_tree(path)

    def remove_leftovers(self) -> None:
        """What dead writers left. Only under the lock: a live writer's directory has the same looks."""
        for path in sorted(self.root.iterdir()):
            if _STALE.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                self.trash(path)

    def tidy(self) -> None:
        """At the start of a run: what a killed save left, unless a live one is at work; and the folder, if empty."""
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
        with contextlib.suppress(OSError):  # not empty, as a rule
            self.root.rmdir()

    def retain(
        self, keep_last: int | None, keep_every: int | None, committed: Path, best: int | None = None
    ) -> None:
        """Remove what is older than the newest ``keep_last`` steps, save every ``keep_every``-th and the ``best`` one.

        Only readable steps count, so damaged ones never push out the last good one; they are left to the user.
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
        for one in found:
            if ".old-" in one.path.name:  # readable or not: what took its place is
                if any(other.step == one.step and ".old-" not in other.path.name for other in readable):
                    self.trash(one.path)
                continue
            if one.manifest is None:
                continue
            wanted = keep_last is None or len(kept) < keep_last or one.path == committed
            if wanted:
                kept.add(one.step)
            elif one.step != best and not (keep_every and one.step % keep_every == 0):
                self.trash(one.path)
