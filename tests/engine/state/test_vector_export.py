"""What a running job exports is what its checkpoints hold, on any ranks; planted gaps in the marks are seen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shardwise
from shardwise import Vectors
from shardwise.base.errors import CheckpointError, ConfigError, UsageError
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.steps import open_step
from shardwise.cli.main import app
from shardwise.comm.world import World, join
from shardwise.engine.state import vector_export
from shardwise.engine.state.pieces import model_items
from shardwise.engine.state.saved_tables import tables_in
from shardwise.models.dense_part import DensePart
from shardwise.models.increments import read_increment
from shardwise.models.vectors import INCREMENTS, write_vectors
from shardwise.parallel.embedding.policy import RowOptimizerPolicy
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rows.row_contents import RowContents
from shardwise.parallel.embedding.rows.row_marks import RowMarks
from shardwise.serving.export import dense_in, export_step
from tests.engine import test_tables_model_parallel as tower
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


def exported(world: World, folder: str, placements: dict[str, str] | None = None, stage: int = 0) -> None:
    """Export and save after each of ``STEPS``; between two exports other work leaves no trace or its own."""
    engine = build(world, placements, zero={"stage": stage})
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


def dense_file(index: Path) -> dict[str, Any]:
    """What an index says of its dense part, without the file's name."""
    return {key: value for key, value in json.loads(index.read_text())["dense"].items() if key != "file"}


def check_dense(found: DensePart | None, step: Path, index: Path) -> None:
    """The dense part is that of a full conversion of the step: names, bits, dtypes, and the bytes of its file."""
    wanted = dense_in(step, open_step(step, FileSystem()))
    assert found is not None and found.about == wanted.about and found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert tensor.numel() and tensor.dtype == found.tensors[name].dtype, name
        assert torch.equal(tensor, found.tensors[name]), name
    converted = index.parent / f"converted_{step.name}"
    export_step(step, converted)
    assert dense_file(index) == dense_file(converted / "tables.json")
    shutil.rmtree(converted)


def check(folder: Path) -> dict[str, tuple[int, int]]:
    """Each increment leads to the vectors of its checkpoint; returns (changed, gone) by table of the last one."""
    (run,) = (folder / "vectors" / INCREMENTS).iterdir()
    reader = Vectors(
        write_vectors(folder / "start", tables_in(folder / "steps" / "step_00000004")[1], 4, run=run.name)
    )
    for path, step in zip(sorted(run.iterdir()), STEPS[1:], strict=True):
        reader.apply(path)
        assert reader.step == step and content(reader) == saved(folder, step)
        check_dense(reader.dense, folder / "steps" / f"step_{step:08d}", path / "increment.json")
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
    for name, features in {"large": "ab", "grows": ["grows"], "rare": ["rare"]}.items():
        lists = [batch(step)["sparse"][each].values for step in range(*STEPS[1:]) for each in features]
        assert found[f"tables.{name}"][0] <= len(torch.cat(lists).unique()), (
            f"rows of {name} that no batch touched"
        )
    assert found["tables.grows"][1] > 0
    full = saved(folder, STEPS[-1])
    assert 0 < found["tables.large"][0] < len(full["tables.large"]) / 2
    assert 0 < found["tables.wide"][0] < len(full["tables.wide"]) / 2


@pytest.mark.parametrize(("placements", "stage"), [(SPREAD, 0), (OTHERS, 3)], ids=["spread", "others"])
def test_two_ranks_export_the_same(
    ranks: Any,
    tmp_path: Path,
    alone: tuple[Path, dict[str, tuple[int, int]]],
    placements: dict[str, str],
    stage: int,
) -> None:
    ranks(2).run(exported, str(tmp_path), placements, stage)
    assert check(tmp_path) == alone[1]
    assert not [path for path in (tmp_path / "vectors").iterdir() if path.name.startswith(".")]


def exported_in(world: World, folder: str, layout: tower.Layout) -> None:
    """Export and save after one step and after two."""
    engine = tower.build(world, layout, export={"every": 1}, checkpoint={"keep_last": None})
    for step in (1, 2):
        tower.train(engine, 1)
        assert engine.export(Path(folder) / "vectors") == (step == 1)
        engine.save(Path(folder) / "steps", asynchronous=False)
    engine.close(whole=False)


@pytest.mark.parametrize(
    "layout",
    [
        tower.Layout(2, {"tp": 2}),
        tower.Layout(2, {"pp": 2}, stage=1),
        pytest.param(tower.Layout(2, {"dp": 2}, stage=3, more={"precision": "bf16"}), marks=pytest.mark.soak),
        pytest.param(tower.Layout(4, {"dp": 2, "tp": 2}, stage=3), marks=pytest.mark.soak),
        pytest.param(tower.Layout(4, {"dp": 2, "pp": 2}, stage=2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_dense_part_that_is_cut_is_exported_whole(ranks: Any, tmp_path: Path, layout: tower.Layout) -> None:
    """As a save gathers it, in full exports and increments; of both one reader goes on as the other."""
    ranks(layout.ranks).run(exported_in, str(tmp_path), layout)
    (run,) = (tmp_path / "vectors" / INCREMENTS).iterdir()
    (increment,) = run.iterdir()
    reader = Vectors(tmp_path / "vectors")
    check_dense(reader._opened().dense, tmp_path / "steps/step_00000001", tmp_path / "vectors/tables.json")
    check_dense(reader.dense, tmp_path / "steps/step_00000002", increment / "increment.json")
    assert reader.step == 2 and content(reader) == saved(tmp_path, 2)


def test_a_piece_of_the_dense_part_that_is_left_out_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a rank does not write its last piece."""
    engine = build(join())
    train(engine, 1)

    def without_last(parts: Any, opened: Any) -> list[Any]:
        items = model_items(parts, opened)
        return [*items[:-1], items[-1]._replace(pieces=[])]

    with monkeypatch.context() as patch:
        patch.setattr(vector_export, "model_items", without_last)
        with pytest.raises(CheckpointError, match="tensors were never written: "):
            engine.export(tmp_path / "out")
    assert engine.export(tmp_path / "out") and Vectors(tmp_path / "out").dense is not None
    engine.close()


def gone_keys(engine: Any) -> int:
    parts = [part for each in engine.tables.values() for part in each.placed.parts]
    lists = [index.evictions.keys for part in parts for index in part.store.dynamic]
    return sum(keys.numel() for each in lists for keys in each)


def late_exports(world: World, folder: str) -> list[bool]:
    """Export at once, soon, and after more rows went than there are; one rank alone counts them."""
    engine = build(world)
    gone = engine._parts.tables.gone
    train(engine, 3)
    assert gone_keys(engine) == 0, "no export has been made yet, so the keys are of no use"
    found = [engine.export(Path(folder))]
    train(engine, 2)
    found.append(engine.export(Path(folder)))
    gone.least, gone._MOST_PARTS = 0, 2
    if world.rank == 0:
        gone.least = 1 << 16
    most = 0
    for _ in range(25):
        train(engine, 1)
        most = max(most, gone_keys(engine))
    rows = sum(tally.rows for tally in engine.table_tallies().values())
    assert 0 < most < rows
    assert gone.are_kept == (world.rank == 0 and world.size > 1)
    found.append(engine.export(Path(folder)))
    assert gone.are_kept and gone_keys(engine) == 0
    engine.close()
    return found


def test_keys_of_rows_that_went_are_bounded(ranks: Any, tmp_path: Path) -> None:
    """An export that comes late writes full vectors on all ranks, if one of them has forgotten keys."""
    assert ranks(2).run(late_exports, str(tmp_path)) == [[True, False, True]] * 2
    reader = Vectors(tmp_path)
    assert reader.step == 30 and content(reader)


def test_convert_since_writes_no_more_rows_and_leads_to_the_same(
    alone: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    folder, marked = alone
    steps = folder / "steps"

    def convert(*words: object) -> str:
        done = CliRunner().invoke(app, ["convert", *map(str, words)])
        return done.output if done.exit_code == 0 else str(done.exception or done.output)

    assert "step 8, 4 tables" in convert(steps / "step_00000008", tmp_path / "full")
    said = convert(steps, tmp_path / "delta", "--since", 8)
    assert "rows came or changed" in said and "went, and the dense part, 1.1 KiB, for Scorer.apply" in said
    reader = Vectors(tmp_path / "full")
    reader.apply(tmp_path / "delta")
    assert content(reader) == saved(folder, 24)
    check_dense(reader.dense, steps / "step_00000024", tmp_path / "delta" / "increment.json")
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
                patch.setattr(RowMarks, "changed", lambda self, rows, since: self._steps[rows] > since)
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
    (store,) = [part.store for part in engine.tables["tables"].placed.parts if "large" in str(part.tables)]
    rows = RowContents(store)
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


def test_a_name_that_is_no_files_is_refused_before_the_first_step() -> None:
    net = Net({})
    net.tables.tables = tuple(
        table.model_copy(update={"name": "a/b", "features": table.feature_names})
        if table.name == "wide"
        else table
        for table in net.tables.tables
    )
    with pytest.raises(UsageError, match="'tables.a/b': its name cannot be a file's"):
        shardwise.initialize(net, {"export": {"every": 4}})
