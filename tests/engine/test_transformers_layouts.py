"""A tiny LLaMA of transformers through the engine: on two slices and on two stages it learns as on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import join
from tests.engine.nets import seeded

transformers = pytest.importorskip("transformers")

VOCABULARY, MICROBATCHES = 51, 2
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=None,
    use_cache=False,
)


def llama(tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    made: nn.Module = seeded(transformers.LlamaForCausalLM, config, dtype=torch.float32)
    return made


def batches(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (MICROBATCHES, 2, 8), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def trained(world: Any, pp: int, tp: int, tied: bool) -> Any:
    """Losses and norms of three steps, validation loss, logits."""
    config = {
        "mesh": {"pp": pp, "tp": tp},
        "batch": {"accumulation": MICROBATCHES},
        "optimizer": {"type": "adamw", "lr": 0.01},
        "clip": 0.5,
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
