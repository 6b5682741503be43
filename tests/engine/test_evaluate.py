"""``engine.evaluate`` takes data as data and pairs as pairs; labels are never taken for weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.engine.nets import seeded

SAMPLES = 21


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    y[2::3] = -100
    return TensorDataset(x, y)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def engine_of(world: World) -> shardwise.Engine:
    return shardwise.initialize(seeded(nn.Linear, 3, 4), loss=loss_of, world=world)


def evaluated(world: World) -> list[float]:
    engine = engine_of(world)
    found = [
        engine.evaluate(DataLoader(data(), batch_size=4)),
        engine.evaluate(DataLoader(data(), batch_size=1)),
        engine.evaluate(data()),
        engine.evaluate(engine.evaluation_loader(data(), batch_size=5)),
    ]
    engine.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_data_is_data(ranks: Any, size: int) -> None:
    """Every sample once, counted by its label, whatever the ranks and the size of batches."""
    wanted = float(loss_of(seeded(nn.Linear, 3, 4), data().tensors).detach())
    for found in ranks(size).run(evaluated):
        assert found == pytest.approx([wanted] * 4, rel=1e-12)


def test_samples_count_where_there_are_no_labels() -> None:
    engine = shardwise.initialize(
        seeded(nn.Linear, 3, 4), loss=lambda model, batch: model(batch[0]).square().mean(), world=World(0, 1)
    )
    x = data().tensors[0]
    wanted = float(seeded(nn.Linear, 3, 4)(x).square().mean().detach())
    assert engine.evaluate(DataLoader(TensorDataset(x), batch_size=4)) == pytest.approx(wanted, rel=1e-12)
    engine.close()


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((torch.zeros(2, 3), torch.zeros(2)), r"\(a tensor \[2, 3\], a tensor \[2\]\)"),
        ((torch.zeros(1, 3), torch.zeros(1)), r"a tensor \[1\]"),
        ((torch.zeros(3), torch.tensor(2)), r"a tensor \[\]"),
        ({"x": torch.zeros(2, 3), "labels": torch.zeros(2)}, r"a dict with keys \['x', 'labels'\]"),
        (torch.zeros(2, 3), r"a tensor \[2, 3\]"),
        ((torch.zeros(2, 3), "3"), "a str"),
        ((torch.zeros(2, 3), True), "True"),
        ((torch.zeros(2, 3), -1), "-1"),
    ],
)
def test_what_is_no_pair_is_refused(item: Any, said: str) -> None:
    engine = engine_of(World(0, 1))
    with pytest.raises(UsageError, match=f"evaluate: expected pairs .* given .*{said}.*evaluation_loader"):
        engine.evaluate([item])
    engine.close()


def test_a_training_loader_is_refused() -> None:
    engine = engine_of(World(0, 1))
    with pytest.raises(UsageError, match="engine.loader is for training.*engine.evaluation_loader"):
        engine.evaluate(engine.loader(data(), batch_size=4))
    engine.close()
