"""Our Gpt cut along "tp" has the loss and the gradients of the whole one, and generates the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.models.generate import generate
from shardwise.models.gpt import GptPolicy
from shardwise.parallel.tensor.apply import make_parallel, table_of
from tests.models.shapes import GPT2, LLAMA, restless, tokens
from tests.parallel.tensor.whole import TOLERANCE, differences, tensor_group, worst

BASE = dict(layers=2, width=16, heads=4, head_size=4, context=16, hidden=24)
MODELS = {
    "llama, 2 kv heads": GptPolicy(**BASE, kv_heads=2, vocab=50),
    "llama, tied head, odd vocabulary": GptPolicy(**BASE, vocab=51, tied_head=True),
    "llama, 1 kv head, vocabulary of 5": GptPolicy(**BASE, kv_heads=1, vocab=5),
    "gpt2": GptPolicy(family="gpt2", **BASE, vocab=53),
    "gpt2, own head": GptPolicy(family="gpt2", **BASE, vocab=52, tied_head=False),
}


def batch(vocabulary: int, length: int = 8, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    given = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    targets = given[:, 1:].clone()
    targets[0, 2] = -100
    return given[:, :-1], targets


def gradients(world: World, name: str, sequence: bool) -> dict[str, float]:
    policy = MODELS[name]
    given, targets = batch(policy.vocab or 0)
    return differences(
        world, lambda: restless(policy, torch.float64), lambda model: model(given, targets), sequence
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_are_those_of_one_process(
    ranks: Any, size: int, name: str, sequence: bool
) -> None:
    distance, where = worst(ranks(size).run(gradients, name, sequence))
    assert distance <= TOLERANCE, where


def logits_loss(world: World, sequence: bool) -> dict[str, float]:
    given, targets = batch(50)

    def loss(model: nn.Module) -> Tensor:
        logits = model(given)
        assert logits.shape == (2, 8, 51)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    policy = MODELS["llama, tied head, odd vocabulary"]
    return differences(world, lambda: restless(policy, torch.float64), loss, sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_loss_of_the_users_own_gets_whole_logits(ranks: Any, sequence: bool) -> None:
    distance, where = worst(ranks(2).run(logits_loss, sequence))
    assert distance <= TOLERANCE, where


def continued(world: World, gpt2: bool) -> tuple[Any, ...]:
    policy = GPT2 if gpt2 else LLAMA
    if gpt2:
        policy = policy.model_copy(update={"heads": 4})
    whole, cut = restless(policy, torch.float64), restless(policy, torch.float64)
    make_parallel(cut, table_of(cut), tensor_group(world), sequence=True)
    prompt = tokens(2, 5)
    a, b = (generate(model, prompt, 16, temperature=0.8, seed=1) for model in (whole, cut))
    with torch.no_grad():
        odd = tokens(2, 7)
        same = (whole(odd) - cut(odd)).abs().max()
    return a.tolist(), b.tolist(), float(same)


@pytest.mark.parametrize("gpt2", [False, True], ids=["llama", "gpt2"])
def test_generation_is_equal_past_the_context(ranks: Any, gpt2: bool) -> None:
    """With a cache, sequences of any length, and the window that slides."""
    for expected, found, distance in ranks(2).run(continued, gpt2):
        assert found == expected
        assert distance < 1e-12


def outside(world: World) -> None:
    model = restless(LLAMA, torch.float64)
    make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    with pytest.raises(IndexError):
        model(tokens(2, 8) + 50)
    with pytest.raises(RuntimeError, match="index"):
        model(tokens(2, 8), tokens(2, 8) + 50)
    with pytest.raises(RuntimeError, match="index"):
        model(tokens(2, 8), tokens(2, 8) - 99)


def test_a_token_of_no_rank_fails_on_every_rank(ranks: Any) -> None:
    ranks(2).run(outside)


def uneven(world: World, name: str, length: int) -> dict[str, float]:
    policy = MODELS[name]
    given, targets = batch(policy.vocab or 0)

    def loss_of(model: nn.Module) -> Tensor:
        loss: Tensor = model(given, targets) + 2 * model(given[:, :length], targets[:, :length])
        return loss

    return differences(world, lambda: restless(policy, torch.float64), loss_of, sequence=True)


@pytest.mark.parametrize("length", [7, 1])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_do_not_divide_leave_the_sequence_whole(ranks: Any, name: str, length: int) -> None:
    distance, where = worst(ranks(2).run(uneven, name, length))
    assert distance <= TOLERANCE, where


def on_meta(world: World) -> None:
    with torch.device("meta"):
        from shardwise.models.gpt import Gpt

        model = Gpt(MODELS["llama, tied head, odd vocabulary"])
    before = {name: (id(p), tuple(p.shape)) for name, p in model.named_parameters()}
    placed = make_parallel(model, table_of(model), tensor_group(world), sequence=True)
    after = dict(model.named_parameters())
    assert all(p.is_meta and id(p) == before[name][0] for name, p in after.items())
    assert model.head.weight is model.embed.weight
    assert after["embed.weight"].shape == (26, 16)
    assert after["blocks.0.attention.qkv.weight"].shape == (3 * 8, 16)
    assert after["blocks.0.attention.out.weight"].shape == (16, 8)
    assert {name: place.shape for name, place in placed.items() if name in before} == {
        name: shape for name, (_, shape) in before.items()
    }
    assert placed["head.weight"] == placed["embed.weight"]


def test_a_model_on_meta_becomes_a_smaller_one_and_ties_survive(ranks: Any) -> None:
    ranks(2).run(on_meta)
