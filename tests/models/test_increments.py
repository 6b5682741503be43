"""Increments bring a reader from one step to the next, and nothing else does."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise import Vectors
from shardwise.base.errors import CheckpointError, DamagedError, DataError, MismatchError, UsageError
from shardwise.models.increments import ChangedTable, ExportedStep, increment_name, write_increment
from shardwise.models.vectors import INCREMENTS, StoredTable, write_vectors

RUN = "a1b2"
Rows = dict[int, float]
"""The rows of one dynamic table: all numbers of a vector are the same."""


def vectors_of(rows: Rows, width: int = 2) -> tuple[Tensor, Tensor]:
    keys = torch.tensor(list(rows), dtype=torch.int64)
    return keys, torch.tensor(list(rows.values()), dtype=torch.float32)[:, None].expand(-1, width)


def full(folder: Path, tables: dict[str, Rows], step: int, run: str = RUN) -> Path:
    def table(name: str, rows: Rows) -> StoredTable:
        return StoredTable(name, len(rows), 2, True, lambda: iter([(0, *vectors_of(rows))]))

    return write_vectors(folder, [table(*each) for each in tables.items()], step, run=run)


def changes(name: str, old: Rows, new: Rows, width: int = 2, is_dynamic: bool = True) -> ChangedTable:
    changed = {key: value for key, value in new.items() if old.get(key) != value}
    gone = torch.tensor([key for key in old if key not in new], dtype=torch.int64)

    def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
        yield 0, *vectors_of(changed, width)

    return ChangedTable(name, len(changed), gone, len(new), width, is_dynamic, parts)


def at(step: int, run: str = RUN) -> ExportedStep:
    return ExportedStep(run=run, step=step)


def increment(place: Path, old: dict[str, Rows], new: dict[str, Rows], start: int, end: int) -> Path:
    return write_increment(place, [changes(name, old[name], new[name]) for name in new], at(start), at(end))


def content(vectors: Vectors) -> dict[str, Rows]:
    found = {}
    for name in vectors.tables:
        rows = vectors.rows(name)
        found[name] = dict(zip(rows.keys.tolist(), rows.weights[:, 0].tolist(), strict=True))
        assert torch.equal(vectors.lookup(name, rows.keys), rows.weights)
        assert vectors.tables[name][0] == len(rows.keys)
    return found


def history(steps: int, seed: int = 0) -> list[dict[str, Rows]]:
    """Two tables in which rows come, change, go and come again; the numbers of a step are above those before it."""
    draw = random.Random(seed)
    tables: dict[str, Rows] = {"a": {}, "b": {}}
    found = []
    for step in range(steps):
        for rows in tables.values():
            for key in draw.sample(range(40), 12):
                if key in rows and draw.random() < 0.3:
                    del rows[key]
                else:
                    rows[key] = step + key / 64
        found.append({name: dict(rows) for name, rows in tables.items()})
    return found


def test_a_chain_of_increments_gives_the_rows_of_each_step(tmp_path: Path) -> None:
    steps = history(8)
    reader = Vectors(full(tmp_path / "full", steps[0], 0))
    for end in range(1, 8):
        reader.apply(increment(tmp_path / str(end), steps[end - 1], steps[end], end - 1, end))
        assert reader.step == end and content(reader) == steps[end]
    missing = [key for key in range(40) if key not in steps[7]["a"]]
    assert missing and not reader.lookup("a", torch.tensor(missing)).any()


def test_increments_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    steps = history(4)
    reader = Vectors(full(tmp_path / "full", steps[0], 0))
    first = increment(tmp_path / "1", steps[0], steps[1], 0, 1)
    second = increment(tmp_path / "2", steps[1], steps[2], 1, 2)
    with pytest.raises(MismatchError, match="reader at step 0: an increment between them is missing"):
        reader.apply(second)
    reader.apply(first)
    with pytest.raises(MismatchError, match=r"the reader is at step 1\. It is applied already"):
        reader.apply(first)
    late = increment(tmp_path / "late", steps[0], steps[3], 0, 3)
    with pytest.raises(MismatchError, match="the reader has passed its begin"):
        reader.apply(late)
    tables = [changes(name, steps[1][name], steps[2][name]) for name in "ab"]
    other = write_increment(tmp_path / "other", tables, at(1, "ffff"), at(2, "ffff"))
    with pytest.raises(
        MismatchError, match=r"of run ffff, for a reader at step 1 of run a1b2\. Apply increments to"
    ):
        reader.apply(other)
    wide = [changes(name, steps[1][name], steps[2][name], 3) for name in "ab"]
    with pytest.raises(
        MismatchError, match=r"table 'a' has width 3 and is dynamic; the reader's has width 2 and"
    ):
        reader.apply(write_increment(tmp_path / "wide", wide, at(1), at(2)))
    with pytest.raises(MismatchError, match="table 'b' is in one of the increment and the reader"):
        reader.apply(write_increment(tmp_path / "few", tables[:1], at(1), at(2)))
    assert reader.step == 1 and content(reader) == steps[1]
    reader.apply(second)
    assert content(reader) == steps[2]
    with pytest.raises(UsageError, match="exists already"):
        increment(tmp_path / "2", steps[1], steps[2], 1, 2)
    with pytest.raises(UsageError, match="the first must be the older one"):
        increment(tmp_path / "back", steps[1], steps[2], 2, 2)
    nameless = Vectors(full(tmp_path / "nameless", steps[0], 0, run=""))
    with pytest.raises(MismatchError, match="run without a name"):
        nameless.apply(first)


def test_a_run_that_was_resumed_goes_on_from_the_step_of_its_life_before(tmp_path: Path) -> None:
    steps = history(3)
    reader = Vectors(full(tmp_path / "full", steps[0], 0))
    tables = [changes(name, steps[0][name], steps[1][name]) for name in "ab"]
    reader.apply(write_increment(tmp_path / "1", tables, at(0), at(1, "beef")))
    assert (reader.run, reader.step) == ("beef", 1)


def test_bytes_that_changed_are_named(tmp_path: Path) -> None:
    steps = history(2)
    reader = Vectors(full(tmp_path / "full", steps[0], 0))
    made = increment(tmp_path / "1", steps[0], steps[1], 0, 1)
    whole = {file.name: file.read_bytes() for file in made.iterdir()}
    for name, data in whole.items():
        for place in range(0, len(data), 41):
            broken = bytearray(data)
            broken[place] ^= 4
            if name == "increment.json":
                try:
                    if json.loads(broken) == json.loads(data):
                        continue  # white space
                except ValueError:
                    pass
            (made / name).write_bytes(broken)
            with pytest.raises(CheckpointError):
                reader.apply(made)
        (made / name).write_bytes(data)
    (made / "b.safetensors").unlink()
    with pytest.raises(DamagedError, match="b.safetensors: cannot be read"):
        reader.apply(made)
    with pytest.raises(CheckpointError, match="no increment.json"):
        reader.apply(tmp_path)
    (made / "b.safetensors").write_bytes(whole["b.safetensors"])
    assert reader.step == 0
    reader.apply(made)
    assert content(reader) == steps[1]


def test_static_tables_stay_whole(tmp_path: Path) -> None:
    rows = {key: float(key) for key in range(6)}
    table = StoredTable("s", 6, 2, False, lambda: iter([(0, *vectors_of(rows))]))
    reader = Vectors(write_vectors(tmp_path / "full", [table], 0, run=RUN))
    new = rows | {2: 9.0}
    reader.apply(write_increment(tmp_path / "1", [changes("s", rows, new, is_dynamic=False)], at(0), at(1)))
    assert reader.lookup("s", torch.arange(6))[:, 0].tolist() == list(new.values())
    with pytest.raises(DataError, match="key 6 of a table with keys 0 to 5"):
        reader.lookup("s", torch.tensor([6]))
    for wrong in (
        changes("s", new, {**new, 7: 1.0}, is_dynamic=False)._replace(total=6),
        changes("s", new, {}, is_dynamic=False),
    ):
        made = write_increment(tmp_path / f"wrong{wrong.total}", [wrong], at(1), at(2))
        with pytest.raises(DamagedError, match="are others"):
            reader.apply(made)


def test_a_folder_that_a_job_exports_to_is_followed(tmp_path: Path) -> None:
    """Whoever opens it late reads the newest step; what a killed writer left is not seen and goes with the next."""
    steps = history(5)
    folder, inside = full(tmp_path, steps[0], 0), tmp_path / INCREMENTS / RUN
    early = Vectors(folder)
    assert not early.refresh()
    for end in (1, 2):
        increment(inside / increment_name(end - 1, end), steps[end - 1], steps[end], end - 1, end)
    unfinished = inside / ".increment-dead"
    unfinished.mkdir()
    (unfinished / "a.safetensors").write_text("as far as it came")
    late = Vectors(folder)
    assert early.step == 0 and early.refresh()
    assert content(early) == content(late) == steps[2]
    increment(inside / increment_name(2, 3), steps[2], steps[3], 2, 3)
    assert not unfinished.exists()
    full(tmp_path, steps[4], 4, run="c3d4")  # the job was started again
    assert early.refresh() and (early.run, early.step) == ("c3d4", 4)
    assert content(early) == steps[4]


def test_one_request_reads_one_step(tmp_path: Path) -> None:
    steps = history(3)
    reader = Vectors(full(tmp_path / "full", steps[0], 0))
    request = reader.at_this_step()
    reader.apply(increment(tmp_path / "1", steps[0], steps[1], 0, 1))
    assert content(request) == steps[0] and content(reader) == steps[1]


@pytest.mark.parametrize(
    "requests", [1_000, pytest.param(100_000, marks=pytest.mark.soak)], ids=["a few", "many"]
)
def test_no_request_beside_applies_fails_or_mixes_steps(tmp_path: Path, requests: int) -> None:
    """All rows have the number of the step, so that a request that reads two steps has two numbers."""
    keys = torch.arange(64)
    tables = [{name: dict.fromkeys(range(64), float(step)) for name in "ab"} for step in range(41)]
    reader = Vectors(full(tmp_path / "full", tables[0], 0))
    made = [
        increment(tmp_path / str(end), tables[end - 1], tables[end], end - 1, end) for end in range(1, 41)
    ]
    begun, applied = threading.Event(), threading.Event()
    seen, faults = set[float](), list[str]()

    def ask(number: int) -> None:
        request = reader.at_this_step()
        found = torch.cat([request.lookup(name, keys[number % 32 :]) for name in "ab"])
        values = found.unique().tolist()
        if values != [float(request.step)]:
            faults.append(f"request {number} at step {request.step} read {values}")
        seen.update(values)

    def serve() -> None:
        number = 0
        while number < requests or not applied.is_set():
            ask(number)
            begun.set()
            number += 1
        ask(number)

    server = threading.Thread(target=serve)
    server.start()
    begun.wait()
    for each in made:
        reader.apply(each)
    applied.set()
    server.join()
    assert not faults and {0.0, 40.0} <= seen
