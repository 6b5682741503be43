"""The folder of one run and its files.

config.yaml        the resolved configuration of the last start
metrics.csv        one row per optimizer step
unit_norms.csv     with ``monitor.unit_norms``: the gradient norm of every Unit, one row per optimizer step
loss.png           its picture
auc.png            of a click-through model: its AUC
lr_range.png       with ``schedule.type: range_test``: the loss over the learning rate
lanes.png          of a click-through model: reading, keys and compute of a few steps
schedule.png       the last step of a pipeline, predicted and measured
step.png           the lanes of rank 0 in the last step, foreseen and measured
tensorboard/       the same as TensorBoard events
checkpoints/       step_00000200/ and so on
vectors/           with ``export.every``: the vectors of the embedding tables, for serving
logs/              rank_00000.log and so on
flight/            rank_00000.ring and so on: the last events of every rank, for shardwise doctor
profile/           torch traces, with --profile
cache/             tokenised text, packed clicks
run.json           versions, host, process and command line of every start
.running           exists and is locked while a run is on; names its process
outcome.json       what was foreseen of the run beside what it took, and the seconds of every rank
sample.txt         the text that the model generates at the end
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import reprlib
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.regular_files import read_small_file, read_small_text, write_small_file
from shardwise.base.words import in_words, printable
from shardwise.checkpoint.files import FileSystem, lies_at
from shardwise.checkpoint.steps import CheckpointFolder, steps_at
from shardwise.cli.runs.chosen_step import BEST, CHECKPOINTS, NEWEST, check_word, step_at
from shardwise.config.run import RunConfig, read_file
from shardwise.observe.log import log_path

_STARTS = 100
"""Most earlier starts in run.json."""
_STARTS_BYTES = 16 << 20
_REFERENCE_BYTES = 4096
"""Largest file of git that names a commit."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 20, 20, 200, 200


@dataclass(frozen=True)
class RunFolder:
    """Paths inside the folder that ``output_dir:`` names."""

    root: Path

    @property
    def config(self) -> Path:
        """File of the resolved configuration."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the saved steps."""
        return self.root / CHECKPOINTS

    @property
    def vectors(self) -> Path:
        """Folder of the vectors that the run exports."""
        return self.root / "vectors"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.root / "logs"

    @property
    def flight(self) -> Path:
        """Folder of the ranks' rings of records."""
        return self.root / "flight"

    @property
    def profile(self) -> Path:
        """Folder of the ranks' traces."""
        return self.root / "profile"

    @property
    def cache(self) -> Path:
        """Folder of tokenised text and packed clicks."""
        return self.root / "cache"

    @property
    def schedule(self) -> Path:
        """Picture of the last step of a pipeline."""
        return self.root / "schedule.png"

    @property
    def step(self) -> Path:
        """Picture of the lanes of rank 0 in the last step."""
        return self.root / "step.png"

    @property
    def lanes(self) -> Path:
        """Picture of the lanes of a run over clicks."""
        return self.root / "lanes.png"

    @property
    def outcome(self) -> Path:
        """File of what was foreseen of the run beside what it took."""
        return self.root / "outcome.json"

    @property
    def sample(self) -> Path:
        """File of the text that the model generates at the end."""
        return self.root / "sample.txt"

    def has_checkpoints(self) -> bool:
        """Return whether a step was committed in this folder, readable or not."""
        return os.path.isdir(self.checkpoints) and any(
            path.is_dir() and path.name.startswith("step_") and ".tmp-" not in path.name
            for path in self.checkpoints.iterdir()
        )

    def start_from(self, resume: str, which: str = NEWEST) -> Path | None:
        """Return the checkpoint, or folder of checkpoints, to start from under ``--resume``; None for a fresh start.

        Args:
            resume: Value of ``--resume``.
            which: Value of ``--step``.

        Raises:
            UsageError: if ``resume``, ``which`` and the folder do not fit together.
            CheckpointError: if there is no such step.
        """
        check_word(which)
        if resume == BEST and which == NEWEST:
            resume, which = "auto", BEST
        start = self._start_from(resume)
        if which == NEWEST:
            return start
        if start is None:
            raise UsageError(
                f"--step {which}: {self.root} holds no checkpoint to begin from; name a run by --resume"
            )
        return step_at(start, which).path

    def _start_from(self, resume: str) -> Path | None:
        if resume == "never":
            if self.has_checkpoints():
                raise UsageError(
                    f"--resume never: {self.root} holds checkpoints of an earlier run, which a fresh start would mix "
                    f"with its own; use --resume auto, choose another folder with --set output_dir=..., or remove it"
                )
            return None
        if resume == "auto":
            return self.checkpoints if self.has_checkpoints() else None
        path = Path(resume)
        if RunFolder(path).has_checkpoints():
            path = RunFolder(path).checkpoints
        if not path.is_dir():
            raise UsageError(
                f"--resume {resume}: there is no such folder; expected auto, best, never, or the path of a run folder, "
                f"of a folder of checkpoints, or of one step in it"
            )
        if self.has_checkpoints() and self.checkpoints.resolve() not in (
            path.resolve(),
            path.resolve().parent,
        ):
            raise UsageError(
                f"--resume {resume}: {self.root} already holds checkpoints of its own, which are not those; "
                f"choose another folder for the new run with --set output_dir=..."
            )
        return path

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder against other runs inside the ``with`` block.

        The kernel releases the lock when its holder dies, however it dies. Leftovers of a killed run are removed; a
        start that fails leaves nothing.

        Raises:
            UsageError: if another process holds the folder, which the message names, or the folder cannot be made.
        """
        path = self.root / ".running"
        is_new = not os.path.exists(self.root)  # a name too long gives False, not an error
        descriptor = self._claim(path)
        try:
            # A file system without locks does not stop a run.
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            who = f"process {os.getpid()} on {socket.gethostname()} since {now} UTC\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, who.encode(), 0)
            CheckpointFolder(self.checkpoints, FileSystem()).tidy()
            with contextlib.suppress(OSError):
                (self.root / "run.json.new").unlink()
            yield
        finally:
            if is_new and not (self.root / "run.json").exists():
                self._remove_traces()
            with contextlib.suppress(OSError):
                if lies_at(descriptor, path):
                    path.unlink()
                self.root.rmdir()  # fails if the folder is not empty
            with contextlib.suppress(OSError):
                # After only a close, a forked data worker would hold the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _claim(self, path: Path) -> int:
        """Open and lock the file at ``path`` and return its descriptor."""
        while True:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
                )
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.close(descriptor)
                    raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
            except (OSError, ValueError) as error:
                why = in_words(error) if isinstance(error, OSError) else str(error)
                raise UsageError(
                    f"output_dir: the run folder cannot be made: {why}; choose another with output_dir"
                ) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    held = printable(os.pread(descriptor, 500, 0).decode(errors="replace").strip())
                    os.close(descriptor)
                    raise UsageError(
                        f"{self.root}: another run is using this folder ({held or 'it does not say which'}); wait for "
                        "its end, stop it, or choose another folder with --set output_dir=..."
                    ) from None
            if lies_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # the last holder ended in between and removed the file

    def _remove_traces(self) -> None:
        """Remove what a failed start left in a new folder: rank 0's log, and empty folders.

        Logs of other ranks stay, because they may contain more than the terminal showed.
        """
        with contextlib.suppress(OSError):
            log_path(self.logs, 0).unlink()
        for folder in (self.logs, self.cache, self.checkpoints, self.profile):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def keep_start(self, command: str, ranks: int, hosts: Sequence[str] = ()) -> None:
        """Add this start to run.json: command, place and versions; an unreadable file is replaced.

        Args:
            command: The command line.
            ranks: Number of ranks.
            hosts: Addresses of the hosts; empty: all ranks are on one host.
        """
        path = self.root / "run.json"
        try:
            starts = json.loads(read_small_file(path, _STARTS_BYTES))["starts"]
            starts = starts[-_STARTS:] if isinstance(starts, list) else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            starts = []
        versions = {"python": platform.python_version()}
        for name in ("shardwise", "torch", "numpy", "transformers"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        about = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "ranks": ranks,
            "hosts": list(hosts),
            "command": command,
            "program": sys.argv[0],
            "folder": os.getcwd(),
            "commit": _commit(Path.cwd()),
            "system": platform.platform(),
            "versions": versions,
        }
        self._write(path, json.dumps({"starts": [*starts, about]}, indent=2) + "\n")

    def _write(self, path: Path, text: str) -> None:
        try:
            write_small_file(path, text.encode())
        except OSError as error:
            raise UsageError(
                f"output_dir: the run folder cannot be written: {in_words(error)}; remove what stands there, or choose "
                "another with output_dir"
            ) from None

    def keep_config(self, text: str) -> list[str]:
        """Write config.yaml and return its differences from the former file, a line per key.

        Raises:
            ConfigError: if the former file cannot be read.
        """
        changes: list[str] = []
        if os.path.lexists(self.config):
            try:
                before = read_file(self.config)
            except ConfigError as error:
                said = str(error).removeprefix("config: ")
                raise ConfigError(
                    f"the configuration of the earlier start: {said}; mend it, or move it away"
                ) from None
            changes = differences(before, yaml.safe_load(text))
        self.root.mkdir(parents=True, exist_ok=True)
        self._write(self.config, text)
        return changes


def _commit(folder: Path) -> str | None:
    """Return the git commit of ``folder``, read from git's files; None if there is none."""
    for place in (folder, *folder.parents):
        head = place / ".git" / "HEAD"
        with contextlib.suppress(OSError, ValueError):
            said = read_small_text(head, _REFERENCE_BYTES).strip()
            if not said.startswith("ref: "):
                return said[:64]
            reference = place / ".git" / said[5:]
            return (
                read_small_text(reference, _REFERENCE_BYTES)[:64].strip() if reference.is_file() else said[5:]
            )
    return None


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """Return ``a.b: 1 -> 2`` for every leaf in which two configurations differ.

    Args:
        before: The first configuration.
        now: The second configuration.
        key: Key of both in a larger configuration.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(before.keys() | now.keys())
        lists = (differences(before.get(n), now.get(n), f"{key}.{n}" if key else str(n)) for n in names)
        return [line for lines in lists for line in lines]
    return [] if before == now else [f"{key}: {_shown(before)} -> {_shown(now)}"]


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value) if isinstance(value, dict | list) else str(value)
    except ValueError:  # a number with more digits than Python prints
        return f"a {type(value).__name__} of very many digits"


def without_start(config: RunConfig) -> RunConfig:
    """Return the configuration of a resumed run without ``init_from``: that checkpoint may be gone."""
    wanted = config.init_from
    if wanted is None or (os.path.exists(wanted.path) and steps_at(Path(wanted.path)) is None):
        return config  # needed as the only weights of a model on meta
    return config.model_copy(update={"init_from": None})
