"""Tables exported for serving read as they were trained."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardwise import Vectors
from shardwise.cli.main import app
from shardwise.comm.world import join
from shardwise.engine import saved_tables
from shardwise.models.vectors import StoredTable, write_vectors
from shardwise.plan.errors import CheckpointError, DamagedError, DataError, UsageError
from tests.engine.tables_net import ROWS, build, train


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
    monkeypatch.setattr(saved_tables, "_CHUNK_BYTES", 2048)  # in many parts
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


def test_command(trained: tuple[object, Path], tmp_path: Path) -> None:
    engine, folder = trained
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "step 5, 4 tables" in done.output
    keys = torch.arange(ROWS)
    wanted = engine.tables["tables"].rows_here("large")  # type: ignore[attr-defined]
    found = Vectors(tmp_path / "out").lookup("tables.large", keys)
    assert torch.equal(found[wanted.keys], wanted.weights)


def test_half_precision_and_an_empty_table(tmp_path: Path) -> None:
    table = StoredTable("user", 2, 3, True, lambda: iter([(0, torch.tensor([9, 4]), torch.rand(2, 3))]))
    empty = StoredTable("none", 0, 3, True, lambda: iter(()))
    vectors = Vectors(write_vectors(tmp_path, [table, empty], 1, torch.float16))
    assert vectors.lookup("user", torch.tensor([4])).dtype == torch.float16
    assert vectors.lookup("none", torch.tensor([4])).tolist() == [[0.0, 0.0, 0.0]]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tables.json"):
        Vectors(tmp_path)
    with pytest.raises(UsageError, match="cannot be a file's"):
        write_vectors(tmp_path, [StoredTable("a/b", 0, 1, True, lambda: iter(()))], 1)
    (tmp_path / "tables.json").write_text(
        '{"format": 1, "step": 1, "tables": {"x": {"file": "../x", "rows": 1}}}'
    )
    with pytest.raises(DamagedError, match="outside the folder"):
        Vectors(tmp_path).lookup("x", torch.tensor([1]))
