"""The folder of a run, in which others left files under the names of ours."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.cli.runs.run_folder import RunFolder

from .configurations import RAW_YAML
from .trial import RAW_JSON, Case, Kind, of_bytes

CONFIG = "model: {name: gpt, layers: 2}\ntrain: {steps: 6}\n"
NAMES = ("config.yaml", "config.yaml.new", "run.json", "run.json.new", ".running", "checkpoints", "logs")


def make(folder: Path) -> Path:
    (folder / "precious").write_text("precious")
    run = RunFolder(folder / "run")
    run.keep_config(CONFIG)
    run.keep_start("shardwise train", 2)
    (run.root / "checkpoints").mkdir()
    return run.root


def read(root: Path) -> Any:
    """As a start does; nothing outside of the folder may change."""
    run = RunFolder(root)
    with run.claimed():
        start = run.start_from("auto")
        changes = run.keep_config(CONFIG)
        run.keep_start("shardwise train", 2)
    assert (root.parent / "precious").read_text() == "precious"
    return start is not None, changes


def placed(name: str, way: str) -> Case:
    def damage(root: Path) -> None:
        path = root / name
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        if way == "fifo":
            os.mkfifo(path)
        elif way == "folder":
            (path / "inner").mkdir(parents=True)
        elif way == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        else:
            path.symlink_to(way)

    return Case(f"{name}: {way}", damage, may_differ=True)


def cases(count: int) -> Iterator[Case]:
    for name in NAMES:
        for way in ("fifo", "folder", "sparse", "/dev/zero", "../precious", "loop", "nowhere", name):
            yield placed(name, way)
    for number, raw in enumerate(RAW_YAML):
        yield Case(f"config {number}", lambda r, raw=raw: (r / "config.yaml").write_bytes(raw) and None, True)
    for number, raw in enumerate(RAW_JSON):
        yield Case(f"run.json {number}", lambda r, raw=raw: (r / "run.json").write_bytes(raw) and None, True)
    for number in range(count):
        draws = random.Random(f"run folder {number}")
        name = draws.choice(["config.yaml", "run.json"])
        yield of_bytes(draws, lambda root, name=name: root / name)._replace(may_differ=True)


KIND = Kind("run folders", make, read, cases)
