"""Hidden states, attentions and features that a model cut along tp returns: whole, with the gradients of one process.

They were a rank's tokens or heads, and losses on them were up to 70 % wrong without a word.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.engine.nets import LLAMA, cache_name, seeded

transformers = pytest.importorskip("transformers")

VOCABULARY = 23
GPT2 = dict(n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BERT = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
BLOOM = dict(hidden_size=16, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)


def wide_norms(model: nn.Module) -> nn.Module:
    """Return the model in fp64 with norms that do not round to fp32."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(16, eps=1e-6))
    return model.double()


class Student(nn.Module):
    """A head of its own on the last hidden state of a model inside, as reward and value models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made("llama")
        self.value = nn.Linear(16, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.inner(input_ids, output_hidden_states=True).hidden_states
        return self.value(states[1]).pow(3).mean() + states[-1].pow(3).mean()


def made(kind: str) -> nn.Module:
    common: dict[str, Any] = dict(vocab_size=VOCABULARY, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            return wide_norms(transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **LLAMA)))
        if kind == "llama base":
            return wide_norms(transformers.LlamaModel(transformers.LlamaConfig(**common, **LLAMA)))
        if kind == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **GPT2)).double()
        if kind == "bert":
            return transformers.BertModel(transformers.BertConfig(**common, **BERT)).double()
        if kind == "bloom":
            return transformers.BloomForCausalLM(transformers.BloomConfig(**common, **BLOOM)).double()
        assert kind == "inside"
        return Student().double()


def last_token(output: Any) -> Tensor:
    return output.hidden_states[1][:, -1].pow(3).mean()


def distillation(output: Any) -> Tensor:
    states = output.hidden_states
    return (states[0] - states[2]).square().mean() + states[1].pow(3).sum()


def entropy(output: Any) -> Tensor:
    first = output.attentions[0]
    weights = torch.arange(1.0, 1 + first.shape[1], dtype=first.dtype)[:, None, None]
    return -(weights * first * (first + 1e-9).log()).sum() + output.attentions[1][:, -1].square().sum()


def pooled(output: Any) -> Tensor:
    return output.pooler_output.square().mean() + output.last_hidden_state.pow(3).sum()


def last(output: Any) -> Tensor:
    return output.last_hidden_state.pow(3).sum()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    each.__name__: each for each in (last_token, distillation, entropy, pooled, last)
}
CASES = [
    ("llama", "last_token"),
    ("llama", "distillation"),
    ("llama", "entropy"),
    ("llama base", "distillation"),
    ("llama base", "entropy"),
    ("llama base", "last"),
    ("gpt2", "distillation"),
    ("gpt2", "entropy"),
    ("bert", "distillation"),
    ("bert", "entropy"),
    ("bert", "pooled"),
    ("bloom", "distillation"),
    ("bloom", "entropy"),
    ("inside", ""),
]


def tokens(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def loss_of(call: Callable[..., Any], loss: str, length: int) -> Tensor:
    if not loss:
        return call(input_ids=tokens(length))
    output = call(
        input_ids=tokens(length), output_hidden_states=True, output_attentions=True, use_cache=False
    )
    return LOSSES[loss](output)


def truth(kind: str, loss: str, length: int) -> tuple[float, dict[str, Tensor]]:
    model = made(kind)
    found = loss_of(model, loss, length)
    found.backward()
    return float(found.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def wrong(
    world: World, sequence: bool, length: int, every: int
) -> list[tuple[str, str, float, float, float]]:
    """Return the relative errors of loss, gradients (the worst parameter) and loss without gradients, by case."""
    found = []
    for kind, loss in CASES[::every]:
        config = {
            "mesh": {"tp": world.size},
            "tensor": {"sequence_parallel": sequence},
            "optimizer": {"type": "sgd", "lr": 1e-12},
        }
        right, gradients = truth(kind, loss, length)
        engine = shardwise.initialize(made(kind), config, world=world)
        with torch.no_grad():
            seen = loss_of(engine, loss, length)
        given = loss_of(engine, loss, length)
        engine.backward(given)
        grads = engine.gradients()
        scale = max(float(each.norm()) for each in gradients.values())
        off = max(
            float((grads[name] - each).norm()) / max(float(each.norm()), 1e-3 * scale)
            for name, each in gradients.items()
        )
        engine.step()
        engine.close()
        found.append((kind, loss, abs(float(given.detach()) / right - 1), off, abs(float(seen) / right - 1)))
    return found


@pytest.mark.parametrize(
    ("sequence", "length", "every"),
    [
        (True, 8, 1),
        (True, 7, 4),
        (False, 8, 4),
        pytest.param(True, 7, 1, marks=pytest.mark.soak),
        pytest.param(False, 8, 1, marks=pytest.mark.soak),
    ],
    ids=["cut", "whole pass", "no sequence", "every whole pass", "every one without a sequence"],
)
def test_losses_on_what_a_model_returns(ranks: Any, sequence: bool, length: int, every: int) -> None:
    for found in ranks(2).run(wrong, sequence, length, every):
        for kind, loss, of_loss, of_gradients, without in found:
            assert max(of_loss, of_gradients, without) <= 1e-10, (kind, loss, of_loss, of_gradients, without)


class Features(nn.Module):
    """Returns what lies between its cut layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        features = torch.tanh(self.up(self.norm(x)))
        y = x + self.down(features)
        return {
            "hidden": y,
            "frozen": [y.detach()],
            "features": (features,),
            "both": y.mean(-1, keepdim=True),
        }


ROWS = {"embed": "vocabulary", "norm": "sequence", "up": "column", "down": "row"}


def features(world: World, sequence: bool) -> Any:
    config = {
        "mesh": {"tp": world.size},
        "tensor": {"table": ROWS, "sequence_parallel": sequence},
        "optimizer": {"type": "sgd", "lr": 0.1},
    }
    engine = shardwise.initialize(seeded(Features), config, world=world)
    found = []
    for _ in range(2):
        output = engine(torch.arange(8).view(2, 4))
        with pytest.raises(UsageError, match=r"features\[0\] of Features: under tensor parallelism"):
            torch.stack([output["features"][0]]).sum()
        with pytest.raises(UsageError, match="each rank holds a part"):
            output["features"][0].square()
        hidden, both = output["hidden"], output["both"]
        loss = hidden.pow(3).sum() + both.pow(2).sum() + (hidden * output["frozen"][0]).mean()
        engine.backward(loss)
        found.append((float(loss.detach()), engine.step().grad_norm))
    engine.close()
    return found


@pytest.mark.parametrize("sequence", [True, False])
def test_features_of_a_user_s_model(ranks: Any, sequence: bool) -> None:
    """Whole where the cut is along the sequence, with a graph or without; any use of features is refused by name."""
    model, optimizer = seeded(Features), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    right = []
    for _ in range(2):
        output = model(torch.arange(8).view(2, 4))
        hidden = output["hidden"]
        loss = hidden.pow(3).sum() + output["both"].pow(2).sum() + (hidden * output["frozen"][0]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        right.append((float(loss.detach()), float(norm)))
    for found in ranks(2).run(features, sequence):
        for own, wanted in zip(found, right, strict=True):
            assert own == pytest.approx(wanted, rel=1e-10)


def cached(world: World) -> tuple[str, float, float, list[int]]:
    """Return what a loss on cached keys says, the loss and norm of two passes over one cache, and generated tokens."""
    engine = shardwise.initialize(
        made("llama"), {"mesh": {"tp": world.size}, "optimizer": {"type": "sgd", "lr": 1e-12}}, world=world
    )
    cache = engine(input_ids=tokens(8), use_cache=True)[cache_name(engine.module)]
    assert cache.get_seq_length() == 8
    said = []
    for use in (lambda: cache.layers[0].keys.pow(2).mean(), lambda: cache[0], lambda: list(cache)):
        with pytest.raises(UsageError) as error:
            use()
        said.append(str(error.value))
    assert len(set(said)) == 1
    loss = continued(engine, cache_name(engine.module))
    engine.backward(loss)
    norm = engine.step().grad_norm
    with engine.full_parameters(), torch.no_grad():
        words = engine.module.generate(tokens(4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    engine.close()
    return said[0], float(loss.detach()), norm, words.flatten().tolist()


def continued(call: Callable[..., Any], name: str) -> Tensor:
    """Return a loss of two passes, the second of which goes on from the cache of the first."""
    ids = tokens(8)
    first = call(input_ids=ids[:, :5], use_cache=True)
    second = call(input_ids=ids[:, 5:], use_cache=True, **{name: first[name]})
    return second.logits.pow(2).mean() + first.logits.pow(3).mean()


def test_cached_keys_and_values(ranks: Any) -> None:
    """A loss on them was one of this rank's heads; given back to the model they are right, and generation works."""
    model = made("llama")
    name = cache_name(model)
    loss = continued(model, name)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    words = model.generate(tokens(4), max_new_tokens=4, do_sample=False, pad_token_id=0).flatten().tolist()
    for said, found, found_norm, found_words in ranks(2).run(cached):
        assert f"{name} of LlamaForCausalLM: under tensor parallelism" in said
        assert (found, found_norm) == pytest.approx((float(loss.detach()), norm), rel=1e-9)
        assert found_words == words
