"""Facts that jobs share are those that each job has by itself."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, PlanError
from shardwise.base.ragged import Ragged
from shardwise.config.run import load
from shardwise.engine.fit.jobs import JobShelf, resized
from shardwise.models import Gpt, GptPolicy

CPU = torch.device("cpu")


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=9, width=16, heads=2, context=8, vocab=32))


def tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


def test_a_refusal_is_kept_and_raised_again() -> None:
    shelf = JobShelf(gpt, CPU, tokens)
    for _ in range(2):
        with pytest.raises((PlanError, ConfigError)):
            shelf.job(load({"mesh": {"pp": 16}, "batch": {"global_size": 8, "micro_size": 1}}), 16)


def test_examples_have_the_samples_that_are_wanted() -> None:
    example = {"x": torch.zeros(4, 3), "y": [torch.zeros(4, dtype=torch.int64), torch.tensor(1.0)]}
    made = resized(example, 7)
    assert made["x"].shape == (7, 3) and made["y"][0].shape == (7,) and made["y"][1].shape == ()
    assert made["y"][0].dtype == torch.int64
    bags = resized({"a": Ragged.of_lists([[1, 2], [], [3]]), "b": Ragged.of_ones(torch.ones(3).long())}, 6)
    assert bags["a"].samples == bags["b"].samples == 6 and bags["a"].weights is None
    assert bags["a"].values.shape == (6,) and bags["b"].values.shape == (6,)
