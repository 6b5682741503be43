"""The loss of a step, and what ranks were given: what is not a number, differs, or is the same twice ends the step on
all ranks alike, with the weights of the step before, and the engine stands between two steps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.base.errors import DataError, NonFiniteError, UsageError
from shardwise.comm.world import World
from shardwise.engine.step.alike import BatchFingerprint, same
from shardwise.models import Gpt, GptPolicy
from tests.engine.nets import VOCABULARY, Language, seeded


class Reporting(nn.Module):
    """Its loss has a part that no weight had a share in, such as a side loss on detached values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return self.linear(x).square().mean() + side.sum()


def side_losses(world: World, precision: str | None) -> list[Any]:
    """A step whose side loss is nan on the last rank; one of weight 0 with it; a good one; one without a graph."""
    config: dict[str, Any] = {"zero": {"stage": 3}, "optimizer": {"type": "sgd", "lr": 0.1}}
    if precision is not None:
        config["precision"] = {"compute": precision, "loss_scale": {"init_scale": 2.0}}
    engine = shardwise.initialize(seeded(Reporting, dtype=torch.float32), config, world=world)
    x, good, nan = torch.full((2, 3), 1.0 + world.rank), torch.zeros(2), torch.tensor([0.0, math.nan])
    is_last = world.rank == world.size - 1
    before = engine.state_dict()
    with pytest.raises(NonFiniteError) as caught:
        engine.train_step([(x, nan if is_last else good)])
    kept = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    quiet = engine.train_step([(x, nan if is_last else good)], [0.0 if is_last and world.size > 1 else 1.0])
    after = engine.train_step([(x, good)])
    with pytest.raises(UsageError, match="the loss has no graph"):
        engine.backward(engine(x, good).detach())
    with torch.no_grad(), pytest.raises(UsageError, match="the loss has no graph"):
        engine.backward(engine(x, good))
    engine.backward(engine(x, good))
    last = engine.step()
    engine.close()
    losses = [quiet.loss, after.loss, last.loss]
    return [str(caught.value), kept, losses, quiet.skipped or after.skipped or last.skipped]


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_nan_loss_of_finite_gradients_is_an_error_on_all_ranks(ranks: Any, precision: str | None) -> None:
    for said, kept, losses, skipped in ranks(2).run(side_losses, precision):
        assert "step 1: the loss is nan while every gradient is finite" in said
        assert "weights are those of step 0" in said
        assert kept and not skipped and all(math.isfinite(loss) for loss in losses)


def sliced_losses(
    world: World, penalty: float, precision: str, factor: float = 1.0, draws: bool = False
) -> tuple[str, float]:
    """A penalty on what each rank has for itself. ``draws``: the pass draws random numbers, too."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = factor * (model(**batch) + penalty * (1 + world.rank))
        return functional.dropout(result, 1e-9) if draws else result

    policy = GptPolicy(layers=2, width=16, heads=4, context=8, vocab=19)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gpt(policy)
    config = {"mesh": {"tp": 2}, "precision": precision}
    engine = shardwise.initialize(model, config, loss=loss, world=world)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 19, (2, 8), generator=generator)
    try:
        result = engine.train_step([{"tokens": tokens, "targets": tokens}])
        return "", result.loss
    except UsageError as error:
        return str(error), math.nan
    finally:
        engine.close()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_loss_of_slices_is_an_error(ranks: Any, precision: str) -> None:
    (said, _), (other, _) = ranks(2).run(sliced_losses, 0.3, precision)
    assert said == other and "the ranks of one model (along tp) report losses that differ by" in said
    for quiet, loss in ranks(2).run(sliced_losses, 0.0, precision):
        assert quiet == "" and math.isfinite(loss)


def test_a_loss_of_slices_names_random_numbers_where_some_are_drawn(ranks: Any) -> None:
    """The text led away from functional dropout, whose mask of a slice is no slice of the whole mask."""
    (said, _), _ = ranks(2).run(sliced_losses, 0.3, "fp64", 1.0, True)
    assert "draws random numbers" in said and "functional dropout" in said and "use nn.Dropout" in said
    (said, _), _ = ranks(2).run(sliced_losses, 0.3, "fp64")
    assert "random numbers" not in said


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_small_loss_of_slices_is_an_error(ranks: Any, precision: str) -> None:
    """The limit was absolute below 1, so that a loss of 1e-3 might differ by 10 %."""
    (said, _), _ = ranks(2).run(sliced_losses, 0.6, precision, 1e-3)
    assert "the ranks of one model (along tp) report losses that differ by" in said
    for factor in (1e-3, 0.0):
        for quiet, loss in ranks(2).run(sliced_losses, 0.0, precision, factor):
            assert quiet == "" and math.isfinite(loss)


def given(world: World, kind: str) -> str:
    """Two or four ranks and what the first step gave them."""
    mesh = {"dp": 2, "tp": 2} if world.size == 4 else {"dp": world.size}
    batch = {"duplicates": "allow"} if kind == "allowed" else {}
    model: nn.Module = seeded(Language)
    if world.size == 4:
        model = Gpt(GptPolicy(layers=2, width=16, heads=4, context=8, vocab=VOCABULARY))
    engine = shardwise.initialize(model, {"mesh": mesh, "batch": {"accumulation": 2, **batch}}, world=world)
    tokens = torch.arange(16).view(2, 8) % VOCABULARY
    mine, weights = tokens, [1.0, 1.0]
    if kind == "own":
        mine = tokens.roll(world.rank if world.size < 4 else world.rank // 2)
    elif kind == "constant":
        mine = torch.ones_like(tokens)
    elif kind == "nothing" and world.rank > 0:
        weights = [0.0, 0.0]
    elif kind == "different":
        mine = tokens.roll(world.rank)
    named = [{"tokens": mine, "targets": mine}] * 2 if world.size == 4 else [(mine, mine)] * 2
    said = ""
    try:
        engine.train_step(named, weights)
    except DataError as error:
        said = str(error)
        assert engine.step_count == 0
        # From the second step on nobody looks: equal batches may come by chance.
        own = tokens.roll(1 + world.rank // (world.size // 2))
        engine.train_step([{"tokens": own, "targets": own}] * 2 if world.size == 4 else [(own, own)] * 2)
    engine.train_step(named, weights)
    engine.close()
    return said


@pytest.mark.parametrize(
    ("size", "kind", "expected"),
    [
        (2, "equal", "data-parallel ranks 0 and 1 were given the same batches"),
        (2, "allowed", ""),
        (2, "own", ""),
        (2, "constant", ""),
        (2, "nothing", ""),
        (4, "equal", "data-parallel ranks 0 and 1 were given the same batches"),
        (4, "own", ""),
        (4, "different", "ranks that share a model (along tp and pp) were given different batches"),
    ],
)
def test_batches_of_the_first_step(ranks: Any, size: int, kind: str, expected: str) -> None:
    """A DataLoader that every rank iterates by itself gives all of them the samples of one."""
    for said in ranks(size).run(given, kind):
        assert (expected in said) if expected else said == ""


def test_fingerprints() -> None:
    def of(*batches: Any) -> int:
        made = BatchFingerprint()
        for batch in batches:
            made.add(batch)
        return made.value

    x = torch.arange(6.0)
    assert of((x, {"y": x})) == of([x, {"y": x.clone()}]) > 0
    assert len({of(x), of(x.double()), of(x.view(2, 3)), of(x, x), of(x.flip(0)), of(x.bfloat16())}) == 6
    assert of() == of(torch.empty(0)) == of(torch.zeros(3), torch.ones(2, 2)) == of("text", 3) == 0
    assert of(torch.full((2,), math.nan)) == 0
    assert list(same([5, 0, 7, 0, 5, 7])) == [(0, 4), (2, 5)]
