"""Sequences that are cut over ranks: dropout, evaluation, weights, checkpoints, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import DataError, PlanError, UsageError
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.models import Gpt, GptPolicy

VOCABULARY = 19


def make(**more: Any) -> Gpt:
    shape: dict[str, Any] = {
        "layers": 2,
        "width": 16,
        "heads": 4,
        "context": 32,
        "vocab": VOCABULARY,
        "hidden": 24,
    }
    torch.manual_seed(0)
    return Gpt(GptPolicy(**{**shape, **more})).double()


def begin(world: World, config: dict[str, Any], **model: Any) -> Engine:
    given = {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config}
    return shardwise.initialize(make(**model), given, world=world)


def batch(length: int, step: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[0, : length // 2] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def numbers(
    world: World,
    config: dict[str, Any],
    lengths: list[int],
    weights: list[float] | None,
    model: dict[str, Any],
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and weights of three steps, and an evaluation, of lengths in turn."""
    engine, found = begin(world, config, **model), []
    for step in range(3):
        each = batch(lengths[step % len(lengths)], step)
        result = engine.train_step([each], weights)
        found += [result.loss, float(result.grad_norm or 0)]
    found += [engine.evaluate([(each, None)]), engine.evaluate([(each, 3.0), (batch(5), 1.0)])]
    predicted = engine.predict([{"tokens": each["tokens"]}])[0]
    state = {**engine.state_dict(), "logits": predicted}
    engine.close()
    return found, state


CASES: dict[str, tuple[dict[str, Any], list[int], list[float] | None, dict[str, Any]]] = {
    "dropout": ({}, [12, 13], None, {"dropout": 0.3}),
    "dropout, learned positions": ({"recompute": "full"}, [7], None, {"dropout": 0.3, "family": "gpt2"}),
    "shorter than the chunks": ({"zero": {"stage": 3}}, [1, 2, 3], None, {}),
    "a weight that is given": ({}, [12], [5.0], {}),
    "microbatches alike": ({"batch": {"weigh_by": "batches"}}, [9], None, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks: Any, name: str) -> None:
    config, *case = CASES[name]
    found = ranks(2).run(numbers, {**config, "mesh": {"cp": 2}}, *case)
    wanted, state = numbers(World(0, 1), config, *case)  # type: ignore[arg-type]
    for got, weights in found:
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


def saved(world: World, config: dict[str, Any], folder: str, loads: bool) -> dict[str, Tensor]:
    engine = begin(world, {**config, "optimizer": {"type": "adamw", "lr": 0.01}})
    if loads:
        engine.load(folder)
    else:
        engine.train_step([batch(12)])
        engine.save(folder)
        engine.wait_for_save()
    found = {**engine.state_dict(), "moment": engine.full_tensor("embed.weight", "exp_avg_sq")}
    engine.close()
    return found


def test_a_checkpoint_loads_on_any_cut(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, *_ = ranks(4).run(saved, {"mesh": {"cp": 4}, "zero": {"stage": 3}}, folder, False)
    for size, config in (
        (1, {"mesh": {"cp": 1}}),
        (4, {"mesh": {"cp": 2, "tp": 2}, "zero": {"stage": 1}}),
    ):
        for found in ranks(size).run(saved, config, folder, True):
            assert all(torch.equal(found[name], first[name]) for name in first)


# Refused -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.LSTM(8, VOCABULARY, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.rnn(self.embed(tokens))[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def refused(world: World) -> list[str]:
    said = []
    for model in (Plain(), make(experts={"count": 2})):
        try:
            shardwise.initialize(model, {"mesh": {"cp": 2}}, world=world)
        except PlanError as error:
            said.append(str(error))
    engine = begin(world, {"mesh": {"cp": 2}})
    for given in (
        lambda: engine(tokens=batch(8)["tokens"]),
        lambda: engine.train_step([batch(40)]),
        lambda: engine.train_step([batch(8, world.rank)]),
    ):
        try:
            given()
        except (UsageError, DataError) as error:
            said.append(str(error))
            engine.discard()
    engine.close()
    return said


def test_what_cannot_be_cut_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(refused):
        foreign, experts, outside, long, unlike = said
        assert "Plain has no attention layer" in foreign
        assert "mixtures of experts" in experts
        assert "without targets" in outside
        assert "40 tokens but its context is 32" in long
        assert "different batches" in unlike and "along cp" in unlike
