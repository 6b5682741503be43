"""A model is copied without weights, also one that cannot be built twice, and the copies can be cut."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.cli.outlook.model_copy import ModelCopy
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec


class Normed(nn.Module):
    """A model with a tied weight, a buffer and a weight that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)
        self.norm.bias.requires_grad_(False)


def test_a_copy_has_the_same_parameters_on_meta() -> None:
    model = Normed()
    copied = ModelCopy.of(model)
    assert not copied.draws and copied.given_bytes == sum(each.nbytes for each in model.parameters())
    one, other = copied.make(), copied.make()
    assert isinstance(one, Normed) and one is not other and one.one.weight is not other.one.weight
    assert one.one.weight is one.other.weight
    assert all(each.is_meta for each in one.parameters())
    learns = {name: each.requires_grad for name, each in model.named_parameters()}
    assert {name: each.requires_grad for name, each in one.named_parameters()} == learns
    assert [tuple(each.shape) for each in one.parameters()] == [
        tuple(each.shape) for each in model.parameters()
    ]


def test_a_list_of_layers_is_copied() -> None:
    tied = partial(TiedSpec, "embedding", nn.Embedding, 8, 4)
    model = Layers(
        [tied(), nn.Linear(4, 4), LayerSpec(nn.Linear, 4, 4), tied(forward=lambda m, x: x @ m.weight.T)]
    )
    copied = ModelCopy.of(model)
    assert copied.draws, "layers of specs are drawn on the rank of their stage"
    found = copied.make()
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(each.is_meta for each in found.parameters())


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    copied = ModelCopy.of(model)
    assert copied.model is None
    with pytest.raises(UsageError, match="cannot be copied.*lock"):
        copied.make()


def test_a_model_on_meta_is_drawn() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    copied = ModelCopy.of(model)
    assert copied.draws and copied.given_bytes == 0
