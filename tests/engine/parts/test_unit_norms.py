"""Gradient norms of Units equal those of one process with a plain torch loop, on every layout."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from shardwise.observe.metrics import read
from tests.engine import test_experts as experts
from tests.engine import test_model_parallel as cut
from tests.engine import test_parity as dense
from tests.engine import test_tables_model_parallel as tables
from tests.engine.nets import Language, seeded

ASKED = {"monitor": {"unit_norms": True}}
ROOT = "(root)"


def by_unit(gradients: Mapping[str, Tensor], names: list[str]) -> dict[str, float]:
    """The norms of a plain loop's gradients: each parameter belongs to the innermost Unit whose name it begins with."""
    squares = dict.fromkeys(names, 0.0)
    for parameter, gradient in gradients.items():
        around = [name for name in names if parameter.startswith(f"{name}.")]
        squares[max(around, key=len, default=ROOT)] += float(gradient.square().sum())
    return {name: math.sqrt(total) for name, total in squares.items()}


def assert_equal(result: Any, gradients: Mapping[str, Tensor]) -> None:
    found = result.unit_norms
    assert found == pytest.approx(by_unit(gradients, list(found)), rel=1e-10, abs=1e-14)
    assert_sum(result)


def assert_sum(result: Any) -> None:
    total = sum(norm**2 for norm in result.unit_norms.values())
    assert total == pytest.approx(result.grad_norm**2, rel=1e-12)


# Data-parallel ranks, and state on other tiers -----------------------------------------------------------------------

HOST = {"optimizer": "host", "fraction": 0.6}
DENSE: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"precision": {"compute": "fp16", "loss_scale": 2.0**10}}],
    2: [
        *({"zero": {"stage": stage}} for stage in range(4)),
        {"zero": {"stage": 2}, "offload": HOST},
        {"zero": {"stage": 3, "reduce": "step"}, "offload": HOST},
        {"mesh": {"dp": {"replicate": 2, "shard": 1}}, "zero": {"stage": 3}},
    ],
    4: [{"mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": stage}} for stage in (2, 3)],
}


def train_dense(world: Any, table: list[dict[str, Any]]) -> None:
    for config in table:
        is_half, is_there = "precision" in config, "offload" in config
        given = {"optimizer": dense.OPTIMIZERS["sgd"], "max_grad_norm": dense.CLIP, **ASKED, **config}
        model = seeded(Language, dtype=torch.float32 if is_half or is_there else torch.float64)
        engine = shardwise.initialize(model, given, world=world)
        share = dense.SEQUENCES // world.size
        for step, wanted in enumerate(dense.truth("sgd", "fp32" if is_there else "fp64")):
            mine = slice(world.rank * share, (world.rank + 1) * share)
            tokens, targets = (each[mine] for each in dense.data(step))
            weight = int((targets != -100).sum())
            if not weight:
                targets = torch.zeros_like(targets)
            engine.backward(engine((tokens, targets)), weight=weight)
            result = engine.step()
            assert list(result.unit_norms) == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
            expected = by_unit(wanted.gradients, list(result.unit_norms))
            limit = 1e-2 if is_half else 1e-5 if is_there else 1e-10
            assert result.unit_norms == pytest.approx(expected, rel=limit)
            assert_sum(result)
        engine.close()


@pytest.mark.parametrize("size", DENSE)
def test_data_parallel_ranks(ranks: Any, size: int) -> None:
    dense.truth("sgd", "fp64")
    ranks(size).run(train_dense, DENSE[size])


def test_gradients_that_left_for_a_disk_count(tmp_path: Path) -> None:
    """The squares of a gradient that has left are those of its last reduction."""
    dense.truth("sgd", "fp32")
    disk = {"optimizer": "disk", "disk_path": str(tmp_path)}
    train_dense(join(quiet=True), [{"offload": disk}, {"offload": disk, "batch": {"accumulation": 1}}])


# Slices, stages, experts ---------------------------------------------------------------------------------------------

CUT = {
    2: [
        cut.Layout(tp=2, kv_heads=1),
        cut.Layout(pp=2, microbatches=3),
        cut.Layout(pp=2, microbatches=2, family="gpt2"),
    ],
    4: [
        cut.Layout(pp=2, dp=2, stage=3, microbatches=2, family="gpt2"),
        cut.Layout(pp=2, tp=2, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2),
    ],
}
"""The weight of gpt2's embedding is its head's too, on the first stage and on the last."""


def train_cut(world: Any, layouts: list[cut.Layout]) -> None:
    for layout in layouts:
        config = {**cut.config_of(layout, "off"), **ASKED}
        engine = shardwise.initialize(cut.model_of(layout), config, world=world)
        for step, wanted in enumerate(cut.truth(layout.family, layout.kv_heads, layout.layers, layout.heads)):
            result = engine.train_step(*cut.pieces(layout, engine.dp_index, step))
            blocks = [f"blocks.{i}" for i in range(layout.layers)]
            inner = blocks if layout.family == "gpt2" else ["embed", *blocks, "head"]
            assert list(result.unit_norms) == [ROOT, *inner]
            assert_equal(result, wanted.gradients)
        engine.close()


@pytest.mark.parametrize("size", CUT)
def test_slices_and_stages(ranks: Any, size: int) -> None:
    ranks(size).run(train_cut, CUT[size])


EXPERTS = [experts.Layout(dp=2, ep=2, stage=stage) for stage in (0, 3)]


def train_experts(world: Any, layouts: list[experts.Layout]) -> None:
    for layout in layouts:
        config = {**experts.config_of(layout), "check_first_step": "off", **ASKED}
        engine = shardwise.initialize(seeded(experts.Mixture), config, world=world)
        for step, wanted in enumerate(experts.truth()):
            result = engine.train_step(*experts.pieces(layout, engine.dp_index, step))
            assert {"blocks.0", "blocks.0.mlp.experts"} <= result.unit_norms.keys(), (
                "as the printed Plan has them"
            )
            assert_equal(result, wanted.gradients)
        engine.close()


def test_experts(ranks: Any) -> None:
    ranks(2).run(train_experts, EXPERTS)


# Embedding tables ----------------------------------------------------------------------------------------------------


def train_tables(world: Any, layout: tables.Layout) -> list[Any]:
    engine = tables.build(world, layout, **ASKED)
    results: list[Any] = []
    engine.on_step.append(lambda engine, result: results.append(result))
    tables.train(engine, 3)
    engine.close()
    return results


@pytest.mark.parametrize(
    "layout",
    [
        tables.Layout(2, {"dp": 2}, stage=3),
        tables.Layout(2, {"tp": 2}),
        tables.Layout(2, {"pp": 2}, stacked=True),
    ],
    ids=str,
)
def test_tables_have_a_row(ranks: Any, layout: tables.Layout) -> None:
    alone = train_tables(join(), tables.Layout(1, {}))
    for results in ranks(2).run(train_tables, layout):
        for result, wanted in zip(results, alone, strict=True):
            assert list(result.unit_norms)[-1] == "(tables)" and result.unit_norms["(tables)"] > 0
            assert result.unit_norms == pytest.approx(wanted.unit_norms, rel=1e-10)
            assert_sum(result)


# Where they go -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.out(x).square().mean()
        return result


def engine_of(folder: Path, world: World | None = None, **monitor: Any) -> Any:
    config = {
        "zero": {"units": ["blocks.*"]},
        "monitor": {"unit_norms": True, "csv": True, **monitor},
        "output_dir": str(folder),
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    return shardwise.initialize(
        seeded(Net), config, world=world or World(0, 1), loss=lambda model, x: model(x)
    )


def steps(engine: Any, count: int) -> list[Any]:
    return [engine.train_step([torch.ones(2, 3, dtype=torch.float64)]) for _ in range(count)]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "unit_norms.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_file_and_the_events_have_what_the_results_have(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, tensorboard=True, tags={"loss": "l"})
    results = steps(engine, 3)
    engine.close()
    assert [list(row) for row in rows(tmp_path)] == [["step", ROOT, "blocks.0", "blocks.1"]] * 3
    for row, result in zip(rows(tmp_path), results, strict=True):
        assert row == {"step": str(result.step), **{k: repr(v) for k, v in result.unit_norms.items()}}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in results[0].unit_norms:
        found = [(event.step, event.value) for event in events.Scalars(f"unit_norm/{name}")]
        assert found == [(r.step, pytest.approx(r.unit_norms[name], rel=1e-6)) for r in results]
    assert [row.step for row in read(tmp_path / "metrics.csv")] == [1, 2, 3]


def test_nothing_changes_where_they_are_not_asked_for(tmp_path: Path) -> None:
    asked, plain = engine_of(tmp_path / "a"), engine_of(tmp_path / "b", unit_norms=False)
    for one, other in zip(steps(asked, 3), steps(plain, 3), strict=True):
        assert one._replace(unit_norms={}) == other
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["metrics.csv"]
    asked.close()
    plain.close()


def test_a_run_that_is_resumed_goes_on_in_the_file(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    steps(engine, 2)
    engine.save(tmp_path / "saved", asynchronous=False)
    steps(engine, 2)
    engine.close()
    undisturbed = rows(tmp_path)
    with (tmp_path / "unit_norms.csv").open("a") as file:
        file.write("5,1.0")  # a write that a kill cut short
    engine = engine_of(tmp_path)
    engine.load(tmp_path / "saved")
    steps(engine, 1)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    steps(engine, 1)
    engine.close()
    assert rows(tmp_path) == undisturbed
    engine = engine_of(tmp_path, unit_norms=False)
    engine.load(tmp_path / "saved")
    steps(engine, 1)
    engine.close()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"], "no row of a step that was computed again"
    engine = engine_of(tmp_path)
    steps(engine, 1)
    engine.close()
    assert rows(tmp_path) == undisturbed[:1]


def of_rank_0_alone(world: Any, folder: str) -> Any:
    engine = engine_of(Path(folder), world, unit_norms=world.rank == 0)
    result = steps(engine, 1)[0]
    engine.close()
    return result


def test_rank_0_alone_may_ask(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(of_rank_0_alone, str(tmp_path))
    assert first == second and len(first.unit_norms) == 3
    assert [row["step"] for row in rows(tmp_path)] == ["1"]


def test_a_norm_that_is_not_finite_shows_the_unit(tmp_path: Path) -> None:
    config = {
        "zero": {"units": ["blocks.*"]},
        "precision": {"nonfinite": "skip"},
        **ASKED,
        "output_dir": str(tmp_path),
    }
    engine = shardwise.initialize(seeded(Net), config, world=World(0, 1))
    x = torch.ones(2, 3, dtype=torch.float64)
    loss = engine(x)
    engine.module.blocks[1].bias.register_hook(lambda grad: grad * math.inf)
    engine.backward(engine(x) + 0 * loss.detach())
    result = engine.step()
    engine.close()
    assert result.skipped and not math.isfinite(result.unit_norms["blocks.1"])
    assert math.isfinite(result.unit_norms["blocks.0"]) and math.isfinite(result.unit_norms[ROOT])
