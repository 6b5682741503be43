"""What a running job exports is what its checkpoints hold, on any ranks; planted gaps in the marks are seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shardwise
from shardwise import Vectors
from shardwise.base.errors import CheckpointError, ConfigError, UsageError
from shardwise.cli.main import app
from shardwise.comm.world import World, join
from shardwise.engine.state import vector_export
from shardwise.engine.state.saved_tables import tables_in
from shardwise.models.increments import read_increment
from shardwise.models.vectors import INCREMENTS, write_vectors
from shardwise.parallel.embedding.policy import RowOptimizerPolicy
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rows.row_marks import RowMarks
from tests.engine.tables_net import Net, batch, train

STEPS = (4, 8, 24)
SPREAD = {"large": "row", "grows": "row", "rare": "table", "wide": "column"}
OTHERS = {"large": "data_parallel", "grows": "column", "rare": "data_parallel", "wide": "table"}
EXACT = RowOptimizerPolicy(type="adam", lr=0.02, exact=True, betas=(0.05, 0.9))
"""An Adam that moves a row for 15 steps after its last gradient."""


def build(world: World, placements: dict[str, str] | None = None, **config: Any) -> Any:
    """An engine of a net of which one table has an exact Adam."""
    net = Net(placements or {})
    net.tables.tables = tuple(
        table.model_copy(update={"optimizer": EXACT}) if table.name == "wide" else table
        for table in net.tables.tables
    )
    config = {"comm": {"timeout_s": 60}, "export": {"every": 4}, "checkpoint": {"keep_last": None}, **config}
    return shardwise.initialize(net, config, world=world)


def exported(world: World, folder: str, placements: dict[str, str] | None = None) -> None:
    """Export and save after each of ``STEPS``; between two exports other work leaves no trace or its own."""
    engine = build(world, placements)
    root = Path(folder)
    for step in STEPS:
        train(engine, step - engine.step_count)
        assert engine.export(root / "vectors") == (step == STEPS[0])
        assert not engine.export(root / "vectors")  # this step is there
        engine.save(root / "steps", asynchronous=False)
    engine.close()


def content(vectors: Vectors) -> dict[str, dict[int, list[float]]]:
    found = {}
    for name in vectors.tables:
        rows = vectors.rows(name)
        found[name] = dict(zip(rows.keys.tolist(), rows.weights.tolist(), strict=True))
        assert vectors.tables[name][0] == len(found[name]) == len(rows.keys)
        assert torch.equal(vectors.lookup(name, rows.keys), rows.weights)
    return found


def saved(folder: Path, step: int) -> dict[str, dict[int, list[float]]]:
    """The vectors in a checkpoint."""
    number, tables = tables_in(folder / "steps" / f"step_{step:08d}")
    return content(Vectors(write_vectors(folder / f"full_{step}", tables, number)))


def check(folder: Path) -> dict[str, tuple[int, int]]:
    """Each increment leads to the vectors of its checkpoint; returns (changed, gone) by table of the last one."""
    (run,) = (folder / "vectors" / INCREMENTS).iterdir()
    reader = Vectors(
        write_vectors(folder / "start", tables_in(folder / "steps" / "step_00000004")[1], 4, run=run.name)
    )
    for path, step in zip(sorted(run.iterdir()), STEPS[1:], strict=True):
        reader.apply(path)
        assert reader.step == step and content(reader) == saved(folder, step)
    assert content(Vectors(folder / "vectors")) == saved(folder, STEPS[-1])
    return {name: (len(rows.keys), len(rows.gone)) for name, rows in read_increment(path).tables.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]]]:
    folder = tmp_path_factory.mktemp("alone")
    exported(join(), str(folder))
    return folder, check(folder)


def test_increments_lead_to_the_vectors_of_the_checkpoints(
    alone: tuple[Path, dict[str, tuple[int, int]]],
) -> None:
    """Rows go, static rows that no batch touched are not written, and the exact Adam's rows that no longer move."""
    folder, found = alone
    assert found["tables.grows"][1] > 0
    full = saved(folder, STEPS[-1])
    assert 0 < found["tables.large"][0] < len(full["tables.large"]) / 2
    assert 0 < found["tables.wide"][0] < len(full["tables.wide"]) / 2


@pytest.mark.parametrize("placements", [SPREAD, OTHERS], ids=["spread", "others"])
def test_two_ranks_export_the_same(
    ranks: Any, tmp_path: Path, alone: tuple[Path, dict[str, tuple[int, int]]], placements: dict[str, str]
) -> None:
    ranks(2).run(exported, str(tmp_path), placements)
    assert check(tmp_path) == alone[1]
    assert not [path for path in (tmp_path / "vectors").iterdir() if path.name.startswith(".")]


def test_convert_since_writes_no_more_rows_and_leads_to_the_same(
    alone: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    folder, marked = alone
    steps = folder / "steps"

    def convert(*words: object) -> str:
        done = CliRunner().invoke(app, ["convert", *map(str, words)])
        return done.output if done.exit_code == 0 else str(done.exception or done.output)

    assert "step 8, 4 tables" in convert(steps / "step_00000008", tmp_path / "full")
    assert "rows came or changed" in convert(steps, tmp_path / "delta", "--since", 8)
    reader = Vectors(tmp_path / "full")
    reader.apply(tmp_path / "delta")
    assert content(reader) == saved(folder, 24)
    for name, rows in read_increment(tmp_path / "delta").tables.items():
        assert len(rows.keys) <= marked[name][0] and len(rows.gone) <= marked[name][1], name
    assert "the newest step of" in convert(steps, tmp_path / "x", "--since", 24)
    assert "there is no step" in convert(steps, tmp_path / "x", "--since", 5)
    assert "holds no checkpoints" in convert(tmp_path, tmp_path / "x", "--since", 4)
    assert "exists already" in convert(steps, tmp_path / "delta", "--since", 8)
    assert not (tmp_path / "x").exists()


def _unmarked(name: str) -> Callable[..., Any]:
    return lambda *_, **__: None


@pytest.mark.parametrize("gap", ["the step", "loaded rows", "rows that went", "a row that still moves"])
def test_a_change_without_a_mark_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: str) -> None:
    """Planted: one path that changes rows leaves no mark. Without the plant the same steps pass."""
    for is_planted in (False, True):
        folder = tmp_path / str(is_planted)
        with monkeypatch.context() as patch:
            engine = build(join())
            train(engine, 4)
            if is_planted and gap == "the step":
                patch.setattr(RowMarks, "touch", _unmarked(gap))
            if is_planted and gap == "rows that went":
                patch.setattr(DynamicIndex, "forget_keys", _forget_quietly)
            if is_planted and gap == "a row that still moves":
                patch.setattr(RowMarks, "changed", lambda self, rows, since, stood: self._steps[rows] > since)
            engine.export(folder / "vectors")
            if gap == "loaded rows":
                with monkeypatch.context() as inner:
                    if is_planted:
                        inner.setattr(RowMarks, "touch", _unmarked(gap))
                    keys = torch.tensor([2011, 2012])
                    engine.tables["tables"].load_rows("large", KeyedRows.of_weights(keys, torch.ones(2, 6)))
            train(engine, 4)
            engine.export(folder / "vectors")
            engine.save(folder / "steps", asynchronous=False)
            engine.close()
        same = _is_same(folder)
        assert same is not is_planted, gap


def _forget_quietly(self: DynamicIndex, keys: torch.Tensor) -> None:
    self.evictions.count += self.index.remove(keys).numel()


def _is_same(folder: Path) -> bool:
    try:
        return content(Vectors(folder / "vectors")) == saved(folder, 8)
    except CheckpointError:
        return False


def test_discarded_steps_leave_no_mark(tmp_path: Path) -> None:
    engine = build(join())
    train(engine, 4)
    engine.export(tmp_path / "vectors")
    (rows,) = [part.store for part in engine.tables["tables"].placed.parts if "large" in str(part.tables)]
    before = rows.rows_here(0, since=4).keys.numel()
    engine.backward(engine(**batch(4)))
    engine.discard()
    assert before == rows.rows_here(0, since=4).keys.numel() == 0
    engine.close()


def test_a_load_or_another_folder_or_enough_increments_begin_anew(tmp_path: Path) -> None:
    engine = build(join(), export={"every": 1, "full_every": 2})
    train(engine, 2)
    engine.save(tmp_path / "steps", asynchronous=False)
    first, other = tmp_path / "first", tmp_path / "other"
    assert engine.export(first)
    reader = Vectors(first)
    for step in (3, 4):
        train(engine, 1)
        assert not engine.export(first)
        assert reader.refresh() and reader.step == step
    train(engine, 1)
    assert engine.export(first)  # after two increments
    assert reader.refresh() and reader.step == 5
    assert len(list((first / INCREMENTS).iterdir())) == 0
    engine.load(tmp_path / "steps")
    train(engine, 1)
    assert engine.export(first)
    assert reader.refresh() and reader.step == 3
    assert engine.export(other) and Vectors(other).step == 3
    engine.close()


def test_an_export_that_fails_is_followed_by_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(join())
    train(engine, 2)
    engine.export(tmp_path / "out")
    reader = Vectors(tmp_path / "out")
    train(engine, 2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(vector_export, "write_increment", full)
        with pytest.raises(CheckpointError, match="No space left"):
            engine.export(tmp_path / "out")
    assert not reader.refresh() and reader.step == 2
    train(engine, 1)
    assert engine.export(tmp_path / "out")
    assert reader.refresh() and reader.step == 5
    engine.close()


def test_marks_are_counted(tmp_path: Path) -> None:
    plain, marked = build(join(), export=None), build(join())
    for engine in (plain, marked):
        train(engine, 1)
    rows = sum(tally.rows for tally in marked.table_tallies().values())
    assert marked.tables["tables"].bytes_here - plain.tables["tables"].bytes_here == 4 * rows
    registered = [info for info in marked.plan.registry.of_kind("table") if info.label == "mark"]
    assert len(registered) == 4 and {info.dtype for info in registered} == {torch.int32}
    with pytest.raises(UsageError, match=r"export: the tables keep no marks .* set export.every"):
        plain.export(tmp_path)
    for engine in (plain, marked):
        engine.close()
    with pytest.raises(ConfigError, match="export: the model has no EmbeddingCollection"):
        shardwise.initialize(torch.nn.Linear(2, 2), {"export": {"every": 1}})
