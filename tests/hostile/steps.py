"""Steps of a run: damaged, and written anew by someone who knows every sum. Read as ``shardwise generate``,
``inspect`` and ``convert`` do."""

import hashlib
import json
import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import CheckpointPolicy, Checkpoints, FlatSlice, TensorPieces
from shardwise.cli.inspect import command as inspect
from shardwise.cli.runs.trained import open_trained
from shardwise.models.gpt import Gpt, GptPolicy

from .trial import HOSTILE_VALUES, RAW_JSON, Case, Kind, of_bytes, of_json

MODEL = {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_size": 8, "context": 16}
MODEL |= {"vocab": 256, "hidden": 64, "tied_head": False}


def make(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Gpt(GptPolicy(**MODEL))
    items = [
        TensorPieces("weight", name, tuple(p.shape), p.dtype, [FlatSlice(0, p.numel(), p.detach().view(-1))])
        for name, p in model.named_parameters()
    ]
    state = {
        "step": 7, "reference": 1.0, "loss_scale": None, "layout": {"mesh": "dp 1", "zero_stage": 0},
        "optimizer": {"common": {"step": 7.0}, "exceptions": {}},
    }  # fmt: skip
    user = {"config": {"model": MODEL, "data": {"tokenizer": "bytes"}, "output_dir": "runs/x"}}
    checkpoints = Checkpoints(folder, policy=CheckpointPolicy(asynchronous=False))
    checkpoints.save(7, items, {"engine": state, "user": user})
    return folder / "step_00000007"


def read(step: Path) -> Any:
    """The model that ``generate`` would use, after a look with ``inspect``."""
    trained = open_trained(step, torch.device("cpu"))
    inspect(step, verify=True, tensors=True)
    return [
        (name, p.double().tolist()) for name, p in trained.model.named_parameters()
    ], trained.tokenizer.name


def seal(step: Path, manifest: dict[str, Any]) -> None:
    """``manifest.json`` with a right SHA-256."""
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    body = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    end = b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    (step / "manifest.json").write_bytes(body + end)


def with_trainer(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Another trainer.json, with right sums of it and of the manifest."""

    def damage(step: Path) -> None:
        text = change((step / "trainer.json").read_bytes())
        (step / "trainer.json").write_bytes(text)
        manifest = json.loads((step / "manifest.json").read_bytes())
        size = manifest["block_bytes"]
        sums = "".join(f"{zlib.crc32(text[at : at + size]):08x}" for at in range(0, len(text), size))
        manifest["files"]["trainer.json"] = {"bytes": len(text), "crc32": sums}
        seal(step, manifest)

    return damage


def saying(path: str, value: Any) -> Case:
    """One value of trainer.json."""

    def change(data: bytes) -> bytes:
        content = json.loads(data)
        *outer, last = path.split(".")
        target = content
        for key in outer:
            target = target.setdefault(key, {})
        target[last] = value
        return json.dumps(content).encode()

    return Case(f"{path} is {value!r:.60}", with_trainer(change), may_differ=path.endswith(("mesh", "step")))


def cases(count: int) -> Iterator[Case]:
    yield saying("user.config.model.layers", 10**6)
    yield saying("user.config.model.layers", 10**100)
    yield saying("user.config.model.width", 10**9)
    yield saying("user.config.model.hidden", 10**12)
    yield saying("user.config.model.vocab", 10**12)
    yield saying("user.config.model.heads", 10**9)
    yield saying("user.config.model.target", "os:system")
    for given in ("/dev/zero", "/etc/passwd", "/dev/stdin", "/proc/self/mem", "x" * 5000, "a\0b", "/", ""):
        yield saying("user.config.data.tokenizer", given)
    for key in ("user", "engine", "engine.layout", "user.config", "user.config.model", "user.config.data"):
        for value in HOSTILE_VALUES:
            yield saying(key, value)
    yield saying("engine.layout.mesh", "\x1b]0;title\x07\x1b[2J")
    for number, raw in enumerate(RAW_JSON):
        yield Case(f"raw trainer {number}", with_trainer(lambda data, raw=raw: raw))

    def linked(step: Path) -> None:
        (step / "trainer.json").unlink()
        (step / "trainer.json").symlink_to("/dev/zero")

    def fifo(step: Path) -> None:
        (step / "trainer.json").unlink()
        os.mkfifo(step / "trainer.json")

    yield Case("trainer.json is a link", linked)
    yield Case("trainer.json is a pipe", fifo)
    names = ["manifest.json", "trainer.json", "model/model.safetensors"]
    for number in range(3 * count):
        draws = random.Random(f"step {number}")
        if number % 3 == 0:
            name = draws.choice(names)
            case = of_bytes(draws, lambda step, name=name: step / name)
            yield case._replace(name=f"{name}: {case.name}")
        elif number % 3 == 1:

            def edit(step: Path, draws: random.Random = draws) -> None:
                seal(step, of_json(draws, json.loads((step / "manifest.json").read_bytes()))[1])

            yield Case(f"manifest, edit {number}", edit)
        else:

            def change(data: bytes, draws: random.Random = draws) -> bytes:
                return json.dumps(of_json(draws, json.loads(data))[1]).encode()

            # Of the model's keys some are no tensor's shape: another base of rotary angles is another lawful model.
            yield Case(f"trainer, edit {number}", with_trainer(change), may_differ=True)


KIND = Kind("steps", make, read, cases)
