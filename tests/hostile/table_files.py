"""Steps of a checkpoint whose sums are right and whose embedding tables no save wrote."""

import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    AdmissionPolicy,
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)

from .trial import Case, Kind, of_bytes, of_json

GROWS, STATIC = "tables.grows", "tables.static"


class Net(nn.Module):
    """A static table, and one that grows, evicts and lets keys wait."""

    def __init__(self) -> None:
        super().__init__()
        dynamic = DynamicPolicy(
            capacity=200,
            eviction=EvictionPolicy(type="lru"),
            admission=AdmissionPolicy(type="frequency", count=2),
        )
        policies = [
            TablePolicy(name="static", width=2, rows=50),
            TablePolicy(name="grows", width=2, dynamic=dynamic),
        ]
        self.tables = EmbeddingCollection(policies, RowOptimizerPolicy(lr=0.1))
        self.out = nn.Linear(2, 1)

    def forward(self, keys: Tensor) -> Tensor:
        found = self.tables({"static": Ragged.of_ones(keys % 50), "grows": Ragged.of_ones(keys)})
        return sum(self.out(each).sum() for each in found.values())  # type: ignore[return-value]


def engine_of() -> Any:
    return shardwise.initialize(Net(), {"batch": {"global_size": 60}, "optimizer": {"type": "sgd"}})


def make(folder: Path) -> Path:
    engine = engine_of()
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        engine.train_step([{"keys": torch.randint(0, 120, (60,), generator=generator)}])
    engine.save(folder, asynchronous=False)
    engine.close()
    return next(folder.glob("step_*"))


def read(step: Path) -> Any:
    engine = engine_of()
    engine.load(step)
    collection = engine.tables["tables"]
    found: list[Any] = [collection.saved.progress()]
    for name in ("static", "grows"):
        rows = collection.rows_here(name)
        tensors = [rows.keys, rows.weights, rows.scores, rows.candidates, *rows.state.values()]
        found.append([None if each is None else each.tolist() for each in tensors])
    engine.close()
    return found


def rewrite(step: Path, file: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file of a step, and the sums that vouch for it."""
    content = json.loads((step / file).read_text())
    change(content)
    (step / file).write_bytes(json.dumps(content).encode())
    seal(step, json.loads((step / "manifest.json").read_text()), file)


def seal(step: Path, manifest: dict[str, Any], *files: str) -> None:
    """Write a manifest with right sums for ``files``."""
    for file in files:
        data, size = (step / file).read_bytes(), manifest["block_bytes"]
        sums = [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]
        manifest["files"][file] = {"bytes": len(data), "crc32": "".join(f"{each:08x}" for each in sums)}
    manifest.pop("sha256", None)
    body = json.dumps(manifest)[:-1].encode()
    tail = f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    (step / "manifest.json").write_bytes(body + tail)


def of_notes(name: str, change: Callable[[dict[str, Any]], Any]) -> Case:
    """Other notes in trainer.json."""
    return Case(
        name, lambda step: rewrite(step, "trainer.json", lambda trainer: change(trainer["engine"]["tables"]))
    )


def of_tensor(name: str, kind: str, table: str, change: Callable[[npt.NDArray[Any]], Any]) -> Case:
    """Other numbers in one stored tensor."""

    def damage(step: Path) -> None:
        manifest = json.loads((step / "manifest.json").read_text())
        (tensor,) = [each for each in manifest["tensors"] if (each["kind"], each["name"]) == (kind, table)]
        (piece,) = tensor["pieces"]
        path = step / piece["file"]
        data = bytearray(path.read_bytes())
        count = piece["stop"] - piece["start"]
        change(np.frombuffer(data, "<i8", count, piece["offset"]))
        path.write_bytes(data)
        held = bytes(data[piece["offset"] : piece["offset"] + 8 * count])
        piece["crc32"] = f"{zlib.crc32(held):08x}"
        seal(step, manifest, piece["file"])

    return Case(name, damage)


def of_manifest(name: str, kind: str, table: str, change: Callable[[dict[str, Any]], Any]) -> Case:
    """One tensor described otherwise."""

    def damage(step: Path) -> None:
        manifest = json.loads((step / "manifest.json").read_text())
        (tensor,) = [each for each in manifest["tensors"] if (each["kind"], each["name"]) == (kind, table)]
        change(tensor)
        seal(step, manifest)

    return Case(name, damage)


def swapped(first: int, second: int) -> Callable[[npt.NDArray[Any]], None]:
    def change(numbers: npt.NDArray[Any]) -> None:
        numbers[[first, second]] = numbers[[second, first]]

    return change


def set_to(value: int, place: int | slice = slice(None)) -> Callable[[npt.NDArray[Any]], None]:
    def change(numbers: npt.NDArray[Any]) -> None:
        numbers[place] = value

    return change


def note(table: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda notes: notes["tables"][table].update(fields)


def moved_bucket(notes: dict[str, Any]) -> None:
    """One row from a bucket that has some to the next, so that the sum stays."""
    buckets = notes["tables"][GROWS]["buckets"]
    place = next(i for i, count in enumerate(buckets) if count and i < 1000)
    buckets[place] -= 1
    buckets[place + 1] += 1


def cases(count: int) -> Iterator[Case]:
    for buckets in (
        [],
        [0] * 1024,
        [-1] * 1024,
        [0] * 1023,
        [1] * 1024,
        [2**40] * 1024,
        [2**62] * 1024,
        None,
        "x",
    ):
        yield of_notes(f"buckets {str(buckets)[:20]}", note(GROWS, buckets=buckets))
        yield of_notes(f"waiting {str(buckets)[:20]}", note(GROWS, waiting=buckets))
    for rows in (0, 7, -1, 2**40, 2**70, 7.0, "7", None):
        for table in (GROWS, STATIC):
            yield of_notes(f"{table} rows {rows}", note(table, rows=rows))
    yield of_notes("buckets of a static table", note(STATIC, buckets=[50] + [0] * 1023))
    yield of_notes("a row in another bucket", moved_bucket)
    yield of_notes("buckets turned round", lambda notes: notes["tables"][GROWS]["buckets"].reverse())
    yield of_notes("a table less", lambda notes: notes["tables"].pop(GROWS))
    yield of_notes("a table more", lambda notes: notes["tables"].update(other={"rows": 1}))
    yield of_notes("no collection", lambda notes: notes["collections"].clear())
    for steps in (-1, 2**62, "4", None):
        yield of_notes(
            f"steps {steps}", lambda notes, s=steps: notes["collections"]["tables"].update(steps=s)
        )
    for rates in ([1.0], [-1.0] * 4, ["x"] * 4, [1e400] * 4):
        yield of_notes(
            f"rates {rates}", lambda notes, r=rates: notes["collections"]["tables"].update(lr_factors=r)
        )
    for value in (7, -1, 2**62):
        yield of_tensor(f"all keys {value}", "table_key", GROWS, set_to(value))
        yield of_tensor(f"key 3 is {value}", "table_key", GROWS, set_to(value, 3))
    yield of_tensor("two keys exchanged", "table_key", GROWS, swapped(0, 5))
    for value in (-1, 5, 2**62):
        yield of_tensor(f"score {value}", "table_score", GROWS, set_to(value, 2))
        yield of_tensor(f"waiting {value}", "table_waiting", GROWS, set_to(value, 1))
    yield of_tensor("a key that waits elsewhere", "table_waiting", GROWS, set_to(12345, 0))
    for kind, table in (("table", STATIC), ("table", GROWS), ("table_key", GROWS), ("table_waiting", GROWS)):
        for shape in ([1], [0, 0], [2, 2, 2], [2**40, 2]):
            yield of_manifest(
                f"{kind} {table} {shape}", kind, table, lambda each, s=shape: each.update(shape=s)
            )
        for dtype in ("F64", "I64", "U8", "x"):
            yield of_manifest(
                f"{kind} {table} {dtype}", kind, table, lambda each, d=dtype: each.update(dtype=d)
            )
        yield of_manifest(
            f"{kind} {table} unknown", kind, table, lambda each: each.update(kind="table_other")
        )
    draws = random.Random(3)
    files: Sequence[str] = ("manifest.json", "trainer.json", "state/table_key.safetensors")
    while count > 0:
        count -= 1
        seed = draws.getrandbits(32)
        if count % 4 == 0:
            file = draws.choice(files)
            yield of_bytes(draws, lambda step, f=file: step / f)
            continue

        def damage(step: Path, seed: int = seed) -> None:
            def change(trainer: dict[str, Any]) -> None:
                trainer["engine"]["tables"] = of_json(random.Random(seed), trainer["engine"]["tables"])[1]

            rewrite(step, "trainer.json", change)

        yield Case(f"notes {seed}", damage)


KIND = Kind("tables", make, read, cases)
