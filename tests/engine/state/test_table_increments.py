"""Saves that hold only the rows that changed load as full ones do, and what they need is kept, checked and named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import CheckpointError, ConfigError, DamagedError, MismatchError
from shardwise.checkpoint import verify
from shardwise.checkpoint.save import CheckpointSave
from shardwise.cli.convert import _export_since
from shardwise.comm.world import World, join
from shardwise.engine.state.saved_tables import tables_in
from shardwise.models.increments import read_increment
from shardwise.models.vectors import Vectors, write_vectors
from shardwise.parallel.embedding.rows.row_marks import RowMarks
from tests.engine.state.test_vector_export import OTHERS, SPREAD, content
from tests.engine.state.test_vector_export import build as any_net
from tests.engine.tables_net import Net, row_of, train


def build(world: World, placements: dict[str, str] | None = None, **checkpoint: Any) -> Any:
    policy = {"tables_full_every": 3, "keep_last": None, "asynchronous": False, **checkpoint}
    return any_net(world, placements, export=None, checkpoint=policy)


def step_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def saved_bytes(step: Path) -> int:
    return sum(file.stat().st_size for file in (step / "state").glob("table*"))


def chain(world: World, folder: str, placements: dict[str, str] | None = None) -> None:
    """Steps 4 (full), 8 and 24 that continue it."""
    engine = build(world, placements)
    for step in (4, 8, 24):
        train(engine, step - engine.step_count)
        engine.save(Path(folder))
    engine.close()


def full_copy(world: World, source: str, target: str, placements: dict[str, str] | None = None) -> None:
    """Load a step and save it again, which is full after a load."""
    engine = build(world, placements)
    engine.load(Path(source))
    engine.save(Path(target))
    engine.close()


def files(step: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((step / "state").iterdir())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The chain of one rank, and the rows of the engine that saved it."""
    folder = tmp_path_factory.mktemp("alone")
    engine, rows = build(join()), {}
    for step in (4, 8, 24):
        train(engine, step - engine.step_count)
        engine.save(folder)
        if step == 24:
            rows = row_of(engine)
    engine.close()
    return folder, rows


def test_a_chain_loads_as_the_rows_that_were_saved(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, rows = alone
    assert saved_bytes(step_of(folder, 24)) < saved_bytes(step_of(folder, 8)) * 2
    assert saved_bytes(step_of(folder, 8)) < saved_bytes(step_of(folder, 4)) / 3
    engine = build(join())
    engine.load(folder)
    assert engine.step_count == 24 and row_of(engine) == rows
    ahead = train(engine, 2)
    engine.load(step_of(folder, 24))
    assert train(engine, 2) == ahead
    engine.close()


@pytest.mark.parametrize("placements", [SPREAD, OTHERS], ids=["spread", "others"])
def test_two_ranks_read_and_write_the_same_chain(
    ranks: Any, alone: tuple[Path, dict[str, Any]], tmp_path: Path, placements: dict[str, str]
) -> None:
    folder, _ = alone
    full_copy(join(), str(folder), str(tmp_path / "wanted"))
    wanted = files(step_of(tmp_path / "wanted", 24))
    ranks(2).run(full_copy, str(folder), str(tmp_path / "read"), placements)
    read = files(step_of(tmp_path / "read", 24))
    # Rows without gradients rest, except where their columns lie on several ranks: they come with a later step.
    apart = {"table_exp_avg_sq.safetensors", "table_step.safetensors"} if placements is SPREAD else set()
    assert read.keys() == wanted.keys()
    assert {name for name in read if read[name] != wanted[name]} <= apart
    engine, losses = build(join()), []
    for each in ("read", "wanted"):
        engine.load(step_of(tmp_path / each, 24))
        losses.append(train(engine, 2))
    engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    ranks(2).run(chain, str(tmp_path / "chain"), placements)
    for step in (8, 24):
        ours, theirs = step_of(tmp_path / "chain", step), step_of(folder, step)
        assert {n: len(d) for n, d in files(ours).items()} == {n: len(d) for n, d in files(theirs).items()}
    full_copy(join(), str(tmp_path / "chain"), str(tmp_path / "written"))
    keys = {name: data for name, data in files(step_of(tmp_path / "written", 24)).items() if "key" in name}
    assert keys == {name: data for name, data in wanted.items() if "key" in name}


def test_convert_reads_chains(alone: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, rows = alone
    for step in (8, 24):
        write_vectors(tmp_path / str(step), tables_in(step_of(folder, step))[1], step, run="r")
    (engine_rows,) = [rows["grows"]]
    found = content(Vectors(tmp_path / "24"))
    assert {key: line[:6] for key, line in engine_rows.items()} == found["tables.grows"]
    _export_since(folder, tmp_path / "delta", 8)
    increment = read_increment(tmp_path / "delta")
    reader = Vectors(
        write_vectors(tmp_path / "8", tables_in(step_of(folder, 8))[1], 8, run=increment.start.run)
    )
    reader.apply(tmp_path / "delta")
    assert content(reader) == found


def test_damage_to_a_link_is_named(alone: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = alone
    engine = build(join())

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    assert verify(step_of(folder, 24)) == []
    flipped = fresh("flipped")
    file = step_of(flipped, 4) / "state" / "table.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    damage = verify(step_of(flipped, 24))
    assert [each.file for each in damage] == ["step_00000004/state/table.safetensors"]
    with pytest.raises(DamagedError, match=r"step_00000004.*do not match their CRC-32"):
        engine.load(step_of(flipped, 24))
    missing = fresh("missing")
    shutil.rmtree(step_of(missing, 4))
    with pytest.raises(
        DamagedError, match=r"only the rows that changed since step 4, and .*step_00000004 is not there"
    ):
        engine.load(step_of(missing, 24))
    assert "changed since step 4" in str(verify(step_of(missing, 24))[0])
    foreign = fresh("foreign")
    other = build(join())
    train(other, 3)
    train(other, 1)
    other.save(tmp_path / "other")
    other.close()
    shutil.rmtree(step_of(foreign, 4))
    shutil.copytree(step_of(tmp_path / "other", 4), step_of(foreign, 4))
    with pytest.raises(DamagedError, match="is another one"):
        engine.load(step_of(foreign, 24))
    engine.load(foreign)  # the newest step that is whole
    assert engine.step_count == 4
    engine.close()


def names(folder: Path) -> list[int]:
    return sorted(int(each.name[5:]) for each in folder.glob("step_*"))


def test_retention_keeps_what_a_chain_needs(tmp_path: Path) -> None:
    engine = build(join(), keep_last=1)
    kept = []
    for _ in range(5):
        train(engine, 1)
        engine.save(tmp_path)
        kept.append(names(tmp_path))
    assert kept == [[1], [1, 2], [1, 3], [4], [4, 5]]
    engine.load(tmp_path)
    train(engine, 1)
    engine.save(tmp_path)  # full after a load
    assert names(tmp_path) == [6]
    engine.close()


def test_a_save_that_fails_breaks_no_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(join(), keep_last=1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def save(fails: bool = False) -> None:
        train(engine, 1)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(CheckpointSave, "_commit", fail)
                with pytest.raises(CheckpointError):
                    engine.save(tmp_path)
            else:
                engine.save(tmp_path)

    save(fails=True)
    save()
    save(fails=True)
    save()
    assert names(tmp_path) == [2, 4]
    save()
    save(fails=True)  # a full one
    assert names(tmp_path) == [2, 5]
    rows = row_of(engine)
    save()
    assert names(tmp_path) == [7]
    engine.close()
    again = build(join())
    again.load(tmp_path)
    assert row_of(again) != rows and again.step_count == 7
    again.close()


def test_a_change_without_a_mark_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_planted in (False, True):
        folder = tmp_path / str(is_planted)
        engine = build(join())
        train(engine, 2)
        engine.save(folder)
        with monkeypatch.context() as patch:
            if is_planted:
                patch.setattr(RowMarks, "touch", lambda *_: None)
            train(engine, 2)
        engine.save(folder)
        again = build(join())
        again.load(folder) if not is_planted else None
        if is_planted:
            with pytest.raises(DamagedError):  # rows of new keys are nowhere
                again.load(step_of(folder, 4))
        else:
            assert row_of(again) == row_of(engine)
        engine.close()
        again.close()


def test_without_tables_the_key_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="checkpoint.tables_full_every: the model has no EmbeddingCollection"
    ):
        shardwise.initialize(torch.nn.Linear(2, 2), {"checkpoint": {"tables_full_every": 2}})


def with_other_widths(world: World) -> Any:
    """The same dense part behind tables of which two have the widths of each other."""
    widths = {"rare": 8, "wide": 6}
    net = Net({})
    net.tables.tables = tuple(
        table.model_copy(update={"width": widths.get(table.name, table.width)}) for table in net.tables.tables
    )
    policy = {"tables_full_every": 3, "keep_last": None, "asynchronous": False}
    return shardwise.initialize(net, {"checkpoint": policy}, world=world)


def test_a_width_that_changed_under_a_chain_is_said(tmp_path: Path) -> None:
    """By a load of the chain, and by an increment between steps of both widths."""
    chain(join(), str(tmp_path / "steps"))
    engine = with_other_widths(join())
    with pytest.raises(MismatchError, match=r"tables.rare.*\b6\b.*\b8\b"):
        engine.load(tmp_path / "steps")
    train(engine, 25)
    engine.save(tmp_path / "steps")
    engine.close()
    for since in (4, 24):  # a full step, and one that continues it
        with pytest.raises(
            MismatchError,
            match=rf"step_00000025: table 'tables.rare' has width 8 and is dynamic; in .*{since} it has",
        ):
            _export_since(tmp_path / "steps", tmp_path / "delta", since)
    assert not (tmp_path / "delta").exists()
