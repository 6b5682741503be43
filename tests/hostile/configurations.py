"""Configurations in YAML and JSON: parsed, or one sentence."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.auto import resolve
from shardwise.config.run import load

from .trial import RAW_JSON, Case, Kind, of_bytes, of_json

GOOD: dict[str, Any] = {
    "model": {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16},
    "data": {"source": "stdlib", "tokenizer": "bytes", "validation": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "zero": {"stage": 2},
    "optimizer": {"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 6, "eval_every": 3},
    "checkpoint": {"every": 2, "keep_last": 2},
    "max_grad_norm": 1.0,
    "output_dir": "runs/x",
}
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
RAW_YAML = (
    LAUGHS.encode() + b"model: *i\n", LAUGHS.encode() + b"optimizer: {type: *i}\n", MERGES.encode(),
    b"!!python/object/apply:os.system ['true']\n", b"!!python/name:os.system\n", LAUGHS.encode(), b"a: &a\n  b: *a\n",
    b"[" * 5000, b"{a: " * 3000, b"- " * 3000 + b"x", b"\xff\xfea\x00:\x00 \x001\x00", b"clip: caf\xe9\n", b"a: \x00\n",
    b"\x1b[2J: 1\n", b"a: 1\na: 2\n", b"? [1, 2]\n: 3\n", b"? {a: 1}\n: 3\n", b"clip: 2001-99-99\n", b"clip: .nan\n",
    b"<<: [1, 2]\n", b"<<: {clip: 1}\n", b"x" * 300_000, b"a: " + b"9" * 5000 + b"\n", b"%YAML 9.9\n---\na: 1\n",
    b"---\na: 1\n---\nb: 2\n", b"!!binary x\n", b"clip: !!set {a, b}\n", b"\n".join(b"k%d: 1" % i for i in range(3000)),
    b"layers: 1\n" * 2, b"# only a comment\n", b"'unclosed\n", b"clip: 0x" + b"f" * 4000 + b"\n",
)  # fmt: skip


def make(folder: Path) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(GOOD))
    (folder / "run.json").write_text(json.dumps(GOOD))
    return folder


def read(folder: Path) -> Any:
    """Parsed and resolved, as ``shardwise train`` does before it starts anything."""
    config = load(folder / ("run.json" if (folder / "is_json").exists() else "run.yaml"))
    return resolve(config, 1, "cpu").config.model_dump(mode="json")


def _use(folder: Path, form: str) -> Path:
    """Have that file read."""
    if form == "json":
        (folder / "is_json").touch()
    return folder / f"run.{form}"


def cases(count: int) -> Iterator[Case]:
    def of(form: str, data: bytes, name: str) -> Case:
        def damage(folder: Path) -> None:
            _use(folder, form).write_bytes(data)

        return Case(name, damage, may_differ=True)  # a configuration has no sum: what parses may be meant

    for number, raw in enumerate(RAW_YAML):
        yield of("yaml", raw, f"raw yaml {number}")
    for number, raw in enumerate(RAW_JSON):
        yield of("json", raw, f"raw json {number}")
    yield of(
        "yaml",
        yaml.safe_dump(GOOD | {"batch": {"global_size": 10**9, "micro_size": 1}}).encode(),
        "10^9 samples",
    )
    yield of("yaml", yaml.safe_dump(GOOD | {"data": {"workers": 10**6}}).encode(), "a million workers")
    yield of(
        "yaml",
        yaml.safe_dump(GOOD | {"model": GOOD["model"] | {"layers": 10**100}}).encode(),
        "10^100 layers",
    )
    yield of("yaml", yaml.safe_dump(GOOD | {"output_dir": ""}).encode(), "no folder")
    for number in range(count):
        draws = random.Random(f"configuration {number}")
        form = draws.choice(["yaml", "json"])
        if number % 3 == 0:
            case = of_bytes(draws)

            def damage(folder: Path, case: Case = case, form: str = form) -> None:
                case.damage(_use(folder, form))

            yield Case(f"{form}: {case.name}", damage, may_differ=True)
        else:
            told, new = of_json(draws, GOOD)
            yield of("json", json.dumps(new).encode(), told)


KIND = Kind("configurations", make, read, cases)
