"""Models of the user's own across stages and slices: lists of layers, sequences, pytrees between the stages.

The plain loop of one process is what they are held to.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import join
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec
from tests.engine.nets import seeded

VOCABULARY, WIDTH, MICROBATCHES = 11, 6, 3


class Split(nn.Module):
    """One tensor in, a dictionary of two out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -0.25, 1.0, 2.0, 1.5, -1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x * self.scale, "skip": (x, None, 2.0)}


class Join(nn.Module):
    """A dictionary of two tensors in, one out; the second is an earlier layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, parts: dict[str, Any]) -> Tensor:
        skip, nothing, factor = parts["skip"]
        assert nothing is None
        joined: Tensor = torch.tanh(self.linear(parts["x"])) + factor * skip
        return joined


def read_out(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.mT  # type: ignore[operator]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def embedding() -> TiedSpec:
    return TiedSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, dtype=torch.float64)


def layers() -> Layers:
    """Specifications, tied ones, modules and plain callables."""
    return Layers(
        [
            embedding(),
            LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
            torch.tanh,
            seeded(Split),
            LayerSpec(Join),
            LayerSpec(nn.LayerNorm, WIDTH, dtype=torch.float64),
            TiedSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, dtype=torch.float64, forward=read_out),
        ],
        loss=token_loss,
        seed=5,
    )


def sequential() -> nn.Module:
    made: nn.Module = seeded(
        nn.Sequential,
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )
    return made


def net(kind: str) -> nn.Module:
    if kind == "layers":
        return layers()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return sequential()


def loss_of(kind: str) -> Any:
    """What ``initialize`` is given: a list of layers knows its loss."""
    return None if kind == "layers" else lambda model, batch: token_loss(model(batch[0]), batch[1])


def microbatches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (MICROBATCHES, 2, 5), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def trained(world: Any, kind: str, pp: int, schedule: str, dp: int = 1, stage: int = 0) -> Any:
    """Losses, gradient norms, then weights, validation loss and predictions."""
    config = {
        "mesh": {"pp": pp, "dp": dp},
        "zero": {"stage": stage},
        "pipeline": {"schedule": schedule, "virtual_stages": 2 if schedule == "interleaved_1f1b" else 1},
        "batch": {"accumulation": MICROBATCHES, "duplicates": "allow"},
        "optimizer": {"type": "adamw", "lr": 0.01},
        "max_grad_norm": 0.5,
    }
    engine = shardwise.initialize(net(kind), config, loss=loss_of(kind), world=world)
    numbers = []
    for step in range(3):
        result = engine.train_step(microbatches(step))
        numbers += [result.loss, result.grad_norm]
    numbers.append(engine.evaluate([(batch, 1.0) for batch in microbatches(9)]))
    state = {name: tensor.tolist() for name, tensor in engine.state_dict().items()}
    logits = [each.tolist() for each in engine.predict([(tokens,) for tokens, _ in microbatches(9)])]
    engine.close()
    return numbers, state, logits


def plain(kind: str) -> Any:
    """The same with torch alone."""
    model = net(kind)
    if isinstance(model, Layers):
        for name, module in model.build(name for name, _ in model.named_children()).items():
            model._modules[name] = module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return token_loss(model(batch[0]), batch[1])

    numbers = []
    for step in range(3):
        optimizer.zero_grad()
        total = sum((loss(batch) for batch in microbatches(step)), torch.zeros(())) / MICROBATCHES
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        numbers += [float(total.detach()), float(norm)]
    with torch.no_grad():
        numbers.append(sum(float(loss(batch)) for batch in microbatches(9)) / MICROBATCHES)
        logits = [model(tokens).tolist() for tokens, _ in microbatches(9)]
    return numbers, {name: tensor.tolist() for name, tensor in model.state_dict().items()}, logits


def check(kind: str, found: list[Any]) -> None:
    numbers, state, logits = plain(kind)
    for own_numbers, own_state, own_logits in found:
        assert own_numbers == pytest.approx(numbers, rel=1e-10)
        assert list(own_state) == list(state)
        for name, values in state.items():
            assert torch.tensor(own_state[name]) == pytest.approx(torch.tensor(values), abs=1e-9), name
        assert torch.tensor(own_logits) == pytest.approx(torch.tensor(logits), abs=1e-9)


@pytest.mark.parametrize("kind", ["layers", "sequential"])
def test_on_one_rank(kind: str) -> None:
    check(kind, [trained(join(quiet=True), kind, 1, "1f1b")])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", ["layers", "sequential"])
def test_on_two_stages(ranks: Any, kind: str, schedule: str) -> None:
    check(kind, ranks(2).run(trained, kind, 2, schedule))


def test_layers_with_stage_3_inside_the_stages(ranks: Any) -> None:
    check("layers", ranks(4).run(trained, "layers", 2, "1f1b", 2, 3))


class Dropping(nn.Module):
    """A layer that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.linear(x))
        return dropped


def dropping(world: Any, pp: int) -> list[float]:
    model = Layers(
        [LayerSpec(Dropping), LayerSpec(Dropping), LayerSpec(Dropping)], loss=nn.functional.mse_loss
    )
    config = {"mesh": {"pp": pp}, "batch": {"accumulation": 2}}
    engine = shardwise.initialize(model, config, world=world)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        x = torch.randn(4, 3, WIDTH, generator=generator, dtype=torch.float64)
        losses.append(engine.train_step([(x[:2], x[2:]), (x[2:], x[:2])]).loss)
    engine.close()
    return losses


def test_dropout_in_specified_layers_does_not_depend_on_the_cut(ranks: Any) -> None:
    alone = dropping(join(quiet=True), 1)
    for losses in ranks(2).run(dropping, 2):
        assert losses == pytest.approx(alone, rel=1e-12)


# Whole parameters, losses and predictions of a model that is cut ----------------------------------------------------

POLICY = GptPolicy(layers=4, width=16, heads=4, kv_heads=2, context=12, vocab=19, hidden=24)


def looked_at(world: Any, pp: int, tp: int) -> Any:
    """Validation loss, logits, whole parameters; the same after an edit of them."""
    model = Gpt(POLICY).to(torch.float64)
    config = {"mesh": {"pp": pp, "tp": tp}, "batch": {"accumulation": 2}}
    engine = shardwise.initialize(model, config, world=world)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 19, (rows, 7), generator=generator) for rows in (2, 1, 3)]
    pairs = [((tokens[:, :-1], tokens[:, 1:]), float(len(tokens))) for tokens in batches]

    def look() -> Any:
        logits = engine.predict([(tokens,) for tokens in batches])
        with engine.full_parameters() as full:
            shapes = {name: tuple(parameter.shape) for name, parameter in full.items()}
        return engine.evaluate(pairs), [each.tolist() for each in logits], shapes

    before = look()
    with engine.full_parameters(write=True) as full:
        for name, parameter in full.items():
            generator = torch.Generator().manual_seed(len(name))
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    after = look()
    with pytest.raises(UsageError, match=r"was edited.*write=True"), engine.full_parameters() as full:
        for parameter in full.values():
            parameter.zero_()
    engine.close()
    return before, after


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_loss_logits_and_whole_parameters(ranks: Any, pp: int, tp: int) -> None:
    wanted = looked_at(join(quiet=True), 1, 1)
    assert wanted[0] != wanted[1]
    for found in ranks(pp * tp).run(looked_at, pp, tp):
        for (loss, logits, shapes), (own_loss, own_logits, own_shapes) in zip(wanted, found, strict=True):
            assert own_shapes == shapes
            assert own_loss == pytest.approx(loss, rel=1e-12)
            for own, right in zip(own_logits, logits, strict=True):
                assert torch.tensor(own) == pytest.approx(torch.tensor(right), abs=1e-10)
