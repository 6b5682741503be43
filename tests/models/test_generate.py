"""Generation: the cache changes nothing, the seed decides, the context slides."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.models.cache import KeyValueCache
from shardwise.models.generate import choose, generate
from shardwise.models.gpt import GptPolicy
from tests.models.shapes import BOTH, LLAMA, NAMES, restless, tokens

both = pytest.mark.parametrize("policy", BOTH, ids=NAMES)


@both
@pytest.mark.parametrize("length", [1, 5, 16, 23])
@pytest.mark.parametrize("keys", [{"temperature": 0}, {"temperature": 1.5, "top_k": 20, "seed": 3}], ids=str)
def test_the_cache_changes_nothing(policy: GptPolicy, length: int, keys: dict) -> None:
    """Also past the context (16), where the window restarts with its latest half."""
    model, prompt = restless(policy, torch.float64), tokens(length=length)
    cached = generate(model, prompt, 40, **keys)
    assert cached.shape == (2, length + 40)
    assert torch.equal(cached[:, :length], prompt)
    assert torch.equal(cached, generate(model, prompt, 40, cached=False, **keys))


@both
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(policy: GptPolicy) -> None:
    model, x = restless(policy, torch.float64), tokens()
    cache = KeyValueCache(16)
    for piece in x.split([5, 1, 4, 2], 1):
        last = model(piece, cache=cache)
    assert cache.length == 12
    assert torch.allclose(last, model(x)[:, -1:], atol=1e-13)


def test_the_cache_computes_each_token_once() -> None:
    model, lengths = restless(LLAMA), []
    model.blocks[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    generate(model, tokens(length=4), 6)
    assert lengths == [4, 1, 1, 1, 1, 1]


def test_only_calls_of_the_model_are_needed() -> None:
    model = restless(LLAMA)
    calls = []

    def wrapped(x: Tensor, **more: object) -> Tensor:
        calls.append(x.shape)
        return model(x, **more)

    expected = generate(model, tokens(), 8, seed=1)
    assert torch.equal(generate(wrapped, tokens(), 8, seed=1, context=16), expected)
    assert len(calls) == 8
    with pytest.raises(UsageError, match="has no policy to read the context from; give context="):
        generate(wrapped, tokens(), 8)


def test_the_seed_decides() -> None:
    model = restless(LLAMA)
    first = generate(model, tokens(), 12, seed=1)
    torch.manual_seed(99)
    assert torch.equal(first, generate(model, tokens(), 12, seed=1))
    assert not torch.equal(first, generate(model, tokens(), 12, seed=2))


def test_rows_and_steps_draw_apart() -> None:
    logits = torch.zeros(64, 50)
    chosen = torch.stack([choose(logits, 1.0, None, 0, step) for step in range(64)])
    assert (
        len({tuple(row.tolist()) for row in chosen}) == len({tuple(row.tolist()) for row in chosen.T}) == 64
    )


def test_frequencies_are_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    chosen = choose(p.log().expand(20_000, 4), 1.0, None, 7, 0)
    counts = Counter(chosen.tolist())
    assert counts[1] == 0
    for token in (0, 2, 3):
        assert counts[token] / 20_000 == pytest.approx(p[token].item(), abs=0.015)


def test_temperature_sharpens() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    sharp = choose(p.log().expand(20_000, 3), 0.5, None, 7, 0)
    assert (sharp == 0).double().mean().item() == pytest.approx(0.25 / 0.38, abs=0.015)


def test_top_k_leaves_out_the_rest() -> None:
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(0))
    chosen = choose(logits, 5.0, 3, 0, 0)
    assert (logits.topk(3).indices == chosen[:, None]).any(1).all()
    assert torch.equal(choose(logits, 1.0, 1, 0, 0), logits.argmax(-1))
    assert torch.equal(choose(logits, 1.0, 50, 0, 0), choose(logits, 1.0, None, 0, 0))


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    policy = GptPolicy.model_validate(LLAMA.model_dump() | {"dropout": 0.5})
    model = restless(policy)
    assert torch.equal(
        generate(model, tokens(), 10, temperature=0), generate(restless(LLAMA), tokens(), 10, 0)
    )
    assert model.training
    model.eval()
    generate(model, tokens(), 1)
    assert not model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tokens()[0], 3), "shape \\[12\\]; expected \\[batch"),
        ((tokens()[:, :0], 3), "at least one token"),
        ((tokens(), -1), "max_new_tokens is -1"),
        ((tokens(), 3, -0.5), "temperature is -0.5"),
        ((tokens(), 3, 1.0, 0), "top_k is 0"),
    ],
)
def test_wrong_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(restless(LLAMA), *arguments)


def test_nothing_to_generate() -> None:
    assert torch.equal(generate(restless(LLAMA), tokens(), 0), tokens())


def test_top_p_keeps_the_likeliest_that_together_reach_it() -> None:
    p = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    drawn = [
        set(choose(p.log().expand(4_000, 4), 1.0, None, 7, 0, top_p).tolist())
        for top_p in (0.3, 0.4, 0.41, 0.71, 1.0)
    ]
    assert drawn == [{0}, {0}, {0, 2}, {0, 2, 3}, {0, 1, 2, 3}]
    within = choose(p.log().expand(20_000, 4), 1.0, None, 7, 0, 0.7)
    assert (within == 0).double().mean().item() == pytest.approx(4 / 7, abs=0.02)
    both = choose(p.log().expand(4_000, 4), 1.0, 3, 7, 0, 0.5)
    assert set(both.tolist()) == {0, 2}, "top_k first: 4/9 and 3/9 of what it leaves"


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.1])
def test_a_top_p_that_leaves_nothing_is_refused(top_p: float) -> None:
    with pytest.raises(UsageError, match="top_p"):
        generate(restless(LLAMA), torch.zeros(1, 1, dtype=torch.int64), 1, top_p=top_p)
