"""Tables saved on any number of ranks with any placements load on any others, to the bit."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CheckpointError, DamagedError, MismatchError
from shardwise.base.ragged import Ragged
from shardwise.checkpoint import verify
from shardwise.comm.world import World, join
from shardwise.engine.state import saved_tables
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.saved import StreamedRows
from tests.engine.tables_net import SAMPLES, Net, batch, build, row_of, train
from tests.hostile.table_files import rewrite

TABLES = ("large", "grows", "rare", "wide")
ROUTE = [
    (1, dict.fromkeys(TABLES, "auto")),
    (3, dict.fromkeys(TABLES, "row")),
    (2, dict.fromkeys(TABLES, "column")),
    (2, dict.fromkeys(TABLES, "table")),
    (4, {"large": "row", "grows": "column", "rare": "table", "wide": "data_parallel"}),
    (3, dict.fromkeys(TABLES, "data_parallel")),
    (1, dict.fromkeys(TABLES, "auto")),
]


def _load_and_save(world: World, placements: dict[str, str], source: str, target: str) -> None:
    engine = build(world, placements)
    train(engine, 2)  # what is there before must be gone after
    engine.load(Path(source))
    engine.save(Path(target), asynchronous=False)
    engine.close()


def _files(step: Path) -> dict[str, bytes]:
    """The state files of a step."""
    return {file.name: file.read_bytes() for file in sorted((step / "state").iterdir())}


def test_identical_through_ranks_and_placements(ranks: Any, tmp_path: Path) -> None:
    first = tmp_path / "0"
    engine = build(join())
    train(engine, 6)
    engine.save(first, asynchronous=False)
    wanted, rows = _files(first / "step_00000006"), row_of(engine)
    assert any(name.startswith("table_row_sum") for name in wanted)
    assert engine.table_tallies()["tables.grows"].evicted > 0
    assert rows["rare waiting"]
    engine.close()
    for number, (size, placements) in enumerate(ROUTE[1:], start=1):
        source, target = tmp_path / str(number - 1), tmp_path / str(number)
        if size == 1:
            _load_and_save(join(), placements, str(source), str(target))
        else:
            ranks(size).run(_load_and_save, placements, str(source), str(target))
        assert _files(target / "step_00000006") == wanted, (size, placements)
    assert verify(tmp_path / "3" / "step_00000006") == []
    last = build(join())
    last.load(tmp_path / str(len(ROUTE) - 1))
    assert row_of(last) == rows


def _resumed(world: World, folder: str) -> tuple[Any, Any]:
    """Of five steps after a save, and of the same after a load: losses, gradient norms, and the rows at their end."""
    placements = {"large": "row", "grows": "row", "rare": "row", "wide": "column"}
    engine = build(world, placements)
    train(engine, 5)
    engine.save(Path(folder))
    on = _five_more(engine)
    again = build(world, placements)
    again.load(Path(folder))
    return on, _five_more(again)


def _five_more(engine: Any) -> tuple[list[tuple[float, float]], dict[str, dict[int, list[float]]]]:
    share = SAMPLES // engine.world.size
    first = share * engine.world.rank
    results = []
    for _ in range(5):
        mine = batch(engine.step_count, first, first + share)
        results.append(engine.train_step([mine], [float(share)]))
    rows = row_of(engine)
    engine.close()
    return [(result.loss, result.grad_norm) for result in results], rows


@pytest.mark.parametrize("size", [1, 2])
def test_resumed_run_goes_on_to_the_bit(ranks: Any, tmp_path: Path, size: int) -> None:
    each = [_resumed(join(), str(tmp_path))] if size == 1 else ranks(size).run(_resumed, str(tmp_path))
    for on, back in each:
        assert on == back
        assert len(on[0]) == 5 and on[1]["grows"] and on[1]["rare waiting"]


def test_rows_that_steps_change_while_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread reads the first row when five more steps are over: it is the step of the save all the same."""
    may_read, read = threading.Event(), StreamedRows.read

    def wait_and_read(rows: StreamedRows, kind: str, within: tuple[int, int]) -> Tensor:
        assert may_read.wait(60)
        return read(rows, kind, within)

    monkeypatch.setattr(StreamedRows, "read", wait_and_read)
    engine = build(join())
    train(engine, 6)
    rows = row_of(engine)
    engine.save(tmp_path, asynchronous=True)
    train(engine, 5)
    assert row_of(engine) != rows
    may_read.set()
    engine.save(tmp_path, asynchronous=True)  # waits for the save before it
    later = row_of(engine)
    train(engine, 1)
    engine.wait_for_save()
    for step, expected in ((6, rows), (11, later)):
        other = build(join())
        other.load(tmp_path / f"step_{step:08d}")
        assert row_of(other) == expected
        other.close()
    engine.close()


def test_scores_that_no_load_accepts_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are read when they are written are checked then, and the step is not committed."""
    engine = build(join())
    train(engine, 3)
    part, place = engine._parts.tables.collections["tables"].placed.find("grows")
    index = part.store.dynamic[place].index
    index.set_scores(index.items()[1][:1], -5)
    with pytest.raises(CheckpointError, match="'tables.grows': scores from -5"):
        engine.save(tmp_path, asynchronous=False)
    assert not list(tmp_path.glob("step_*"))
    train(engine, 1)
    index.set_scores(index.items()[1], 1)
    engine.save(tmp_path, asynchronous=False)
    engine.close()


def test_reads_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(join())
    train(engine, 4)
    engine.save(tmp_path, asynchronous=False)
    rows = row_of(engine)
    monkeypatch.setattr(saved_tables, "CHUNK_BYTES", 4096)
    other = build(join())
    other.load(tmp_path)
    assert row_of(other) == rows


def test_weights_alone(tmp_path: Path) -> None:
    engine = build(join())
    train(engine, 4)
    engine.save(tmp_path, asynchronous=False)
    other = build(join(), tables={"optimizer": {"type": "adagrad", "lr": 0.1}})
    with pytest.raises(MismatchError, match=r"row_sum.*keeps sum.*weights_only"):
        other.load(tmp_path)
    other.load(tmp_path, weights_only=True)
    ours, theirs = other.tables["tables"], engine.tables["tables"]
    assert torch.equal(ours.rows_here("large").weights, theirs.rows_here("large").weights)
    assert not bool(ours.rows_here("large").state["sum"].any())


def test_another_model_is_refused(tmp_path: Path) -> None:
    engine = build(join())
    train(engine, 1)
    engine.save(tmp_path, asynchronous=False)
    model = Net({})
    model.tables.tables = tuple(
        table.model_copy(update={"rows": 7} if table.name == "large" else {}) for table in model.tables.tables
    )
    other = shardwise.initialize(model, {"precision": "fp64"})
    with pytest.raises(MismatchError, match=r"tables.large' is 2500 x 6 in the checkpoint and 7 x 6 in this"):
        other.load(tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    engine = build(join())
    train(engine, 1)
    engine.save(tmp_path, asynchronous=False)
    step = tmp_path / "step_00000001"
    file = step / "state" / "table.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"table 'tables\."):
        engine.load(step)
    shutil.rmtree(tmp_path)


# Another policy, another model ---------------------------------------------------------------------------------------


class Evicting(nn.Module):
    """One dynamic table of at most 8 rows, or one that grows old."""

    def __init__(self, kind: str, **tables: Any) -> None:
        super().__init__()
        eviction = EvictionPolicy(type=kind, fraction=0.25, max_age_steps=5 if kind == "age" else None)
        capacity = None if kind == "age" else 8
        policies = [
            TablePolicy(name="t", width=2, dynamic=DynamicPolicy(capacity=capacity, eviction=eviction)),
            *(TablePolicy(name=name, width=2, rows=rows) for name, rows in tables.items()),
        ]
        self.tables = EmbeddingCollection(policies, RowOptimizerPolicy(lr=0.1))
        self.out = nn.Linear(2, 1)

    def forward(self, keys: Tensor) -> Tensor:
        given = {
            name: Ragged.of_ones(keys % 5 if name != "t" else keys) for name in self.tables.feature_names
        }
        return sum(each.sum(0) for each in self.tables(given).values()).sum() + self.out.weight.sum()


def evicting(kind: str, **tables: Any) -> Any:
    return shardwise.initialize(Evicting(kind, **tables), {"batch": {"global_size": 3}})


def learn(engine: Any, *batches: list[int]) -> list[int]:
    """Train; the keys that have a row then."""
    for keys in batches:
        engine.train_step([{"keys": torch.tensor(keys)}])
    return sorted(engine.tables["tables"].rows_here("t").keys.tolist())


LONG = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6]] * 5


@pytest.mark.parametrize(
    ("before", "after", "restart"),
    [
        ("lru", "lru", False),
        ("lfu", "lfu", False),
        ("lfu", "lru", True),
        ("lfu", "age", True),
        ("lru", "lfu", True),
        ("age", "lfu", True),
        ("lru", "age", True),
    ],
)
def test_scores_of_another_eviction_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str, restart: bool
) -> None:
    """A count of uses read as a step is always too old; a step read as a count never goes."""
    engine = evicting(before)
    assert learn(engine, *LONG) == [1, 2, 3, 4, 5, 6]
    engine.save(tmp_path, asynchronous=False)
    engine.close()
    other = evicting(after)
    other.load(tmp_path)
    assert (f"saved with eviction {before} and now has {after}" in caplog.text) == restart
    kept = learn(other, [1, 2, 3], [1, 2, 3])
    assert kept == [1, 2, 3, 4, 5, 6], "nothing is too old at once"
    kept = learn(other, [7, 8, 9], [7, 8, 9], [7, 8, 9])
    assert {7, 8, 9} <= set(kept) or not restart, "old scores do not outlive what comes in every step"
    if after == "age":
        assert learn(other, *[[7, 8, 9]] * 3) == [7, 8, 9]
    other.close()


def test_weights_alone_count_the_steps_anew(tmp_path: Path) -> None:
    """Rows that were used at step 20 are not newer than those of the 20 steps that follow."""
    engine = evicting("lru")
    learn(engine, *LONG)
    engine.save(tmp_path, asynchronous=False)
    engine.close()
    other = evicting("lru")
    other.load(tmp_path, weights_only=True)
    assert learn(other, [7, 8, 9], [7, 8, 9]) == [4, 5, 6, 7, 8, 9]
    other.close()


def test_a_table_that_the_checkpoint_lacks_starts_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new feature beside trained ones; and a vocabulary that grew."""
    engine = evicting("lru", old=6)
    learn(engine, *LONG)
    engine.save(tmp_path, asynchronous=False)
    old = engine.tables["tables"].rows_here("old")
    model = evicting("lru", old=1500, new=7)
    with pytest.raises(MismatchError, match="'tables.new' is not in the checkpoint") as refused:
        model.load(tmp_path)
    assert "missing=" in str(refused.value), "says how its first rows load"
    with pytest.raises(MismatchError, match="'tables.new' is not in the checkpoint"):
        model.load(tmp_path, missing=["tables.old"])
    learn(model, [0, 1, 2])
    model.load(tmp_path, missing=["tables.n*", "tables.old"])
    assert "starts fresh: tables.old rows 6 to 1499" in caplog.text
    assert (
        "stays as it starts with fresh optimizer state: tables.new (is not in the checkpoint)" in caplog.text
    )
    fresh = evicting("lru", old=1500, new=7)
    here, start = model.tables["tables"], fresh.tables["tables"]
    rows, begun = here.rows_here("old"), start.rows_here("old")
    held = rows.keys < 6
    assert rows.keys[held].equal(old.keys) and rows.weights[held].equal(old.weights)
    assert rows.state["row_sum"][held].equal(old.state["row_sum"]) and bool(old.state["row_sum"].any())
    assert rows.weights[~held].equal(begun.weights[~held]) and not rows.state["row_sum"][~held].any()
    assert here.rows_here("new").weights.equal(start.rows_here("new").weights)
    assert here.rows_here("t").keys.equal(engine.tables["tables"].rows_here("t").keys)
    smaller = evicting("lru", old=4)
    with pytest.raises(MismatchError, match="6 x 2 in the checkpoint and 4 x 2"):
        smaller.load(tmp_path)
    smaller.load(tmp_path, missing=["tables.old"])
    assert smaller.not_loaded == ["tables.old"]
    begun = evicting("lru", old=4)
    now, start = (each.tables["tables"].rows_here("old") for each in (smaller, begun))
    assert now.weights.equal(start.weights) and not now.state["row_sum"].any()
    for each in (engine, model, fresh, smaller, begun):
        each.close()


# Files that no save wrote --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda note: note.update(rows=7), "7 rows noted"),
        (lambda note: note.update(rows=-1), "greater than or equal to 0"),
        (lambda note: note.update(rows=2**70), "less than"),
        (lambda note: note.update(buckets=[0] * 1024), "buckets of 0 rows"),
        (lambda note: note.update(buckets=[6]), "at least 1024"),
        (lambda note: note.update(buckets=[2**40] * 1024), "buckets of"),
        (lambda note: note.update(buckets=[-1] + note["buckets"][1:]), "greater than or equal to 0"),
        (lambda note: note.update(buckets=note["buckets"][::-1]), "not those of their buckets"),
        (lambda note: note.pop("buckets"), "do not go together"),
        (lambda note: note.update(waiting=note["buckets"]), "do not go together"),
        (lambda note: note.update(eviction="fifo"), "eviction"),
    ],
)
def test_notes_that_do_not_fit_the_rows_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    """With right checksums; before a row is touched."""
    engine = evicting("lru")
    learn(engine, *LONG)
    engine.save(tmp_path, asynchronous=False)
    step = next(tmp_path.glob("step_*"))
    rewrite(step, "trainer.json", lambda trainer: change(trainer["engine"]["tables"]["tables"]["tables.t"]))
    other = evicting("lru")
    learn(other, [1, 9, 9])
    before = other.tables["tables"].rows_here("t").weights
    with pytest.raises(DamagedError, match=said):
        other.load(step)
    assert other.tables["tables"].rows_here("t").weights.equal(before)
    with pytest.raises(DamagedError, match=said):
        saved_tables.tables_in(step)
    for each in (engine, other):
        each.close()
