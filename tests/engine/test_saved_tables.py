"""Tables saved on any number of ranks with any placements load on any others, to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint import verify
from shardwise.comm.world import World, join
from shardwise.engine import saved_tables
from shardwise.plan.errors import DamagedError, MismatchError
from tests.engine.tables_net import SAMPLES, Net, batch, build, rows_of, train

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
    wanted, rows = _files(first / "step_00000006"), rows_of(engine)
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
    assert rows_of(last) == rows


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
    rows = rows_of(engine)
    engine.close()
    return [(result.loss, result.grad_norm) for result in results], rows


@pytest.mark.parametrize("size", [1, 2])
def test_resumed_run_goes_on_to_the_bit(ranks: Any, tmp_path: Path, size: int) -> None:
    each = [_resumed(join(), str(tmp_path))] if size == 1 else ranks(size).run(_resumed, str(tmp_path))
    for on, back in each:
        assert on == back
        assert len(on[0]) == 5 and on[1]["grows"] and on[1]["rare waiting"]


def test_reads_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(join())
    train(engine, 4)
    engine.save(tmp_path, asynchronous=False)
    rows = rows_of(engine)
    monkeypatch.setattr(saved_tables, "_CHUNK_BYTES", 4096)
    other = build(join())
    other.load(tmp_path)
    assert rows_of(other) == rows


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
