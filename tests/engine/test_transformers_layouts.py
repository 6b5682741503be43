"""A tiny LLaMA of transformers through the engine: on two slices and on two stages it learns as on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import DataError, UsageError
from shardwise.comm.world import join
from tests.engine.nets import LLAMA, seeded

transformers = pytest.importorskip("transformers")

VOCABULARY, MICROBATCHES = 51, 2
SHAPE = LLAMA | dict(vocab_size=VOCABULARY, use_cache=False)


def llama(tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    made: nn.Module = seeded(transformers.LlamaForCausalLM, config, dtype=torch.float32)
    return made


def batches(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (MICROBATCHES, 2, 8), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def trained(world: Any, pp: int, tp: int, tied: bool, tile: int | None = None) -> Any:
    """Losses and norms of three steps, validation loss, logits."""
    config = {
        "tiles": {"logits": tile, "mlp": tile or "off"},
        "mesh": {"pp": pp, "tp": tp},
        "batch": {"accumulation": MICROBATCHES},
        "optimizer": {"type": "adamw", "lr": 0.01},
        "max_grad_norm": 0.5,
    }
    engine = shardwise.initialize(llama(tied), config, world=world)
    numbers = []
    for step in range(3):
        result = engine.train_step(batches(step))
        numbers += [result.loss, result.grad_norm]
    numbers.append(engine.evaluate([(batch, 1.0) for batch in batches(9)]))
    found = engine.predict([{"input_ids": batch["input_ids"]} for batch in batches(9)])
    logits = [each["logits"].tolist() for each in found]
    engine.close()
    return numbers, logits


def plain(tied: bool) -> Any:
    model = llama(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    numbers = []
    for step in range(3):
        optimizer.zero_grad()
        losses = [model(**batch).loss for batch in batches(step)]
        total = torch.stack(losses).mean()
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        numbers += [float(total.detach()), float(norm)]
    with torch.no_grad():
        outputs = [model(**batch) for batch in batches(9)]
    numbers.append(sum(float(output.loss) for output in outputs) / MICROBATCHES)
    return numbers, [output.logits.tolist() for output in outputs]


def check(found: list[Any], tied: bool) -> None:
    numbers, logits = plain(tied)
    for own_numbers, own_logits in found:
        assert own_numbers == pytest.approx(numbers, rel=1e-4)
        assert torch.tensor(own_logits) == pytest.approx(torch.tensor(logits), abs=2e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_on_one_rank(tied: bool) -> None:
    check([trained(join(quiet=True), 1, 1, tied)], tied)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)], ids=["tp2", "pp2"])
def test_on_two_ranks(ranks: Any, pp: int, tp: int, tied: bool) -> None:
    check(ranks(2).run(trained, pp, tp, tied), tied)


# Head and loss by tiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)], ids=["tp2", "pp2"])
def test_by_tiles_on_two_ranks(ranks: Any, pp: int, tp: int) -> None:
    check(ranks(2).run(trained, pp, tp, True, 3), True)


def test_by_tiles_gradients_are_those_of_the_whole() -> None:
    """transformers' own loss rounds to fp32, so the formula stands for it here."""
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True)

    def make() -> nn.Module:
        made: nn.Module = seeded(transformers.LlamaForCausalLM, config, dtype=torch.float64)
        return made

    tokens = batches(1)[0]["input_ids"]
    labels = tokens.clone()
    labels[0, :3] = -100
    model = make()
    logits = model(tokens).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    engine = shardwise.initialize(make(), {"tiles": {"logits": 3, "mlp": 3}, "precision": "fp64"})
    output = engine(input_ids=tokens, labels=labels)
    engine.backward(output.loss)
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-14)
    for name, grad in engine.gradients().items():
        wanted = model.get_parameter(name).grad
        assert (grad - wanted).norm() <= 1e-12 * wanted.norm(), name
    with pytest.raises(UsageError, match=r"tiles\.logits: off"):
        output.logits.argmax(-1)
    with torch.no_grad():
        assert engine(input_ids=tokens, labels=labels).logits.shape == (*tokens.shape, VOCABULARY)
    engine.step()
    engine.close()


class Shifted(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Adds to its logits on their way to the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state) * 2.0 + 1.0
        return self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)


def test_logits_that_a_model_changes_have_no_tiles() -> None:
    """A factor or a cap apart: they are held to the whole in ``tests/foreign``."""
    engine = shardwise.initialize(
        seeded(Shifted, transformers.LlamaConfig(**SHAPE)), {"tiles": {"logits": 3}}
    )
    with pytest.raises(UsageError, match=r"tiles\.logits: a Shifted changes its logits"):
        engine(**batches(1)[0])
    engine.close()


# What of tp shows to the user ----------------------------------------------------------------------------------------


def wide_llama() -> nn.Module:
    config = transformers.LlamaConfig(**SHAPE)
    made: nn.Module = seeded(transformers.LlamaForCausalLM, config)
    return made


def engine_of(world: Any, tp: int, loss: Any = None, make: Any = wide_llama, **more: Any) -> Any:
    config = {"mesh": {"tp": tp}, "optimizer": {"type": "sgd", "lr": 0.1}, **more}
    return shardwise.initialize(make(), config, world=world, loss=loss)


def policy_gradient(world: Any, tp: int, length: int) -> Any:
    """Gradients of a loss of log-probabilities, with an advantage for each token and a target that does not count."""
    engine = engine_of(world, tp)
    tokens = batches(3)[0]["input_ids"][:, : length + 1]
    targets = tokens[:, 1:].clone()
    targets[0, 1] = -100
    advantage = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).view(targets.shape)
    found = engine.log_probs({"input_ids": tokens[:, :-1]}, targets)
    engine.backward(-(advantage * found).mean())
    gradients = {name: value.tolist() for name, value in engine.gradients().items()}
    engine.step()
    engine.close()
    return found.tolist(), gradients


@pytest.mark.parametrize("length", [6, 7])
def test_log_probs_of_given_tokens_and_their_gradients(ranks: Any, length: int) -> None:
    (expected, gradients) = policy_gradient(join(quiet=True), 1, length)
    tokens = batches(3)[0]["input_ids"][:, : length + 1]
    whole = wide_llama()(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    whole[0, 1] = 0
    assert torch.tensor(expected) == pytest.approx(whole.detach().float(), abs=1e-6)
    for found, found_gradients in ranks(2).run(policy_gradient, 2, length):
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), abs=1e-6)
        for name, value in gradients.items():
            assert torch.tensor(found_gradients[name]) == pytest.approx(torch.tensor(value), abs=1e-6), name


def generated(world: Any, tp: int) -> Any:
    engine = engine_of(world, tp)
    tokens = batches(5)[0]["input_ids"][:, :5]
    settings = dict(max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)
    found = [engine.run("generate", tokens, **settings).tolist()]
    engine.backward(engine(batches(5)[0]).loss)
    engine.step()
    found += [engine.run("generate", tokens, **settings).tolist()]
    found += [engine.module.generate(tokens, **settings).tolist()]
    with torch.no_grad():
        hidden = engine.run(lambda: engine.module.model(tokens).last_hidden_state)  # five tokens on two ranks
    if tp > 1:
        with pytest.raises(UsageError, match="gradients begin and end with the model's own forward"):
            engine.run(lambda: engine.module.model(tokens).last_hidden_state)
    engine.close()
    return found, hidden.tolist()


def test_generation_and_functions_of_the_model_give_what_one_process_gives(ranks: Any) -> None:
    expected, hidden = generated(join(quiet=True), 1)
    for found, found_hidden in ranks(2).run(generated, 2):
        assert found == expected
        assert torch.tensor(found_hidden) == pytest.approx(torch.tensor(hidden), abs=1e-6)


def whole_logits(world: Any, tp: int) -> Any:
    engine = engine_of(world, tp, tensor={"gather_logits": True})
    output = engine(batches(5)[0])
    engine.backward(output.loss + output.logits.square().mean())
    norm = engine.step().grad_norm
    engine.close()
    return output.logits.tolist(), norm


def test_whole_logits_beside_the_loss_on_request(ranks: Any) -> None:
    expected, norm = whole_logits(join(quiet=True), 1)
    for found, found_norm in ranks(2).run(whole_logits, 2):
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), abs=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-6)


def past_the_model(world: Any, tp: int) -> Any:
    """The loss by hand from inner modules, with gradients and without; embeddings from outside."""

    def by_hand(model: Any, batch: Any) -> Tensor:
        logits = model.lm_head(model.model(batch["input_ids"]).last_hidden_state)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def from_embeddings(model: Any, batch: Any) -> Tensor:
        given = model.get_input_embeddings()(batch["input_ids"])
        found: Tensor = model(inputs_embeds=given, labels=batch["labels"]).loss
        return found

    found = []
    engine = engine_of(world, tp, by_hand)
    if tp > 1:
        with pytest.raises(UsageError, match="past the model's own forward"):
            engine.train_step([batches(1)[0]])
    found.append(engine.evaluate([(batches(1)[0], 1.0)]))
    engine.close()
    engine = engine_of(world, tp, from_embeddings)
    result = engine.train_step([batches(1)[0]])
    engine.close()
    return [*found, result.loss, result.grad_norm]


def test_inner_modules_called_past_the_model_are_whole_or_refused(ranks: Any) -> None:
    """Where the sequence is cut, what the inner model returns is a part of it."""
    expected = past_the_model(join(quiet=True), 1)
    for found in ranks(2).run(past_the_model, 2):
        assert found == pytest.approx(expected, rel=1e-6)


def late_penalty(world: Any) -> str:
    """A penalty by hand over what this rank holds, which begins behind the first step."""
    steps = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        steps.append(0)
        found: Tensor = model(**batch).loss
        return found + (sum(each.sum() for each in model.parameters()) if len(steps) > 1 else 0)

    engine = engine_of(world, 2, loss, check_first_step="off")
    engine.train_step([batches(1)[0]])
    with pytest.raises(UsageError) as caught:
        engine.train_step([batches(1)[0]])
    engine.close()
    return str(caught.value)


def test_a_penalty_over_slices_that_begins_later_is_an_error(ranks: Any) -> None:
    for text in ranks(2).run(late_penalty):
        assert "the ranks of one model (along tp) report losses that differ" in text


def strange_tokens(world: Any, tp: int, key: str, value: int) -> str:
    engine = engine_of(world, tp)
    batch = {name: each.clone() for name, each in batches(1)[0].items()}
    batch[key][1, 2] = value
    with pytest.raises(DataError) as caught:
        engine.train_step([batch])
    engine.train_step([batches(1)[0]])  # as if nothing had happened
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("input_ids", VOCABULARY), ("labels", VOCABULARY + 7), ("labels", -3)]
)
def test_a_token_outside_the_vocabulary_is_named_before_any_work(ranks: Any, key: str, value: int) -> None:
    texts = [strange_tokens(join(quiet=True), 1, key, value), *ranks(2).run(strange_tokens, 2, key, value)]
    for text in texts:
        assert f"{key!r} holds {value} at [1, 2]" in text and f"knows {VOCABULARY} tokens" in text
