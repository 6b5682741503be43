"""Losses without a cross entropy in their graph, with uneven labels: the gradient of one batch, or a refusal by name.

Their microbatches were weighed by labels that the loss does not count: 4 to 20 % off without a word.
"""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.base.errors import NonFiniteError, UsageError
from shardwise.comm.world import World
from shardwise.engine.parts.weighing import MicrobatchWeights, WeightGuesses, are_uneven
from tests.engine.nets import seeded

ROWS, LENGTH, VOCABULARY, IGNORE = 16, 8, 11, -100


def batch(rows: slice) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 1 + row % 3] = IGNORE
        labels[row, 3 + (row * 5) % 6 :] = IGNORE
    labels[1::4, 0] = 3  # the first label of a row, which a shifted loss leaves out
    return {"input_ids": tokens[rows], "labels": labels[rows]}


class MeanNll(torch.autograd.Function):
    """A fused loss of its own, as Liger and Unsloth have: nothing of the mean is in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            loss = F.cross_entropy(inner, labels, ignore_index=IGNORE)
            (grad,) = torch.autograd.grad(loss, inner)
        ctx.save_for_backward(grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Shifted inside of the model."""
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    rows, targets = flat(logits, labels)
    mask = targets != IGNORE
    found = rows.log_softmax(-1).gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    return -(found * mask).sum() / mask.sum().clamp_min(1)


def indexed(logits: Tensor, labels: Tensor) -> Tensor:
    rows, targets = flat(logits, labels)
    mask = targets != IGNORE
    return -rows.log_softmax(-1)[mask].gather(-1, targets[mask][:, None]).mean()


def preferred(logits: Tensor, labels: Tensor) -> Tensor:
    """DPO's: a mean over rows, whatever each of them counts."""
    mask = labels[:, 1:] != IGNORE
    found = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    return -F.logsigmoid(0.3 * (found * mask).sum(-1) + 1).mean()


def fused(logits: Tensor, labels: Tensor) -> Tensor:
    return MeanNll.apply(*flat(logits, labels))


def again(logits: Tensor, labels: Tensor) -> Tensor:
    return checkpoint(F.cross_entropy, *flat(logits, labels), use_reentrant=True)


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels))


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    """Whole-number targets of a regression, of which -100 is one."""
    return F.mse_loss(logits.mean(-1), labels.double() / 10)


LOSSES = {each.__name__: each for each in (gathered, indexed, preferred, fused, again, plain, squares)}


class Causal(nn.Module):
    def __init__(self, loss: str, penalties: int = 0) -> None:
        super().__init__()
        self.loss, self.penalties = loss, penalties
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = LOSSES[self.loss](self.head(torch.tanh(self.embed(input_ids))), labels)
        for i in range(self.penalties):
            loss = loss + 1e-3 * (i % 3) * (self.head.weight.square().sum() + self.head.bias.square().sum())
        return loss


def made(loss: str) -> nn.Module:
    kind, _, rest = loss.partition(" ")
    model: nn.Module = seeded(Causal, kind, 80 if "penalties" in rest else 0)
    if "compiled" in rest:
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    if "in place" in rest:
        model.compile(backend="aot_eager")
    return model


CASES = [
    *("gathered", "indexed", "preferred", "squares", "plain penalties", "gathered penalties"),
    *("plain compiled", "gathered compiled", "preferred compiled", "plain in place"),
]
UNSEEN = ["fused", "again"]


def truth(loss: str) -> float:
    model = made(loss.replace("compiled", "").replace("in place", ""))
    model(**batch(slice(None))).backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def trained(world: World, loss: str, steps: int = 1, **batch_keys: Any) -> list[float] | str:
    """Norms of steps of no size, on this rank's rows in two microbatches; or what is said."""
    config = {
        "batch": {"accumulation": 2} | batch_keys,
        "optimizer": {"type": "sgd", "lr": 1e-14},
    }
    engine = shardwise.initialize(made(loss), config, world=world)
    each = ROWS // (2 * world.size)
    begins = [(i * world.size + world.rank) * each for i in range(2)]
    try:
        return [
            engine.train_step([batch(slice(begin, begin + each)) for begin in begins]).grad_norm
            for _ in range(steps)
        ]
    except UsageError as error:
        return str(error)
    finally:
        engine.close()


def table(world: World) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks at every input
        found: dict[str, Any] = {loss: trained(world, loss, 2) for loss in (*CASES, *UNSEEN)}
    for loss in UNSEEN:
        found[f"{loss} named"] = trained(world, loss, 2, weigh_by="shifted_tokens")
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_exact_or_refused(ranks: Any, size: int) -> None:
    for found in ranks(size).run(table):
        for loss in CASES:
            assert found[loss] == pytest.approx([truth(loss)] * 2, rel=1e-10), loss
        for loss in UNSEEN:
            assert "unlike numbers of labels, and the graph of the loss does not show" in found[loss]
            assert found[f"{loss} named"] == pytest.approx([truth(loss)] * 2, rel=1e-10), loss


def test_even_labels_need_no_weight() -> None:
    world = World(0, 1)
    engine = shardwise.initialize(made("fused"), {"batch": {"accumulation": 2}}, world=world)
    whole = batch(slice(0, 4))
    engine.train_step([whole, whole])
    with pytest.raises(UsageError, match="batch.weigh_by: tokens"):
        engine.train_step([whole, batch(slice(4, 8))])
    assert engine.train_step([whole, whole]).step == 2  # the refused step has left nothing
    for weight, rows in ((5.0, slice(0, 4)), (7.0, slice(4, 8))):
        engine.backward(engine(batch(rows)), weight=weight)
        result = engine.step()
    assert result is not None and result.weight == 12.0
    engine.close()


def test_guesses_are_compared_by_their_sums() -> None:
    assert not are_uneven(WeightGuesses())
    assert not are_uneven(WeightGuesses().with_counts(7, 6).with_counts(7, 6))
    assert are_uneven(WeightGuesses().with_counts(7, 6).with_counts(7, 5))
    assert are_uneven(WeightGuesses().with_counts(1e6, 6).with_counts(1e6 + 1, 6))


def test_a_mean_of_no_label_weighs_nothing() -> None:
    weighing = MicrobatchWeights("auto", nn.Linear(1, 1))
    logits = torch.randn(2, LENGTH, VOCABULARY, requires_grad=True)
    labels = torch.full((2, LENGTH), IGNORE)
    assert weighing.of_loss(gathered(logits, labels), {"labels": labels}) == 0.0
    labels[0, 3] = 1
    assert weighing.of_loss(gathered(logits, labels), {"labels": labels}) == 1.0


def test_a_mask_without_labels_is_read_from_the_graph() -> None:
    weighing = MicrobatchWeights("auto", nn.Linear(1, 1))
    x = torch.randn(6, requires_grad=True)
    for count in (4, 1, 5):
        mask = (torch.arange(6) < count).float()
        assert weighing.of_loss((x * mask).sum() / mask.sum(), {"x": x, "mask": mask}) == count
    assert weighing.of_loss(x.square().mean(), (x, mask)) == 1.0


def nothing_counted(world: World, everywhere: bool) -> Any:
    """A step without a counted label on rank 0, or on all ranks, between two others."""
    config = {"optimizer": {"type": "adamw", "lr": 0.1, "weight_decay": 0.5}}
    engine = shardwise.initialize(made("gathered"), config, world=world)
    each = ROWS // world.size
    whole = batch(slice(world.rank * each, (world.rank + 1) * each))
    empty = {"input_ids": whole["input_ids"], "labels": torch.full_like(whole["labels"], IGNORE)}
    engine.train_step([whole])
    before = engine.state_dict()
    result = engine.train_step([empty if everywhere or world.rank == 0 else whole])
    after = engine.state_dict()
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    last = engine.train_step([whole])
    engine.close()
    return result.loss, result.weight, result.skipped, moved, last.loss


def test_a_step_in_which_nothing_counts(ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A mean of nothing is not 0: the loss is nan, no weight moves by its decay, and the log says so."""
    for loss, weight, skipped, moved, last in ranks(2).run(nothing_counted, True):
        assert math.isnan(loss) and weight == 0 and skipped and not moved and math.isfinite(last)
    for loss, weight, skipped, moved, _ in ranks(2).run(nothing_counted, False):
        assert math.isfinite(loss) and weight > 0 and not skipped and moved
    with caplog.at_level("WARNING", logger="shardwise"):
        nothing_counted(World(0, 1), True)
    (said,) = [each.getMessage() for each in caplog.records if "nothing counts" in each.getMessage()]
    assert said.startswith("step 2 is skipped")


class Divided(nn.Linear):
    """A mean by hand whose divisor may be 0."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels != IGNORE
        return (super().forward(x)[:, 0] * mask).sum() / mask.sum()


def divided_by_nothing(world: World) -> str:
    engine = shardwise.initialize(seeded(Divided, 3, 1), world=world)
    x = torch.full((4, 3), 1.0 + world.rank, dtype=torch.float64)
    try:
        engine.train_step([{"x": x, "labels": torch.full((4,), IGNORE if world.rank else 1)}])
    except NonFiniteError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_mean_of_no_label_is_named(ranks: Any) -> None:
    for said in ranks(2).run(divided_by_nothing):
        assert "on rank 1, in microbatch 0, its batch has no counted label (all 4 are -100)" in said
