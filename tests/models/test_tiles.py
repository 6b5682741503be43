"""What is told to work by tiles, what it then computes and sends, and who is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError
from shardwise.comm.trace import TrafficCount
from shardwise.config.run import load
from shardwise.models import Bert, BertPolicy, Gpt, GptPolicy
from tests.parallel.tensor.test_loss import LargestTensor

VOCABULARY = 512


def gpt(tied: bool = False) -> Gpt:
    return Gpt(GptPolicy(layers=1, width=8, heads=2, context=32, vocab=VOCABULARY, hidden=16, tied_head=tied))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(64).view(2, 32) * 7 % VOCABULARY
    return tokens, tokens.roll(-1, 1)


def figures(world: Any, tokens: Any) -> tuple[TrafficCount, TrafficCount, float]:
    """On slices, exchanges of the loss in a step and in an evaluation; the loss."""
    config = {
        "mesh": {"tp": 2},
        "tiles": {"logits": tokens},
        "check_first_step": "off",
        "tensor": {"sequence_parallel": False},
    }
    engine = shardwise.initialize(gpt(), config, world=world)
    loss = engine.train_step([batch()]).loss
    kind = ("all_gather", "activations", "tp")  # of whole sequences: the loss alone
    step = engine.traffic.counts.pop(kind)
    engine.evaluate([(batch(), 1.0)])
    evaluation = engine.traffic.counts[kind]
    engine.close()
    return step, evaluation, loss


def test_each_row_s_numbers_travel_once(ranks: Any) -> None:
    """A tile's before its gradient, which begins with them; without gradients those of all tiles together."""
    (step, evaluation, loss), _ = ranks(2).run(figures, 8)
    (whole_step, whole_evaluation, whole_loss), _ = ranks(2).run(figures, "off")
    assert step == whole_step._replace(calls=8)
    assert evaluation == whole_evaluation and evaluation.calls == 1
    assert loss == pytest.approx(whole_loss, rel=1e-6)


def test_no_whole_logits() -> None:
    for tokens, is_whole in ((8, False), ("off", True)):
        engine = shardwise.initialize(gpt(tied=True), {"tiles": {"logits": tokens}})
        with LargestTensor() as largest:
            engine.train_step([batch()])
        assert (largest.elements >= 64 * VOCABULARY) is is_whole


def peak_of_first_step(world: Any, tokens: Any) -> int:
    """Elements of the largest tensor on the rank that compares the step with the uncut model."""
    model = Gpt(GptPolicy(layers=1, width=8, heads=2, context=32, vocab=16000, hidden=16))
    engine = shardwise.initialize(model, {"mesh": {"tp": 2}, "tiles": {"logits": tokens}}, world=world)
    with LargestTensor() as largest:
        engine.train_step([batch()])
    engine.close()
    return largest.elements


def test_the_uncut_model_of_the_first_step_has_tiles_too(ranks: Any) -> None:
    """Else the check would need the memory that tiles save, on one rank and for the whole vocabulary."""
    assert max(ranks(2).run(peak_of_first_step, 8)) < 64 * 16000
    assert max(ranks(2).run(peak_of_first_step, "off")) >= 64 * 16000


def test_auto_leaves_what_fits_into_one_tile_as_it_was() -> None:
    expected = shardwise.initialize(gpt(), {"tiles": {"logits": "off"}}).train_step([batch()])
    assert shardwise.initialize(gpt(), {}).train_step([batch()]).loss == expected.loss


def test_bert_has_tiles_too() -> None:
    def bert() -> Bert:
        return Bert(
            BertPolicy(layers=1, width=8, heads=2, context=32, vocab=VOCABULARY, dropout=0.0)
        ).double()

    found = []
    for tokens in (8, "off"):
        engine = shardwise.initialize(bert(), {"tiles": {"logits": tokens}, "precision": "fp64"})
        loss = engine(*batch())
        engine.backward(loss)
        found.append(engine.gradients())
        engine.step()
    for name, grad in found[0].items():
        assert (grad - found[1][name]).norm() <= 1e-12 * found[1][name].norm(), name


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"tiles\.logits: 8 asks .* a Linear does"):
        shardwise.initialize(nn.Linear(2, 2), {"tiles": {"logits": 8}})
    with pytest.raises(ConfigError, match=r"tensor\.gather_logits asks for"):
        shardwise.initialize(gpt(), {"tiles": {"logits": 8}, "tensor": {"gather_logits": True}})
    for wrong in (0, -3, "all", True):
        with pytest.raises(ConfigError, match=r"tiles\.logits"):
            load({"tiles": {"logits": wrong}})
    assert load({}, ["tiles.logits=off"]).tiles.logits == "off"
