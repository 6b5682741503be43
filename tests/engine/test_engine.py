"""The engine's calls: what they do at every stage, and what they say where they cannot work."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import NonFiniteError, UsageError
from shardwise.comm.world import World, join
from tests.engine.nets import Language, seeded
from tests.engine.plain import error, worst
from tests.parallel.zero.nets import WIDTH, Net
from tests.parallel.zero.test_hooks import piece
from tests.parallel.zero.test_windows import raised

LIMIT = 1e-10


@pytest.fixture
def world() -> Iterator[World]:
    """One process."""
    yield join(quiet=True)


def start(world: World, model: nn.Module | None = None, **config: Any) -> Any:
    return shardwise.initialize(seeded(Net) if model is None else model, config, world=world)


# One process -------------------------------------------------------------------------------------------------------


def test_step_acts_at_the_boundary(world: World) -> None:
    engine = start(world, batch={"accumulation": 3})
    for i in range(2):
        engine.backward(engine(piece(0, i)))
        assert engine.step() is None
    engine.backward(engine(piece(0, 2)))
    result = engine.step()
    assert (result.step, result.weight, result.skipped) == (1, 3.0, False)
    assert engine.step_count == 1


def test_what_backward_refuses(world: World) -> None:
    engine = start(world)
    with pytest.raises(UsageError, match=r"loss of one number, given \(3,\); take its mean"):
        engine.backward(torch.ones(3, requires_grad=True))
    with pytest.raises(UsageError, match="given float"):
        engine.backward(1.0)
    with pytest.raises(UsageError, match="there was no backward since the last step"):
        engine.step()
    loss = engine(piece(0, 0))
    engine.backward(loss)
    with pytest.raises(UsageError, match="a weight of 2, but this microbatch counts 1"):
        engine.backward(engine(piece(0, 1)), weight=2)
    engine.gradients()
    with pytest.raises(UsageError, match="has summed up the gradients of this step; call engine.step"):
        engine.backward(engine(piece(0, 1)))
    engine.step()
    engine.backward(engine(piece(0, 1)))


def test_gradients_are_known_between_backward_and_step(world: World) -> None:
    engine = start(world, batch={"accumulation": 2})
    engine.backward(engine(piece(0, 0)))
    with pytest.raises(UsageError, match="1 of 2 microbatches have run"):
        engine.gradients()


def test_train_step_counts_its_batches(world: World) -> None:
    engine = start(world, batch={"accumulation": 2})
    with pytest.raises(UsageError, match="given 1 microbatches; the configuration makes 2"):
        engine.train_step([piece(0, 0)])


def test_a_graph_of_the_last_step_is_stale(world: World) -> None:
    """As in plain torch: the weights that it saved have changed."""
    engine = start(world)
    loss = engine(piece(0, 0))
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


def test_a_graph_may_be_walked_twice(world: World) -> None:
    engine = start(world, batch={"accumulation": 2})
    loss = engine(piece(0, 0))
    engine.backward(loss, retain_graph=True)
    engine.step()
    engine.backward(loss)
    twice = engine.gradients()
    engine.step()
    other = start(world)
    other.backward(other(piece(0, 0)))
    assert worst(twice, other.gradients()) <= LIMIT


def test_callbacks_see_every_step(world: World) -> None:
    seen: list[int] = []
    model = seeded(Net)
    engine = shardwise.initialize(
        model, {}, world=world, on_step=[lambda engine, result: seen.append(result.step)]
    )
    for step in range(3):
        engine.train_step([piece(step, 0)])
    assert seen == [1, 2, 3]


def test_learning_rate_follows_the_schedule_in_steps(world: World) -> None:
    engine = start(
        world,
        optimizer={"type": "sgd", "lr": 0.5},
        schedule={"type": "linear", "warmup_steps": 2, "total_steps": 6},
        batch={"accumulation": 2},
    )
    rates = []
    for step in range(6):
        rates.append(engine.lr)
        assert engine.train_step([piece(step % 4, i) for i in range(2)]).lr == rates[-1]
    assert rates == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]


def test_losses_are_found_in_what_a_model_returns(world: World) -> None:
    class Returns(nn.Module):
        def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.wrap = wrap

        def forward(self, x: Tensor) -> Any:
            return self.wrap((self.w * x).sum())

    class Answer:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    for wrap in (
        lambda y: y,
        lambda y: {"loss": y, "more": 1},
        lambda y: (y, "more"),
        Answer,
        lambda y: y[None],
    ):
        engine = start(world, Returns(wrap))
        batch = {"x": torch.ones(2)} if wrap is Answer else torch.ones(2)
        assert engine.train_step([batch]).loss == 2.0
    engine = start(world, Returns(lambda y: {"logits": y}))
    with pytest.raises(UsageError, match=r"a mapping with keys \['logits'\].*return the loss"):
        engine.train_step([torch.ones(2)])


def test_a_loss_function(world: World) -> None:
    engine = shardwise.initialize(
        nn.Linear(2, 1), {}, world=world, loss=lambda model, batch: model(batch["x"]).square().mean()
    )
    first = engine.train_step([{"x": torch.ones(3, 2)}]).loss
    assert engine.train_step([{"x": torch.ones(3, 2)}]).loss < first


def test_a_nan_is_told_and_spares_the_weights(world: World) -> None:
    engine = start(world)
    before = engine.state_dict()
    x, flag = piece(0, 0)
    engine.module.blocks[1].down.register_forward_hook(lambda m, i, o: o / 0 * 0 if x.isnan().any() else o)
    bad = x.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"step 1: gradients are not finite; .*its batch holds NaN"):
        engine.train_step([(bad, flag)])
    assert worst(engine.state_dict(), before) == 0.0
    assert engine.train_step([(x, flag)]).step == 1


def test_a_batch_without_any_weight_changes_nothing(world: World) -> None:
    engine = start(world)
    before = engine.state_dict()
    result = engine.train_step([piece(0, 0)], weights=[0.0])
    assert (result.weight, result.grad_norm, result.skipped) == (0.0, 0.0, True)
    assert math.isnan(result.loss), "the mean of nothing is not 0"
    assert worst(engine.state_dict(), before) == 0.0


def test_weights_and_plain_losses_may_take_turns(world: World) -> None:
    """What the weights are divided by does not reach the numbers, in whichever order they come."""
    for weights in ([None, 3.0, 1000.0], [1000.0, None, 3.0]):
        engine = start(world, optimizer={"type": "sgd", "lr": 0.1})
        other = start(world, optimizer={"type": "sgd", "lr": 0.1})
        for step, weight in enumerate(weights):
            engine.backward(engine(piece(step, 0)), weight=weight)
            other.backward(other(piece(step, 0)))
            assert worst(engine.gradients(), other.gradients()) <= LIMIT
            engine.step()
            other.step()


def test_close_gives_the_model_back(world: World) -> None:
    model = seeded(Net)
    engine = start(world, model)
    engine.close()
    loss = model(*piece(0, 0))
    loss.backward()
    assert model.first.weight.grad is not None


# Several ranks -----------------------------------------------------------------------------------------------------


def looks_and_edits(world: World) -> None:
    """full_parameters, state_dict and gradients at every stage, and edits that reach masters and shards."""
    for stage in range(4):
        for precision in ("fp64", "bf16"):
            engine = start(world, seeded(Language), zero={"stage": stage}, precision=precision)
            tokens = torch.arange(10).view(2, 5)
            engine.train_step([(tokens.roll(world.rank), tokens)])
            state = engine.state_dict()
            with engine.full_parameters() as parameters:
                assert set(parameters) == {name for name in state}
                assert parameters["embed.weight"] is parameters["head.weight"]
                assert worst({n: p.detach() for n, p in parameters.items()}, state) == 0.0
                loss = engine.module(tokens, tokens)  # whole weights: the model can simply be called
            assert abs(float(loss) - engine.evaluate([((tokens, tokens), 1.0)])) < 1e-6
            with engine.full_parameters(write=True) as parameters:
                for parameter in parameters.values():
                    parameter.mul_(0.5)  # tied ones twice
            halved = {
                n: value * (0.25 if n in ("embed.weight", "head.weight") else 0.5)
                for n, value in state.items()
            }
            assert worst(engine.state_dict(), halved) == 0.0, (stage, precision)
            assert worst(masters(engine), halved) < 1e-2, "the master was edited too"
            engine.train_step([(tokens, tokens)])
            state = engine.state_dict()
            moved = max(float((state[name].double() - halved[name]).abs().max()) for name in state)
            assert moved < 0.01, "the next step starts from the edit"
            engine.close()


def masters(engine: Any) -> dict[str, Tensor]:
    found = {}
    for bucket, _ in engine._parts.trained:
        full = bucket.weight.gathered_copy(bucket.weight.master)
        for slot, view in zip(bucket.layout.slots, bucket.views.fresh(full), strict=True):
            for name in (slot.name, *slot.aliases):
                found[name] = view.double()
    return found


def edits_in_a_context_for_reading(world: World) -> None:
    for stage in (0, 3):
        engine = start(world, zero={"stage": stage})

        def edit(engine: Any = engine) -> None:
            with engine.full_parameters() as parameters:
                parameters["first.bias"].zero_()

        assert "first.bias was edited" in raised(UsageError, edit)
        engine.close()


def gradients_twice(world: World) -> None:
    """Looking at gradients does not change them: under HSDP each look once doubled them."""
    for dp in ({"shard": 4}, {"replicate": 2, "shard": 2}):
        norms = []
        for looks in (0, 2):
            engine = start(world, zero={"stage": 2}, mesh={"dp": dp})
            engine.backward(engine(piece(0, world.rank)))
            for _ in range(looks):
                engine.gradients()
            norms.append(engine.step().grad_norm)
            engine.close()
        assert norms[0] == norms[1]


def uneven_evaluation(world: World) -> None:
    """Weights make the mean; a rank without data repeats a batch with weight 0."""
    for stage in range(4):
        engine = start(world, zero={"stage": stage})
        plain = seeded(Net).eval()
        pieces = [(piece(0, i), weight) for i, weight in enumerate((3.0, 1.0, 2.0))]
        wanted = sum(float(plain(*batch).detach()) * weight for batch, weight in pieces) / 6.0
        mine = [pieces[0], pieces[2]] if world.rank == 0 else [pieces[1], (pieces[1][0], 0.0)]
        assert abs(engine.evaluate(mine) - wanted) <= LIMIT
        assert engine.module.training
        engine.close()


def stops_together(world: World) -> None:
    engine = start(world)
    engine.train_step([piece(0, world.rank)])
    assert not engine.stop_requested
    if world.rank == 1:
        engine.request_stop()
    assert not engine.stop_requested
    engine.train_step([piece(1, world.rank)])
    assert engine.stop_requested
    assert engine.agree(world.rank == 0) and not engine.agree(False)
    engine.close()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, noise: Tensor) -> Tensor:
        result: Tensor = self.net(noise)
        return result


class Judge(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = self.last(self.middle(self.first(x), torch.tensor(False))).squeeze(-1)
        return result


def real_and_noise(step: int, i: int) -> tuple[Tensor, Tensor]:
    return piece(step, i)[0], piece(step + 7, i)[0][:, :2]


def two_engines(world: World) -> None:
    """A generator and a judge: one loss runs through both models, each step belongs to one of them."""
    for stage in range(4):
        generator, judge = seeded(Generator, seed=1), seeded(Judge, seed=2)
        optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.0) for m in (generator, judge)]
        config = {"zero": {"stage": stage}, "optimizer": {"lr": 1e-3}}
        makes, judges = (start(world, seeded(m, seed=s), **config) for m, s in ((Generator, 1), (Judge, 2)))
        for step in range(3):
            for i in range(world.size):
                real, noise = real_and_noise(step, i)
                loss = (judge(real) - 1).square().mean() + judge(generator(noise).detach()).square().mean()
                (loss / world.size).backward()
            optimizers[1].step()
            judge.zero_grad()
            for i in range(world.size):
                _, noise = real_and_noise(step, i)
                ((judge(generator(noise)) - 1).square().mean() / world.size).backward()
            optimizers[0].step()
            generator.zero_grad()
            judge.zero_grad()

            real, noise = real_and_noise(step, world.rank)
            fake = makes(noise).detach()
            judges.backward((judges(real) - 1).square().mean() + judges(fake).square().mean())
            judges.step()
            judges.module.requires_grad_(False)
            makes.backward((judges(makes(noise)) - 1).square().mean())
            makes.step()
            judges.module.requires_grad_(True)
        for engine, plain in ((makes, generator), (judges, judge)):
            assert worst(engine.state_dict(), plain.state_dict()) <= LIMIT, stage
        text = raised(UsageError, lambda: makes.backward((judges(makes(noise)) - 1).square().mean()))  # noqa: B023
        assert "set model.requires_grad_(False)" in text
        makes.close()
        judges.close()


def batch_of_one_epoch(world: World) -> None:
    """The first steps of one engine do not disturb another that is in the middle of a step."""
    first, second = (start(world, zero={"stage": 3}, batch={"accumulation": 2}) for _ in range(2))
    for step in range(2):
        for i in range(2):
            for engine in (first, second):
                engine.backward(engine(piece(step, 2 * i + world.rank)))
                engine.step()
    assert worst(first.state_dict(), second.state_dict()) == 0.0
    first.close()
    second.close()


def buffers_follow(world: World) -> None:
    """Buffers are rank 0's at the start, stand in the state dict, and those that do not persist do not."""

    class Buffered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.full((1,), float(world.rank)))
            self.register_buffer("hidden", torch.zeros(2), persistent=False)
            self.register_buffer("count", torch.tensor(world.rank + 5))

        def middle(self, x: Tensor, flag: Tensor) -> Tensor:
            self.count += 1
            return super().middle(x, flag) + self.shift

    for stage in range(4):
        engine = start(world, seeded(Buffered), zero={"stage": stage})
        engine.train_step([piece(0, world.rank)])
        state = engine.state_dict()
        assert float(state["shift"]) == 0.0 and int(state["count"]) == 6 and "hidden" not in state
        with engine.full_parameters():
            assert list(state) == list(engine.module.state_dict())
        engine.close()


@pytest.mark.parametrize(
    "story",
    [
        looks_and_edits,
        edits_in_a_context_for_reading,
        uneven_evaluation,
        stops_together,
        two_engines,
        batch_of_one_epoch,
        buffers_follow,
    ],
    ids=lambda story: story.__name__,
)
def test_at_every_stage(ranks: Any, story: Callable[[World], None]) -> None:
    ranks(2).run(story)


def test_looking_at_gradients_changes_nothing(ranks: Any) -> None:
    ranks(4).run(gradients_twice)


def steps_with_weights(world: World) -> list[float]:
    """Tokens as weights in fp16: neither their size nor the loss scale may overflow."""
    engine = start(
        world, seeded(Net, dtype=torch.float32), precision="fp16", optimizer={"type": "sgd", "lr": 0.01}
    )
    norms = []
    for step in range(3):
        x, flag = piece(step, world.rank)
        engine.backward(engine((x.float(), flag)), weight=250_000 + world.rank)
        norms.append(engine.step().grad_norm)
    engine.close()
    return norms


def test_large_weights_do_not_overflow(ranks: Any) -> None:
    first, second = ranks(2).run(steps_with_weights)
    assert first == second
    assert all(0 < norm < 1e3 for norm in first)


def test_error_measure() -> None:
    """A true gradient of zero is measured against what summed up to it."""
    assert error(torch.tensor([1e-12]), torch.tensor([0.0]), torch.tensor([2.0])) == pytest.approx(5e-13)
    assert worst({"a": torch.ones(1)}, {"b": torch.ones(1)}) == float("inf")
