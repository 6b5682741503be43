"""Parameters tied in other places than embedding and head: on two stages of one rank, and on three stages.

Each row is held to one process, and each has a bug of its own planted, which its figures must show."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.engine.parts.shared import SharedGradients
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.plain import train, worst


class Row(NamedTuple):
    """A net of ``blocks`` blocks, those in ``tied`` with one matrix, cut over ``pp`` ranks."""

    pp: int
    virtual_stages: int
    blocks: int
    tied: tuple[int, ...]


ON_ONE_RANK = Row(2, 2, 4, (0, 2))


ON_THREE_STAGES = Row(3, 1, 3, (0, 1, 2))


def net(row: Row) -> Language:
    model = seeded(Language, row.blocks)
    for i in row.tied[1:]:
        model.blocks[i].up.weight = model.blocks[row.tied[0]].up.weight
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, VOCABULARY, (2, 2, 5), generator=draw)) for _ in range(4)]  # type: ignore[misc]


def addend_of_one_rank_lost() -> AbstractContextManager[Any]:
    """Of a parameter that two stages of one rank hold, the first stage's gradient alone counts."""
    return patch.object(
        SharedGradients, "tied", property(lambda self: {n: b[:1] for n, b in self._ties.items()})
    )


def counted_on_each_stage() -> AbstractContextManager[Any]:
    """A tied parameter counts in the norm on all stages but the last."""
    right = SharedGradients.__init__

    def wrong(self: Any, buckets: Any, *more: Any) -> None:
        right(self, buckets, *more)
        for stage, bucket in buckets:
            if bucket.layout.key.tie and 0 < stage < 2:
                self._counted[bucket] = [(0, bucket.owned_elements)]

    return patch.object(SharedGradients, "__init__", wrong)


def measure(
    world: Any, row: Row, plant: Callable[[], AbstractContextManager[Any]] | None
) -> tuple[float, float]:
    """Errors of gradients and norm."""
    model = net(row)
    truth = train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [[(batch, 10) for batch in batches()]],
        lambda model, batch: model(*batch),
        None,
    )[0]
    schedule = (
        {"schedule": "interleaved_1f1b", "virtual_stages": row.virtual_stages}
        if row.virtual_stages > 1
        else {}
    )
    with nullcontext() if plant is None else plant():
        engine = shardwise.initialize(
            net(row),
            {
                "mesh": {"pp": row.pp},
                "check_first_step": "auto" if plant is None else "off",
                "pipeline": {**schedule, "partition": "uniform"},
                "batch": {"accumulation": 4},
                "optimizer": {"type": "sgd", "lr": 0.1},
                "comm": {"timeout_s": 20.0},
            },
            world=world,
        )
        found: dict[str, Tensor] = {}
        training, step = engine._training, engine._training.step
        training.step = lambda: (found.update(engine.gradients()), step())[1]  # type: ignore[method-assign]
        result = engine.train_step(batches())
        engine.close()
    return worst(found, truth.gradients, truth.addends), abs(result.grad_norm - truth.norm) / truth.norm


@pytest.mark.parametrize("row", [ON_ONE_RANK, ON_THREE_STAGES], ids=["one rank", "three stages"])
def test_ties_equal_one_process(ranks: Any, row: Row) -> None:
    for figures in ranks(row.pp).run(measure, row, None):
        assert max(figures) <= 1e-10, figures


@pytest.mark.parametrize(
    ("row", "plant"),
    [(ON_ONE_RANK, addend_of_one_rank_lost), (ON_THREE_STAGES, counted_on_each_stage)],
    ids=["one rank", "three stages"],
)
def test_the_rows_show_a_bug(ranks: Any, row: Row, plant: Any) -> None:
    figures = [max(each) for each in ranks(row.pp).run(measure, row, plant)]
    assert max(figures) > 1e-4, figures
