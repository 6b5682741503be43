"""Tables exported for serving read as they were trained."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from shardwise import Vectors
from shardwise.base.errors import CheckpointError, DamagedError, DataError, UsageError
from shardwise.cli.main import app
from shardwise.comm.world import join
from shardwise.engine.state import saved_tables
from shardwise.models.vectors import StoredTable, write_vectors
from tests.engine.tables_net import ROWS, Net, build, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    engine = build(join(), precision="fp32")
    train(engine, 5)
    engine.save(folder, asynchronous=False)
    return engine, folder


def test_every_row_reads_as_in_training(
    trained: tuple[object, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, folder = trained
    monkeypatch.setattr(saved_tables, "CHUNK_BYTES", 2048)  # in many parts
    step, tables = saved_tables.tables_in(folder / "step_00000005")
    vectors = Vectors(write_vectors(tmp_path / "out", tables, step))
    assert vectors.step == 5
    collection = engine.tables["tables"]  # type: ignore[attr-defined]
    for table in collection.tables:
        rows = collection.rows_here(table.name)
        assert vectors.tables[f"tables.{table.name}"] == (len(rows.keys), table.width)
        assert torch.equal(vectors.lookup(f"tables.{table.name}", rows.keys), rows.weights)
    unknown = torch.tensor([[-5, 1]])
    assert not bool(vectors.lookup("tables.grows", unknown)[0, 0].any())
    with pytest.raises(DataError, match=f"key {ROWS} of a table with keys 0 to {ROWS - 1}"):
        vectors.lookup("tables.large", torch.tensor([3, ROWS]))
    with pytest.raises(UsageError, match=r"no table 'tables.larg'; did you mean 'tables.large'"):
        vectors.lookup("tables.larg", unknown)


def test_vectors_go_back_into_a_table(trained: tuple[object, Path], tmp_path: Path) -> None:
    """Also before the tables lie anywhere; the optimizer begins anew."""
    engine, folder = trained
    step, tables = saved_tables.tables_in(folder / "step_00000005")
    vectors = Vectors(write_vectors(tmp_path / "out", tables, step))
    old = engine.tables["tables"]  # type: ignore[attr-defined]
    for is_placed in (False, True):
        new = Net({}).tables
        if is_placed:
            new.place()
        for table in old.tables:
            new.load_rows(table.name, vectors.rows(f"tables.{table.name}"))
        for table in old.tables:
            mine, theirs = new.rows_here(table.name), old.rows_here(table.name)
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.weights, theirs.weights)
            assert not mine.state.get("row_sum", torch.zeros(1)).any()
    with pytest.raises(UsageError, match=r"no table 'tables.larg'; did you mean 'tables.large'"):
        vectors.rows("tables.larg")


def test_files_that_do_not_fit_the_index_are_refused(tmp_path: Path) -> None:
    """Their sums are right, so that only what they say tells."""
    write_vectors(tmp_path, tables_of(1.0), 1)
    index = json.loads((tmp_path / "tables.json").read_text())
    name = next(iter(index["tables"]))
    for change in ({"rows": 3}, {"width": 9}, {"rows": -1}, {"width": "2"}, {"dynamic": 1}):
        broken = index | {"tables": index["tables"] | {name: index["tables"][name] | change}}
        (tmp_path / "tables.json").write_text(json.dumps(broken))
        with pytest.raises(DamagedError, match="as tables.json says|tables.json: tables"):
            Vectors(tmp_path)
    for keys in ([0, 1, 1, 3], [0, 1, 2, 7], [-1, 0, 1, 2]):
        odd = StoredTable(
            "odd", 4, 1, False, lambda keys=keys: iter([(0, torch.tensor(keys), torch.ones(4, 1))])
        )
        with pytest.raises(DamagedError, match="not one for each row"):
            Vectors(write_vectors(tmp_path, [odd], 2)).lookup("odd", torch.tensor([0]))


def test_command(trained: tuple[object, Path], tmp_path: Path) -> None:
    engine, folder = trained
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "step 5, 4 tables" in done.output
    keys = torch.arange(ROWS)
    wanted = engine.tables["tables"].rows_here("large")  # type: ignore[attr-defined]
    found = Vectors(tmp_path / "out").lookup("tables.large", keys)
    assert torch.equal(found[wanted.keys], wanted.weights)
    with pytest.raises(DataError, match="keys are torch.float32"):
        Vectors(tmp_path / "out").lookup("tables.large", keys.float())
    for words in (["--vectors", "int8"], ["--to", "onnx"]):
        refused = CliRunner().invoke(
            app, ["convert", str(folder), str(tmp_path / "x"), "--since", "4", *words]
        )
        assert "--since writes an increment of vectors in fp32" in str(refused.exception)
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "file")])
    assert "file is a file; a run is written into a folder" in str(refused.exception)


def test_half_precision_and_an_empty_table(tmp_path: Path) -> None:
    table = StoredTable("user", 2, 3, True, lambda: iter([(0, torch.tensor([9, 4]), torch.rand(2, 3))]))
    empty = StoredTable("none", 0, 3, True, lambda: iter(()))
    vectors = Vectors(write_vectors(tmp_path, [table, empty], 1, torch.float16))
    assert vectors.lookup("user", torch.tensor([4])).dtype == torch.float16
    assert vectors.lookup("none", torch.tensor([4])).tolist() == [[0.0, 0.0, 0.0]]


KEYS = torch.arange(4)


def tables_of(value: float, during: Callable[[], object] = lambda: None) -> list[StoredTable]:
    """Two tables of which all numbers are ``value``; ``during`` runs between the files of the first and the second."""

    def parts(name: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        if name == "b":
            during()
        yield 0, KEYS, torch.full((4, 2), value)

    return [StoredTable(name, 4, 2, False, lambda name=name: parts(name)) for name in ("a", "b")]  # type: ignore[misc]


def values_in(vectors: Vectors) -> list[float]:
    return [value for name in ("a", "b") for value in vectors.lookup(name, KEYS).unique().tolist()]


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("step", [2, 1], ids=["the next step", "the same step of another run"])
def test_readers_of_a_folder_that_is_written_again(tmp_path: Path, step: int) -> None:
    """Each reads the numbers of one export: who came before, who comes in the middle, who comes after."""
    write_vectors(tmp_path, tables_of(1.0), 1)
    before, others = Vectors(tmp_path), []
    (tmp_path / "c.step_1.safetensors").write_text("somebody else's")
    write_vectors(tmp_path, tables_of(2.0, lambda: others.append(Vectors(tmp_path))), step)
    (middle,), after = others, Vectors(tmp_path)
    assert [values_in(each) for each in (before, middle, after)] == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
    assert [each.step for each in (before, middle, after)] == [1, 1, step]
    again = "-2" if step == 1 else ""
    ours = [f"{name}.step_{step}{again}.safetensors" for name in "ab"]
    assert files_in(tmp_path) == sorted([*ours, "c.step_1.safetensors", "tables.json"])


def test_a_reader_whose_files_go_as_it_opens_takes_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vectors(tmp_path, tables_of(1.0), 1)
    read = Vectors._read_index

    def late(self: Vectors) -> dict[str, object]:
        monkeypatch.setattr(Vectors, "_read_index", read)
        index = read(self)
        write_vectors(tmp_path, tables_of(2.0), 2)
        return index

    monkeypatch.setattr(Vectors, "_read_index", late)
    vectors = Vectors(tmp_path)
    assert vectors.step == 2 and values_in(vectors) == [2.0, 2.0]
    (tmp_path / "b.step_2.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"names .*b.step_2.safetensors, which is not there"):
        Vectors(tmp_path)


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    write_vectors(tmp_path, tables_of(1.0), 1)
    for step in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            write_vectors(tmp_path, tables_of(2.0, killed), step)
    (tmp_path / "b.step_3.safetensors.part").write_text("as far as it came")
    assert values_in(Vectors(tmp_path)) == [1.0, 1.0]
    assert {"a.step_2.safetensors", "a.step_3.safetensors"} <= set(files_in(tmp_path))
    write_vectors(tmp_path, tables_of(4.0), 4)
    assert files_in(tmp_path) == ["a.step_4.safetensors", "b.step_4.safetensors", "tables.json"]
    assert values_in(Vectors(tmp_path)) == [4.0, 4.0]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tables.json"):
        Vectors(tmp_path)
    with pytest.raises(UsageError, match="cannot be a file's"):
        write_vectors(tmp_path, [StoredTable("a/b", 0, 1, True, lambda: iter(()))], 1)
    (tmp_path / "tables.json").write_text(
        '{"format": 1, "step": 1, "tables": {"x": {"file": "../x", "rows": 1, "width": 1, "dynamic": true}}}'
    )
    with pytest.raises(DamagedError, match="outside the folder"):
        Vectors(tmp_path).lookup("x", torch.tensor([1]))
