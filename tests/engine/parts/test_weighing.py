"""Masked labels: the gradient of one batch, whatever ranks and microbatches it is cut into, without a word.

Means over unlike numbers of labels were averaged alike, and norms came out 17 to 82 % off.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.engine.parts.weighing import MicrobatchWeights, divisor_of, labels_in
from shardwise.models import Gpt, GptPolicy
from tests.engine.nets import LLAMA

ROWS, LENGTH, VOCABULARY = 32, 10, 23
IGNORE = -100


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and labels, [32, 10]: prompts and padding of -100, five rows in turn without any label."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : row % 4] = IGNORE
        labels[row, 2 + (row * 5) % 8 :] = IGNORE
    labels[6:16] = IGNORE
    return tokens, labels


def wide_causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """transformers' loss of causal models, in fp64 all through."""
    shifted = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    return F.cross_entropy(logits.reshape(-1, vocab_size), shifted.reshape(-1), ignore_index=IGNORE)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **LLAMA)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def causal() -> nn.Module:
    """In fp64 all through: transformers' norms and its loss round to fp32."""
    model: Any = llama()
    model.loss_function = wide_causal_loss
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(16, eps=1e-6))
    return model


def masked() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def gpt() -> nn.Module:
    return Gpt(GptPolicy(layers=2, width=16, heads=4, context=LENGTH, vocab=VOCABULARY))


MODELS = {"causal": causal, "masked": masked, "gpt": gpt, "as it is": llama, "own loss": gpt}


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind]().double()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean by hand: a sum over the labels that count."""
    logits = model(batch["tokens"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return total / (batch["targets"] != IGNORE).sum().clamp_min(1)


def cut(kind: str, first: int, count: int) -> dict[str, Tensor]:
    tokens, labels = (each[first : first + count] for each in rows())
    if kind in ("gpt", "own loss"):
        return {"tokens": tokens, "targets": labels}
    return {"input_ids": tokens, "labels": labels}


def truth(kind: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch in one process."""
    model = made(kind)
    batch = cut(kind, 0, ROWS)
    output = own_loss(model, batch) if kind == "own loss" else model(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(
    world: World, kind: str, microbatches: int, mesh: dict[str, int], stage: int, by: str = "auto"
) -> tuple[float, float, float]:
    """Of the gradient norm, the loss and the evaluated loss, before the first step."""
    loss, gradients = truth(kind)
    norm = float(torch.stack([each.double().norm() for each in gradients.values()]).norm())
    config = {
        "mesh": mesh,
        "zero": {"stage": stage},
        "batch": {"accumulation": microbatches, "weigh_by": by},
        "optimizer": {"type": "sgd", "lr": 1e-12},
    }
    engine = shardwise.initialize(
        made(kind), config, loss=own_loss if kind == "own loss" else None, world=world
    )
    dp = engine.plan.mesh.size("dp")
    index = engine.plan.mesh.index("dp", world.rank)
    each = ROWS // (dp * microbatches)
    pieces = [cut(kind, (i * dp + index) * each, each) for i in range(microbatches)]
    result = engine.train_step(pieces)
    evaluated = engine.evaluate([(piece, None) for piece in pieces])
    engine.close()
    return abs(result.grad_norm / norm - 1), abs(result.loss / loss - 1), abs(evaluated / loss - 1)


def table(world: World, kind: str) -> list[tuple[int, tuple[float, float, float]]]:
    return [
        (microbatches, errors(world, kind, microbatches, {"dp": world.size}, stage=3 * (microbatches == 4)))
        for microbatches in (1, 4, 8)
    ]


SIZES = [
    pytest.param(kind, size, marks=pytest.mark.soak if size == 4 and kind not in ("gpt", "own loss") else ())
    for kind in ("causal", "masked", "gpt", "own loss", "as it is")
    for size in (1, 2, 4)
]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_the_norm_is_that_of_one_batch(ranks: Any, kind: str, size: int) -> None:
    """Within 1e-9; as it is, a model of transformers rounds to fp32 in its norms and its loss."""
    for found in ranks(size).run(table, kind):
        for microbatches, wrong in found:
            assert max(wrong) <= (1e-6 if kind == "as it is" else 1e-9), (microbatches, wrong)


def on_meshes(world: World) -> list[tuple[str, Any, tuple[float, float, float]]]:
    return [
        (kind, mesh, errors(world, kind, 4, mesh, 0))
        for kind in ("causal", "gpt")
        for mesh in ({"pp": 2, "dp": 2}, {"tp": 2, "dp": 2})
        if kind == "gpt" or "pp" in mesh
    ]


def test_through_stages_and_slices(ranks: Any) -> None:
    for found in ranks(4).run(on_meshes):
        for kind, mesh, wrong in found:
            assert max(wrong) <= 1e-9, (kind, mesh, wrong)


def counted_alike(world: World) -> float:
    # Its loss of a microbatch without labels is 0, where a mean of none would be NaN and end the step.
    return errors(world, "own loss", 4, {"dp": world.size}, 0, by="batches")[0]


def test_batches_count_alike_where_that_is_asked_for(ranks: Any) -> None:
    assert all(error > 1e-2 for error in ranks(2).run(counted_alike))


def test_what_a_loss_was_divided_by() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.tensor([1, IGNORE, 2, 0])
    weights = torch.arange(1.0, 6.0)
    image = torch.randn(2, 5, 3, 3, requires_grad=True)
    of = F.cross_entropy
    assert divisor_of(of(x, y)) == 3
    assert divisor_of((of(x, y) / 4).to(torch.float64) + 0.1 * x.square().mean()) == 3
    assert divisor_of(of(x, y, weight=weights)) == 2 + 3 + 1
    assert divisor_of(of(x, y, label_smoothing=0.1)) == 3
    assert divisor_of(of(image, torch.zeros(2, 3, 3, dtype=torch.long))) == 18
    assert divisor_of(of(x, torch.full((4,), IGNORE))) == 0
    assert divisor_of(of(x, y, reduction="sum") / (y != IGNORE).sum()) == 3
    assert divisor_of(of(x, y, reduction="sum") / 70) == 70
    nothing = torch.full((4,), IGNORE)
    assert divisor_of(of(x, nothing, reduction="sum") / torch.tensor(0).clamp_min(1)) == 0
    assert divisor_of(of(x, nothing, reduction="sum") / 70) == 70
    assert divisor_of(of(x, y, reduction="sum")) == 1
    assert divisor_of(of(x, y, reduction="none").mean()) == 4
    mask = (y != IGNORE).float()
    assert divisor_of((of(x, y, reduction="none") * mask).sum() / mask.sum()) == 3
    assert divisor_of(F.mse_loss(x, torch.zeros(4, 5))) is None
    assert divisor_of(x.sum().detach()) is None


def test_no_block_runs_again_for_a_look_at_the_graph() -> None:
    """What a layer divides by lies in its block, where recomputation makes it anew; stage 3 has no weights then."""
    runs = []

    def block(x: Tensor) -> Tensor:
        runs.append(x)
        return x / x.sum()

    x = torch.ones(3, requires_grad=True)
    assert divisor_of(checkpoint(block, x, use_reentrant=False).square().mean()) is None
    assert len(runs) == 1


def test_which_labels_a_batch_has() -> None:
    y = torch.zeros(2, 3, dtype=torch.long)
    assert labels_in({"x": y.float(), "labels": y}) is y and labels_in({"targets": y}) is y
    assert labels_in((y.float(), y)) is y and labels_in([y, y]) is y
    for batch in (y, (y,), (y, y.float()), {"labels": y.bool()}, {"labels": torch.tensor(3)}, None, {"y": y}):
        assert labels_in(batch) is None


def test_tokens_without_labels_are_refused(world: World) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    engine = shardwise.initialize(Plain(), {"batch": {"weigh_by": "tokens"}}, world=world)
    with pytest.raises(UsageError, match="weigh_by: tokens"):
        engine.backward(engine(torch.randn(2, 2)))
    engine.close()


@pytest.fixture
def world() -> World:
    return World(0, 1)


def test_cross_entropies_of_unlike_counts_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.tensor([1, 2, 3, 0])
    cross_entropy = torch.nn.functional.cross_entropy
    weighing = MicrobatchWeights("auto", torch.nn.Linear(1, 1))
    with caplog.at_level("WARNING", logger="shardwise"):
        assert weighing.of_loss(cross_entropy(x, y) + cross_entropy(x, y), None) == 4.0
        assert not caplog.records
        for _ in range(2):
            assert weighing.of_loss(cross_entropy(x, y) + cross_entropy(x[:3], y[:3]), None) == 4.0
    (record,) = caplog.records
    assert "(3, 4)" in record.getMessage()
