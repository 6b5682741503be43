"""BERT: the paper's size, masked text by (seed, position), and the same on two ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.data import Loader
from shardwise.data.masked import MaskedWindows
from shardwise.data.placed import PositionedSample
from shardwise.data.token_file import TokenFile, TokenWriter
from shardwise.data.windows import TokenSpan, TokenWindows
from shardwise.models.bert import Bert, BertPolicy

TINY = BertPolicy(layers=2, width=8, heads=2, context=6, vocab=12, dropout=0)


def test_the_base_model_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = Bert(BertPolicy(vocab=30_522))
    # Without the embedding of two segments (1,536) and the pooler (590,592), with the head's own layers.
    assert (
        sum(each.numel() for each in model.parameters()) == 109_482_240 - 1_536 - 590_592 + 592_128 + 30_522
    )


def test_every_place_sees_every_other_and_gradients_flow() -> None:
    model = Bert(TINY).double()
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 5] = 9
    assert not torch.allclose(model(tokens)[0, 0], model(changed)[0, 0])
    targets = torch.tensor([[-100, 3, -100, -100, -100, 7]])
    expected = -model(tokens).log_softmax(-1)[0, [1, 5], [3, 7]].mean()
    assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-12)
    (given,) = torch.autograd.grad(model(tokens, targets), [model.transform.weight])
    (wanted,) = torch.autograd.grad(
        -model(tokens).log_softmax(-1)[0, [1, 5], [3, 7]].mean(), [model.transform.weight]
    )
    assert torch.allclose(given, wanted, rtol=1e-9, atol=1e-14)


def windows(folder: Path) -> TokenWindows:
    with TokenWriter(folder / "x.tokens", "bytes", 200) as writer:
        writer.append(np.arange(6001) % 200)
        writer.end_document()
    file = TokenFile(folder / "x.tokens")
    return TokenWindows([TokenSpan(file, 0, file.count)], 60)


def test_text_is_masked_by_position(tmp_path: Path) -> None:
    data = MaskedWindows(windows(tmp_path), 200, 0.15)
    places = [PositionedSample(position, position % 100) for position in range(300)]
    batch = data.batch(places, 7)
    tokens, targets = batch["tokens"], batch["targets"]
    plain = torch.stack([data.windows[place.sample]["tokens"] for place in places])
    chosen = targets != -100
    assert torch.equal(targets[chosen], plain[chosen]) and torch.equal(tokens[~chosen], plain[~chosen])
    assert abs(float(chosen.float().mean()) - 0.15) < 0.01
    hidden, kept = tokens[chosen] == 200, tokens[chosen] == plain[chosen]
    assert abs(float(hidden.float().mean()) - 0.8) < 0.03 and abs(float(kept.float().mean()) - 0.1) < 0.02
    assert not torch.equal(targets[:100], targets[100:200]), "another epoch masks anew"
    other = data.batch(places[150:160], 7)
    assert torch.equal(other["tokens"], tokens[150:160])


def trained(world: World | None, folder: Path) -> list[tuple[float, float | None]]:
    model = Bert(TINY.model_copy(update={"context": 60, "vocab": 201}), 3).double()
    config = {
        "batch": {"global_size": 8, "micro_size": 2},
        "zero": {"stage": 3},
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    engine = shardwise.initialize(model, config, world=world)
    data = MaskedWindows(windows_at(folder), 200, 0.15)
    loader = Loader(
        data, global_batch=8, micro_batch=2, dp_index=engine.dp_index, dp_size=engine.dp_size, seed=1
    )
    told = []
    for _ in range(3):
        batches = loader.step_batches()
        result = engine.train_step(batches, [float((each["targets"] != -100).sum()) for each in batches])
        told.append((result.loss, result.grad_norm))
    loader.close()
    return told


def windows_at(folder: Path) -> TokenWindows:
    file = TokenFile(folder / "x.tokens")
    return TokenWindows([TokenSpan(file, 0, file.count)], 60)


def test_two_ranks_are_one_process(ranks: Any, tmp_path: Path) -> None:
    windows(tmp_path)
    expected = trained(None, tmp_path)
    for told in ranks(2).run(trained, tmp_path):
        assert told == [pytest.approx(each, rel=1e-10) for each in expected]


def test_a_vocabulary_has_room_for_the_token_that_masks() -> None:
    assert BertPolicy().resolved(256).vocab == 257
    with pytest.raises(ConfigError, match="one more masks"):
        BertPolicy(vocab=256).resolved(256)
