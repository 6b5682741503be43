"""Every click-through model beside its twin in plain torch, on one process and under the engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.data.clicks import ClickBatch, ClickPolicy, build_clicks
from shardwise.data.clicks.rows import BatchForm, ClickRows, ClickSchema
from shardwise.models import ClickModel, build_ctr
from shardwise.models.policy import reads_clicks
from tests.models.ctr.batches import criteo_batches, criteo_file
from tests.models.ctr.plain import Plain
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
MODELS: list[dict[str, Any]] = [
    {"name": "logistic_regression"},
    {"name": "wide_deep", "width": 4, "hidden": [8]},
    {"name": "deepfm", "width": 4, "hidden": [8, 4]},
    {"name": "dcn", "width": 4, "cross_layers": 2, "hidden": [8]},
    {"name": "dcn", "width": 4, "cross_layers": 2, "rank": 3, "hidden": [8], "structure": "parallel"},
    {"name": "dlrm", "width": 4, "bottom": [8], "top": [8]},
]
LR_ROWS, LR, START = 0.05, 1e-3, 0.1
"""Of Adagrad on rows, of Adam on the dense part; sums of squares start above 0: else the first gradient of a row makes
a full step however small it is, and one that is rounding alone would separate any two computations."""


def config_of(model: dict[str, Any], **changes: Any) -> RunConfig:
    content = {
        "model": model,
        "tables": {"optimizer": {"type": "adagrad", "lr": LR_ROWS, "initial_accumulator": START}},
        "optimizer": {"type": "adam", "lr": LR},
    }
    return RunConfig.parse(content | changes)


def model_of(config: RunConfig, schema: ClickSchema, seed: int = 0) -> ClickModel:
    assert reads_clicks(config.model)
    return build_ctr(config.model, schema, config.tables, seed=seed)  # type: ignore[arg-type]


def losses_of_twin(twin: nn.Module, batches: Sequence[ClickBatch]) -> list[float]:
    bags = list(twin.bags.parameters())  # type: ignore[union-attr]
    others = [p for name, p in twin.named_parameters() if not name.startswith("bags.")]
    rows = torch.optim.Adagrad(bags, lr=LR_ROWS, eps=1e-8, initial_accumulator_value=START)
    optimizers = (rows, torch.optim.Adam(others, lr=LR))
    losses = []
    for batch in batches:
        loss = twin(**batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def synthetic_batches(count: int, size: int) -> tuple[ClickSchema, list[ClickBatch]]:
    synthetic = {"samples": count * size, "validation_samples": 1, "tables": 5, "rows": 20, "dense": 3}
    corpus = build_clicks(ClickPolicy.model_validate({"synthetic": synthetic}), Path("none"))
    return corpus.schema, [corpus.train.batch(np.arange(i * size, (i + 1) * size)) for i in range(count)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_a_model_learns_as_plain_torch_does(model: dict[str, Any]) -> None:
    schema, batches = synthetic_batches(8, 32)
    ours = model_of(config_of(model), schema)
    twin = Plain(ours, batches, torch.float32)
    expected = losses_of_twin(twin, batches)
    dense = torch.optim.Adam(ours.parameters(), lr=LR)
    losses = []
    for batch in batches:
        result = ours(**batch)
        result["loss"].backward()
        dense.step()
        dense.zero_grad()
        ours.tables.step()
        losses.append(result["loss"].item())
        assert result["logits"].shape == (32,)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert expected[-1] != pytest.approx(expected[0], abs=1e-4), "something was learnt"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_a_batch_of_no_samples_has_the_loss_0_and_gradients_of_0(model: dict[str, Any]) -> None:
    schema, batches = synthetic_batches(1, 4)
    ours = model_of(config_of(model), schema)
    empty = BatchForm().batch(
        ClickRows(
            np.zeros(0, np.float32),
            np.zeros((0, 3), np.float32),
            [(np.zeros(0, np.int64), np.zeros(1, np.int64))] * 5,  # type: ignore[list-item]
        ),
        schema,
    )
    result = ours(**empty)
    result["loss"].backward()
    ours.tables.step()
    assert result["loss"].item() == 0.0 and result["logits"].shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    assert torch.isfinite(ours(**batches[0])["loss"])


def test_without_labels_there_are_logits_alone() -> None:
    schema, batches = synthetic_batches(1, 4)
    ours = model_of(config_of(MODELS[-1]), schema)
    assert set(ours(batches[0]["dense"], batches[0]["sparse"])) == {"logits"}


@pytest.mark.parametrize("name", ["dlrm", "dcn", "wide_deep"])
def test_a_log_without_numbers(name: str) -> None:
    policy = ClickPolicy.model_validate({"synthetic": {"samples": 64, "dense": 0, "rows": 5, "tables": 3}})
    train = build_clicks(policy, Path("none")).train
    ours = model_of(config_of({"name": name, "width": 2}), train.schema)
    result = ours(**train.batch(np.arange(16)))
    result["loss"].backward()
    assert torch.isfinite(result["loss"])


# Under the engine --------------------------------------------------------------------------------------------------

CRITEO_MODELS = [
    {"name": "deepfm", "width": 8, "hidden": [32, 16]},
    {"name": "dlrm", "width": 8, "bottom": [16], "top": [32, 16]},
]


def trained(
    world: World, path: str, cache: str, model: dict[str, Any], size: int, changes: dict[str, Any]
) -> list[float]:
    """Losses of a run over the file, each rank taking its part of every batch."""
    schema, batches = criteo_batches(Path(path), Path(cache), size)
    config = config_of(model, batch={"global_size": size}, **changes)
    with torch.device("meta"):
        ours = model_of(config, schema)
    content = config.model_dump(
        exclude={"model", "data", "train", "monitor", "output_dir"}, exclude_unset=True
    )
    content["tables"].pop("defaults", None)
    engine = shardwise.initialize(ours, content, world=world)
    ours_of = slice(world.rank * size // world.size, (world.rank + 1) * size // world.size)
    losses = [engine.train_step([part(batch, ours_of)]).loss for batch in batches]
    engine.close()
    return losses


def part(batch: ClickBatch, of: slice) -> ClickBatch:
    sparse = {}
    for name, (values, offsets, weights) in batch["sparse"].items():
        own = offsets[of.start : of.stop + 1]
        sparse[name] = type(batch["sparse"][name])(values[own[0] : own[-1]], own - own[0], weights)
    return {"dense": batch["dense"][of], "sparse": sparse, "labels": batch["labels"][of]}


@pytest.mark.parametrize("model", CRITEO_MODELS, ids=lambda model: model["name"])
@pytest.mark.parametrize(("kind", "size"), [("made", 20), ("real", 144)])
def test_criteo_rows_give_the_losses_of_plain_torch(
    tmp_path: Path, ranks: Ranks, model: dict[str, Any], kind: str, size: int
) -> None:
    """On one rank and on two, whose tables are cut by rows: fp32 rounding is all that differs."""
    path = criteo_file(kind, tmp_path)
    schema, batches = criteo_batches(path, tmp_path / "cache", size)
    twin = Plain(model_of(config_of(model), schema), batches, torch.float32)
    expected = losses_of_twin(twin, batches)
    assert len(expected) >= 19
    alone = trained(World(0, 1), str(path), str(tmp_path / "cache"), model, size, {})
    assert alone == pytest.approx(expected, abs=1e-6)
    for losses in ranks(2).run(
        trained, str(path), str(tmp_path / "cache"), model, size, {"zero": {"stage": 2}}
    ):
        assert losses == pytest.approx(expected, abs=1e-6)


def outcome_on(
    world: World, model: dict[str, Any], placement: dict[str, str]
) -> tuple[list[float], list[str]]:
    schema, batches = synthetic_batches(4, 32)
    config = config_of(model, batch={"global_size": 32})
    tables = {"optimizer": {"type": "adagrad", "lr": LR_ROWS}, "placement": placement}
    ours = build_ctr(config.model, schema, config.tables, dict.fromkeys(["C1", "C3", "C5"], 20), 3)  # type: ignore[arg-type]
    engine = shardwise.initialize(
        ours,
        {"batch": {"global_size": 32}, "optimizer": {"type": "adam", "lr": LR}, "tables": tables},
        world=world,
    )
    mine = slice(world.rank * 32 // world.size, (world.rank + 1) * 32 // world.size)
    losses = [engine.train_step([part(batch, mine)]).loss for batch in batches]
    names = ours.tables.feature_names
    engine.close()
    return losses, names


def test_features_keep_their_order_wherever_tables_lie(ranks: Ranks) -> None:
    """Placements group tables and move features about; dense weights belong to features all the same."""
    model = MODELS[-1]
    placement = {"C1": "table", "C2": "row", "C3": "data_parallel", "C4": "row", "C5": "row"}
    alone, _ = outcome_on(World(0, 1), model, {})
    for losses, names in ranks(2).run(outcome_on, model, placement):
        assert names != ["C1", "C2", "C3", "C4", "C5"], "the placements of this test move nothing"
        assert losses == pytest.approx(alone, abs=2e-6)
