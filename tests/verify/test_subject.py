"""The example is cut into microbatches, or what cannot be cut is named."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.config.run import load
from shardwise.verify.layout import parse_layout
from shardwise.verify.subject import Verification


class Output(NamedTuple):
    """The output of a model, as those of transformers."""

    logits: Tensor
    loss: Tensor


def subject(example: Any, layout: str = "dp=2") -> Verification:
    return Verification(
        nn.Identity, load({"batch": {"accumulation": 2}}), parse_layout(layout), example, 2, None
    )


def test_every_sample_is_in_one_microbatch_and_each_step_has_another_order() -> None:
    features = Ragged.of_lists([[i] * (i % 3) for i in range(8)])
    first, second = subject({"x": torch.arange(8.0), "keys": [features], "n": 3}).batches(torch.float64)
    assert torch.cat([each["x"] for each in first]).tolist() == [*range(8)]
    assert torch.cat([each["x"] for each in second]).tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    keys = torch.cat([each["keys"][0].values for each in first])
    assert torch.equal(keys, features.values) and first[0]["x"].dtype == torch.float64 and first[3]["n"] == 3
    assert [each["keys"][0].samples for each in second] == [2] * 4


def test_weights_of_microbatches_differ() -> None:
    weights = subject(torch.zeros(8, 2)).weights
    assert len(weights) == 4 and len(set(weights)) > 1


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (
            {"x": torch.zeros(8), "mask": torch.zeros(1, 8)},
            r"example\['x'\] has 8 samples .* example\['mask'\] has 1",
        ),
        ((torch.zeros(8), [torch.zeros(6)]), r"example\[0\] has 8 samples .* example\[1\]\[0\] has 6"),
        ({"x": torch.zeros(8), "f": Ragged.of_lists([[1]])}, r"example\['f'\] has 1"),
        ({"x": 3}, "no tensor with samples along dim 0"),
        (torch.zeros(3), "3 samples, fewer than the 4 microbatches"),
    ],
)
def test_what_cannot_be_cut_is_named(example: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        subject(example)


def test_the_loss_is_found_as_the_engine_finds_it() -> None:
    """A loss that the engine takes from the output is no reason to refuse, and one of many numbers is."""
    held, logits = subject(torch.zeros(8)), torch.zeros(2, 3)
    assert held.loss(lambda x: Output(logits, x.sum()), torch.ones(2)) == 2  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no loss of one number"):
        held.loss(lambda x: logits, torch.ones(2))  # type: ignore[arg-type]
