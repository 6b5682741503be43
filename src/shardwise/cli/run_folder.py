"""The folder of one run, and what its state allows.

config.yaml        the resolved configuration of the last start
metrics.csv        one row per optimizer step
loss.png           its picture
auc.png            of a click-through model: its AUC
lanes.png          of a click-through model: reading, keys and compute of a few steps
schedule.png       the last step of a pipeline, predicted and measured
tensorboard/       the same as TensorBoard events
checkpoints/       step_00000200/ and so on
logs/              rank_00000.log and so on
profile/           torch traces, with --profile
cache/             tokenised text, packed clicks
sample.txt         what the model writes at the end
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.plan.errors import ConfigError, UsageError


@dataclass(frozen=True)
class RunFolder:
    """Paths inside the folder that ``out:`` names."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of steps."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """The ranks' logs."""
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """The ranks' traces."""
        return self.root / "profile"

    @property
    def cache(self) -> Path:
        """Tokenised text, packed clicks."""
        return self.root / "cache"

    @property
    def schedule(self) -> Path:
        """The last step of a pipeline."""
        return self.root / "schedule.png"

    @property
    def lanes(self) -> Path:
        """What the lanes of a run over clicks did."""
        return self.root / "lanes.png"

    @property
    def sample(self) -> Path:
        """What the model writes at the end."""
        return self.root / "sample.txt"

    def has_checkpoints(self) -> bool:
        """A step was committed here, readable or not."""
        return self.checkpoints.is_dir() and any(
            path.is_dir() and path.name.startswith("step_") and ".tmp-" not in path.name
            for path in self.checkpoints.iterdir()
        )

    def start_from(self, resume: str) -> Path | None:
        """The checkpoint, or folder of them, to start from under ``--resume``; None for a fresh start."""
        if resume == "never":
            if self.has_checkpoints():
                raise UsageError(
                    f"--resume never: {self.root} holds checkpoints of an earlier run, which a fresh start would mix "
                    f"with its own; go on with --resume auto, choose another folder with --set out=..., or remove it"
                )
            return None
        if resume == "auto":
            return self.checkpoints if self.has_checkpoints() else None
        path = Path(resume)
        if RunFolder(path).has_checkpoints():
            path = RunFolder(path).checkpoints
        if not path.is_dir():
            raise UsageError(
                f"--resume {resume}: there is no such folder; expected auto, never, or the path of a run folder, "
                f"of a folder of checkpoints, or of one step in it"
            )
        if self.has_checkpoints() and self.checkpoints.resolve() not in (
            path.resolve(),
            path.resolve().parent,
        ):
            raise UsageError(
                f"--resume {resume}: {self.root} already holds checkpoints of its own, which are not those; "
                f"choose another folder for the new run with --set out=..."
            )
        return path

    def keep_config(self, text: str) -> list[str]:
        """Write config.yaml; returns how it differs from the one that was there, a line per key."""
        changes: list[str] = []
        if self.config.exists():
            try:
                before = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise ConfigError(
                    f"{self.config} of the earlier start is not YAML any more: {error}"
                ) from None
            changes = differences(before, yaml.safe_load(text))
        self.root.mkdir(parents=True, exist_ok=True)
        fresh = self.config.with_name("config.yaml.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.config)
        return changes


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """``a.b: 1 -> 2`` for every leaf in which two configurations differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(before.keys() | now.keys())
        lists = (differences(before.get(n), now.get(n), f"{key}.{n}" if key else str(n)) for n in names)
        return [line for lines in lists for line in lines]
    return [] if before == now else [f"{key}: {before} -> {now}"]
