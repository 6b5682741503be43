"""Saves and loads in the middle of a step, and loads of paths that hold no step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CheckpointError, MismatchError, TableFullError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World, join
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    EvictionPolicy,
    RowOptimizerPolicy,
    TablePolicy,
)
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex
from shardwise.parallel.embedding.rows.row_contents import RowContents
from shardwise.parallel.embedding.saved import SCORE, StreamedRows
from tests.engine.nets import Language, seeded
from tests.engine.tables_net import batch, build, row_of, train

WAYS = ("accumulated", "looked at", "forward raised")


def start(**config: Any) -> Any:
    return shardwise.initialize(
        seeded(Language), {"comm": {"timeout_s": 10.0}, **config}, world=join(quiet=True)
    )


def piece(number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def step(engine: Any, number: int) -> Any:
    for i in range(engine.accumulation):
        engine.backward(engine(*piece(10 * number + i)))
        result = engine.step()
    return result


# Loads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_between_backward_and_step_drops_the_running_step(
    tmp_path: Path, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradient of the microbatch before the load counted in the first step after it."""
    engine = start(batch={"accumulation": 2}, zero={"stage": stage})
    step(engine, 0)
    engine.save(tmp_path, asynchronous=False)
    wanted = step(engine, 1)
    engine.backward(engine(*piece(77)))
    engine.step()
    with caplog.at_level(logging.WARNING, "shardwise"):
        engine.load(tmp_path)
    assert "load: 1 backward passes of the running step are dropped" in caplog.text
    found = step(engine, 1)
    assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
    engine.close()


def test_a_path_without_steps_is_refused_by_what_it_is(tmp_path: Path) -> None:
    """Such loads returned None, and a random model trained on."""
    engine = start()
    engine.save(tmp_path / "runs" / "good", asynchronous=False)
    (tmp_path / "empty").mkdir()
    torch.save(engine.state_dict(), tmp_path / "model.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    inside = tmp_path / "runs" / "good" / "step_00000000" / "model" / "model.safetensors"
    said = {
        tmp_path / "runs" / "godo": "did you mean 'good'",
        tmp_path / "nowhere" / "deep": "required=False",
        tmp_path / "model.pt": "engine.load_state_dict(torch.load(",
        tmp_path / "model.safetensors": "safetensors.torch.load_file(",
        inside: "belongs to the step",
    }
    for path, text in said.items():
        with pytest.raises(CheckpointError, match="load: ") as error:
            engine.load(path)
        assert text in str(error.value), path
    assert engine.load(tmp_path / "empty") is None
    assert engine.load(tmp_path / "nowhere", required=False) is None
    with pytest.raises(CheckpointError, match="holds no step"):
        engine.load(tmp_path / "empty", required=True)
    (tmp_path / "runs" / "good").rename(tmp_path / "runs" / "checkpoints")
    with pytest.raises(CheckpointError, match="folder of a run"):
        engine.load(tmp_path / "runs")
    assert engine.load(tmp_path / "runs" / "checkpoints", required=True) == {}
    engine.close()


# Tables ------------------------------------------------------------------------------------------------------------


class Click(nn.Module):
    """One dynamic table below a linear layer."""

    def __init__(self, optimizer: str = "sgd", **dynamic: Any):
        super().__init__()
        policy = TablePolicy(name="t", width=2, dynamic=DynamicPolicy(**dynamic))
        self.tables = EmbeddingCollection([policy], RowOptimizerPolicy(type=optimizer, lr=0.1), seed=1)
        self.out = nn.Linear(2, 1)

    def forward(self, keys: list[list[int]]) -> Tensor:
        return self.out(self.tables({"t": Ragged.of_lists(keys)})["t"]).square().mean()


def click(world: World, model: Click, **config: Any) -> Any:
    config = {"precision": "fp64", "check_first_step": "off", "comm": {"timeout_s": 10}, **config}
    return shardwise.initialize(model, config, world=world)


def _fails(model: nn.Module, given: dict[str, Any]) -> None:
    model(**given)
    raise RuntimeError("a user's own")


def saved_mid_step(world: World, folder: str, way: str) -> Any:
    """Return the rows after two steps, and those that a load finds of a save in the third."""
    settings = {"batch": {"accumulation": 2}, "checkpoint": {"keep_last": 1}}
    engine = build(world, **settings)
    train(engine, 2, microbatches=2)
    engine.save(folder, asynchronous=False)
    before = row_of(engine)
    share = 12 // world.size
    mine = batch(50, world.rank * share, (world.rank + 1) * share)
    if way == "forward raised":
        with pytest.raises(RuntimeError):
            engine.run(_fails, engine.module, mine)
    else:
        loss = engine(mine)
        if way == "accumulated":
            engine.backward(loss, 6.0)
            engine.step()
    engine.save(folder, asynchronous=False)
    other = build(world, **settings)
    other.load(folder)
    found = row_of(other)
    other.close()
    engine.discard()
    engine.close()
    return before, found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_save_in_the_middle_of_a_step_holds_the_rows_of_the_last_one(
    ranks: Any, tmp_path: Path, size: int, way: str
) -> None:
    """No load could read it, and keep_last: 1 had removed the good step."""
    found = (
        [saved_mid_step(join(quiet=True), str(tmp_path), way)]
        if size == 1
        else ranks(size).run(saved_mid_step, str(tmp_path), way)
    )
    for before, after in found:
        assert after == before


@pytest.mark.parametrize("way", ["copied", "read as they are written"])
def test_a_save_asks_of_rows_what_a_load_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    engine = click(join(quiet=True), Click())
    engine.train_step([{"keys": [[1, 2]]}])
    engine.save(tmp_path, asynchronous=False)
    table, read = DynamicIndex.rows_of_last_step, StreamedRows.read
    words = "table 'tables.t': scores from 8 to 8 after 1 steps"
    if way == "copied":
        words = f"nothing is written: {words}"
        monkeypatch.setattr(RowContents, "streams", False)
        monkeypatch.setattr(
            DynamicIndex, "rows_of_last_step", lambda self: (*table(self)[:2], table(self)[2] + 7)
        )
    else:
        monkeypatch.setattr(
            StreamedRows, "read", lambda self, kind, within: read(self, kind, within) + 7 * (kind == SCORE)
        )
    with pytest.raises(CheckpointError, match=words):
        engine.save(tmp_path, asynchronous=False)
    monkeypatch.undo()
    assert engine.load(tmp_path) == {}
    engine.close()


def ages(world: World, placement: str) -> list[bool]:
    """Return which steps a table of four rows refuses; rank 0 brings keys, then rank 1."""
    model = Click(capacity=4, eviction=EvictionPolicy(type="age", max_age_steps=1))
    model.tables.tables = (model.tables.tables[0].model_copy(update={"placement": placement}),)
    engine = click(world, model)
    refused = []
    for number in range(4):
        keys = [4 * number + i for i in range(4)]
        mine = keys if number % world.size == world.rank else []
        try:
            engine.train_step([{"keys": [mine]}])
            refused.append(False)
        except TableFullError:
            refused.append(True)
    engine.close()
    return refused


@pytest.mark.parametrize("placement", ["row", "data_parallel"])
def test_rows_that_go_by_age_are_not_counted_on_a_rank_without_keys(ranks: Any, placement: str) -> None:
    """Two of four steps were refused on two ranks, and none on one."""
    assert ranks(2).run(ages, placement) == [[False] * 4] * 2


def test_more_rows_than_a_table_holds_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    """Such rows were taken, and every later step was refused."""
    world = join(quiet=True)
    engine = click(world, Click())
    engine.train_step([{"keys": [[1, 2, 3, 4, 5]]}])
    engine.save(tmp_path, asynchronous=False)
    rows = engine.tables["tables"].rows_here("t")
    engine.close()
    small = click(world, Click(capacity=3))
    with pytest.raises(MismatchError, match=r"has 5 rows in the checkpoint, may hold 3 here"):
        small.load(tmp_path)
    with pytest.raises(MismatchError, match="5 rows for a table of at most 3 that evicts none"):
        small.tables["tables"].load_rows("t", rows)
    small.train_step([{"keys": [[7, 8]]}])
    small.close()
    evicts = click(world, Click(capacity=3, eviction=EvictionPolicy(type="lru")))
    evicts.load(tmp_path)
    evicts.train_step([{"keys": [[5]]}])
    assert evicts.table_tallies()["tables.t"].rows <= 3
    evicts.close()


# Names and optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    """Each name held _orig_mod., which no other model has."""
    world = join(quiet=True)

    def make(is_compiled: bool) -> Any:
        model = seeded(Language)
        given: Any = torch.compile(model, backend="eager") if is_compiled else model
        return shardwise.initialize(given, {"comm": {"timeout_s": 10.0}}, world=world)

    compiled, plain = make(True), make(False)
    for engine in (compiled, plain):
        engine.train_step([piece(0)])
    wanted = plain.state_dict()
    state = compiled.state_dict()
    assert state.keys() == wanted.keys()
    assert compiled.mapped_state_dict(tmp_path).keys() == wanted.keys()
    for source, target in ((compiled, plain), (plain, compiled)):
        folder = tmp_path / str(source is plain)
        source.save(folder, asynchronous=False)
        with safe_open(folder / "step_00000001" / "model" / "model.safetensors", "pt") as file:
            assert not any("_orig_mod" in name for name in file.keys())  # noqa: SIM118
        target.train_step([piece(1)])
        target.load(folder)
        assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())
        assert (target.full_tensor(target.plan.registry.of_kind("moment")[0].name, "exp_avg") != 0).any()
    for given in (state, {f"_orig_mod.{name}": value for name, value in state.items()}):
        compiled.load_state_dict(given)
        plain.load_state_dict(given)
    compiled.close()
    plain.close()
    torch._dynamo.reset()


def test_moments_that_the_optimizer_does_not_keep_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Moments were dropped without a word."""
    engine = start(optimizer={"type": "adamw", "lr": 1e-3})
    step(engine, 0)
    engine.save(tmp_path, asynchronous=False)
    engine.close()
    other = start(optimizer={"type": "sgd", "lr": 1e-3})
    with caplog.at_level(logging.WARNING, "shardwise"):
        other.load(tmp_path)
    assert (
        "holds the optimizer state exp_avg, exp_avg_sq; this optimizer keeps none: it is dropped"
        in caplog.text
    )
    other.close()
