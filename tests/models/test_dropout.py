"""Replacing dropout by name, and finding what cannot be replaced."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.kernels.dropout import EqualPart
from shardwise.models.dropout import KeyedDropout, replace_dropout, unkeyed_dropout
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.passes.replay import BatchPosition, DrawReplay

POLICY = GptPolicy(family="gpt2", layers=2, width=8, heads=2, context=8, vocab=11, dropout=0.25)
TOKENS = torch.arange(32).view(4, 8) % 11


def test_all_places_of_a_model() -> None:
    model, replay = Gpt(POLICY).eval(), DrawReplay()
    assert replace_dropout(model, 0, replay, {"blocks.*": EqualPart(1, 2, 0)}) == 5
    swapped = {name: module for name, module in model.named_modules() if isinstance(module, KeyedDropout)}
    assert {name: module.cut is not None for name, module in swapped.items()} == {
        "dropout": False,
        "blocks.0.attention.dropout": True,
        "blocks.0.mlp.dropout": True,
        "blocks.1.attention.dropout": True,
        "blocks.1.mlp.dropout": True,
    }
    assert all(module.name == name and module.p == 0.25 for name, module in swapped.items())
    assert not any(module.training for module in swapped.values())
    assert replace_dropout(model, 0, replay) == 0
    assert unkeyed_dropout(model) == []
    assert repr(swapped["dropout"]) == "KeyedDropout(p=0.25)"
    assert "cut=(1, 2, 0)" in repr(swapped["blocks.0.mlp.dropout"])


def test_a_share_of_nothing_stays() -> None:
    assert replace_dropout(Gpt(POLICY.model_copy(update={"dropout": 0.0})), 0, DrawReplay()) == 0


def test_the_batch_may_be_cut() -> None:
    model, replay = Gpt(POLICY).double(), DrawReplay()
    replace_dropout(model, 0, replay)
    with replay.at(BatchPosition(2)):
        whole = model(TOKENS)
    for first in (0, 1, 3):
        with replay.at(BatchPosition(2, first_sample=first)):
            assert torch.allclose(model(TOKENS[first : first + 1]), whole[first : first + 1], atol=1e-14)
    with replay.at(BatchPosition(2, first_sample=1)):
        assert not torch.allclose(model(TOKENS[:1]), whole[:1])


def test_seed_and_step_change_the_mask() -> None:
    outputs = []
    for seed, step in [(0, 0), (0, 0), (1, 0), (0, 1)]:
        model, replay = Gpt(POLICY), DrawReplay()
        replace_dropout(model, seed, replay)
        with replay.at(BatchPosition(step)):
            outputs.append(model(TOKENS))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def test_evaluation_is_the_identity_and_needs_no_place() -> None:
    model, replay = Gpt(POLICY), DrawReplay()
    replace_dropout(model, 0, replay)
    assert torch.equal(model.eval()(TOKENS), model(TOKENS))
    with pytest.raises(UsageError, match="no microbatch is running"):
        model.train()(TOKENS)


class Shared(nn.Module):
    """One dropout in two places, and shares of others that are not ``nn.Dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Dropout(0.5)
        self.channels = nn.Dropout2d(0.5)
        self.attend = nn.MultiheadAttention(4, 2, dropout=0.1)
        self.attention_dropout = 0.2


def test_one_module_in_two_places_becomes_two() -> None:
    model = Shared()
    assert replace_dropout(model, 0, DrawReplay()) == 2
    assert model.a is not model.b
    assert (model.a.name, model.b.name) == ("a", "b")


def test_what_cannot_be_replaced_is_named() -> None:
    model = Shared()
    replace_dropout(model, 0, DrawReplay())
    assert unkeyed_dropout(model) == [
        "Shared (attention_dropout=0.2)",
        "channels (p=0.5)",
        "attend (dropout=0.1)",
    ]
