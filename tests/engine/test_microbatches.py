"""A microbatch is what comes between two calls of step(): whatever is done in it, the gradient is the plain loop's."""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import shardwise
from shardwise.base.errors import DataError, UsageError
from shardwise.comm.world import World
from tests.engine.conformance import first_difference
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.plain import worst

LIMIT = 1e-10
RATES = {"lr": 0.01, "weight_decay": 0.1}


class TwoLosses(Language):
    """Two losses of one forward pass."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), x.square().mean()


def piece(*place: int) -> tuple[Tensor, Tensor]:
    """Batches with unlike numbers of labels."""
    number = 0
    for each in place:
        number = 10 * number + each
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    targets = torch.randint(VOCABULARY, (2, 5), generator=generator)
    targets[0, : number % 4] = -100
    return tokens, targets


# What a microbatch may be; ``look(i)`` is a pass that learns nothing -----------------------------------------------

Forward = Callable[[int], tuple[Tensor, Tensor]]
Backward = Callable[..., None]


def usual(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    backward(sum(forward(0)))


def two_losses(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    first, second = forward(0)
    backward(first, retain_graph=True)
    backward(second)


def two_passes(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    backward(sum(forward(0)))
    backward(sum(forward(1)))


def backwards_last(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    first, second = sum(forward(0)), sum(forward(1))
    backward(first)
    backward(second)


def looked_at(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    look(1)
    loss = sum(forward(0))
    look(2)
    forward(1)  # a graph that nobody walks
    backward(loss)
    look(3)
    forward(1)


def without_sync(forward: Forward, backward: Backward, look: Forward, held: Any) -> None:
    with held():
        backward(sum(forward(0)))
        backward(sum(forward(1)))
    backward(sum(forward(2)))


class Step(NamedTuple):
    """One step of a loop."""

    kinds: tuple[Any, ...]
    """Of its microbatches."""
    said: str = ""
    """When the caller says where it ends: "before" or "after" each backward pass, "between" the steps; "": never."""
    conforms: bool = False
    """Whether the list is run Action by Action: each backward has its forward pass, and one can know which is last."""


STEPS = [
    Step((two_losses, two_losses)),
    Step((two_passes, two_passes)),  # two backward passes of a microbatch were seen, and are expected
    Step((two_passes, two_passes), conforms=True),
    Step((backwards_last, backwards_last)),
    Step((usual, usual)),
    Step((usual, two_losses)),
    Step((looked_at, looked_at)),
    Step((without_sync, without_sync)),
    Step((without_sync, without_sync), conforms=True),
    Step((two_losses,), "after"),
    Step((usual, usual, usual), "before"),
    Step((usual,), "before", conforms=True),
    Step((usual, usual), "before", conforms=True),
    Step((usual, two_losses, usual), "after"),
    Step((usual, usual, usual), "between", conforms=True),
    Step((usual,), "between", conforms=True),
]


def plain(ranks: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, norm) by step and the weights after them all, of one process that adds up everything."""
    model = seeded(TwoLosses)
    optimizer = optim.AdamW(model.parameters(), **RATES)
    told = []
    for step, (kinds, *_) in enumerate(STEPS):
        optimizer.zero_grad()
        total = loss_sum = 0.0
        for number, kind in enumerate(kinds):
            for rank in range(ranks):
                weight = float((piece(step, number, rank, 0)[1] != -100).sum())
                total += weight

                def backward(loss: Tensor, weight: float = weight, **options: Any) -> None:
                    nonlocal loss_sum
                    loss_sum += weight * float(loss.detach())
                    (loss * weight).backward(**options)

                def forward(i: int, place: Any = (step, number, rank)) -> Any:
                    return model(*piece(*place, i))

                kind(forward, backward, forward, contextlib.nullcontext)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= total
        told.append((loss_sum / total, float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))))
        optimizer.step()
    return told, {name: each.detach() for name, each in model.named_parameters()}


def measure(world: World, config: Any, asks: bool) -> dict[str, Any]:
    """Errors of losses, norms and weights, and departures where there should be none. ``asks``: for the gradients
    before each step."""
    wanted, weights = plain(world.size)
    given = {"optimizer": {"type": "adamw", **RATES}, "batch": {"accumulation": 2}, **config}
    engine = shardwise.initialize(seeded(TwoLosses), given, world=world)
    found: dict[str, Any] = {}
    for step, (kinds, said, conforms) in enumerate(STEPS):
        if said == "between":
            engine.set_boundary(None)
            engine.set_accumulation(len(kinds))
        for number, kind in enumerate(kinds):
            is_last = number == len(kinds) - 1
            if said == "before":
                engine.set_boundary(is_last)

            def forward(i: int, place: Any = (step, number, world.rank)) -> Any:
                return engine(*piece(*place, i))

            def look(i: int, place: Any = (step, number, world.rank)) -> Any:
                with torch.no_grad():
                    return engine(*piece(*place, i))

            kind(forward, engine.backward, look, engine.no_sync)
            if said == "after":
                engine.set_boundary(is_last)
            if is_last and asks:
                engine.gradients()
            planned = engine.plan.own.actions
            assert engine.is_boundary == is_last
            result = engine.step()
            assert (result is None) == (not is_last)
        name = f"step {step}: {' '.join(kind.__name__ for kind in kinds)}"
        found[f"loss of {name}"] = abs(result.loss - wanted[step][0])
        found[f"norm of {name}"] = abs(result.grad_norm - wanted[step][1])
        departed = [*result.divergences, first_difference(tuple(engine.trace.actions), planned)]
        found[f"departures of {name}"] = [text for text in departed if text and conforms]
    state = engine.state_dict()
    found["weights"] = worst({name: state[name] for name in weights}, weights)
    engine.close()
    return {
        name: value for name, value in found.items() if (value if isinstance(value, list) else value > LIMIT)
    }


def measure_all(world: World, configs: list[Any]) -> list[Any]:
    found: list[Any] = []
    for number, config in enumerate(configs):
        try:
            found.append(measure(world, config, number % 2 == 1))
        except Exception:
            found.append(traceback.format_exc())
    return found


def calls(world: World) -> dict[str, Any]:
    """What they refuse, and loaders that deal another global batch."""
    said: dict[str, Any] = {}
    model = nn.Linear(1, 1).double()
    engine = shardwise.initialize(
        model, {"batch": {"accumulation": 2}}, world=world, loss=lambda model, x: model(x[0]).square().mean()
    )

    def refused(name: str, call: Callable[[], Any]) -> None:
        with pytest.raises((UsageError, DataError)) as caught:
            call()
        said[name] = str(caught.value)

    loader = engine.loader(TensorDataset(torch.arange(24.0).double()[:, None]), batch_size=2, shuffle=False)
    refused("unlike", lambda: engine.set_accumulation(1 + world.rank))
    refused("none", lambda: engine.set_accumulation(0))
    refused("too many", lambda: engine.set_accumulation(7))
    seen: list[int] = []
    with engine.no_sync():
        engine.backward(engine((torch.full((2, 1), 1.0 + world.rank).double(),)))
        refused("held", engine.step)
    refused("begun", lambda: engine.set_accumulation(3))
    refused("in the middle", lambda: engine.train_step([None, None]))
    engine.discard()
    engine.set_boundary(True)
    refused("whole", lambda: engine.train_step([None, None]))
    engine.set_boundary(None)
    for batch in loader:
        engine.backward(engine(batch))
        result = engine.step()
        seen.append(int(batch[0][0]))
        if result is not None and result.step == 1:
            assert (engine.accumulation, len(loader)) == (2, 6)
            engine.set_accumulation(1)
    said["seen"] = seen
    said["steps"] = (engine.step_count, engine.accumulation, len(loader))
    engine.close()
    return said


def test_what_calls_refuse_and_loaders_deal(ranks: Any) -> None:
    for rank, said in enumerate(ranks(2).run(calls)):
        assert "all ranks must say the same" in said["unlike"] and "given 0" in said["none"]
        assert "holds 24 samples" in said["too many"]
        assert "inside engine.no_sync()" in said["held"]
        assert "1 backward passes of a step have run already" in said["begun"]
        assert "call engine.step() to its end" in said["in the middle"]
        assert "engine.set_boundary(None)" in said["whole"]
        assert said["seen"] == [rank * 2 + place for place in (0, 4, 8, 12, 16, 20)]
        assert said["steps"] == (5, 1, 6)


def in_stages(world: World) -> list[float]:
    """Steps of two, three and one microbatches through a pipeline: errors of loss and norm."""
    model, errors = seeded(Language), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = shardwise.initialize(
        seeded(Language),
        {"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "optimizer": {"type": "sgd", "lr": 0.1}},
        world=world,
        loss=lambda model, batch: model(*batch),
    )
    for step, count in enumerate((2, 3, 1)):
        engine.set_accumulation(count)
        batches = [piece(step, i) for i in range(count)]
        result = engine.train_step(batches)
        weights = [float((targets != -100).sum()) for _, targets in batches]
        optimizer.zero_grad()
        losses = [
            model(*batch) * weight / sum(weights) for batch, weight in zip(batches, weights, strict=True)
        ]
        torch.stack(losses).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        errors += [abs(result.loss - float(sum(each.detach() for each in losses)))]
        errors += [abs(result.grad_norm - float(norm)), float(len(result.divergences))]
        assert engine.trace.actions == [*engine.plan.own.actions]
    with pytest.raises(UsageError, match="train_step\\(batches\\) runs all microbatches"):
        engine.set_boundary(True)
    engine.close()
    return errors


def test_a_pipeline_takes_another_number_of_microbatches(ranks: Any) -> None:
    for errors in ranks(2).run(in_stages):
        assert max(errors) <= LIMIT


def two_nets() -> list[nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

    return [seeded(make, seed=seed) for seed in (1, 2)]


def generated(world: World, stage: int) -> dict[str, Tensor]:
    """Two engines in one loop: a generator and a discriminator, each with two microbatches a step, three steps; on one
    rank without engines."""

    made, judge = two_nets()
    optimizer = {"type": "sgd", "lr": 0.1}
    config = {"zero": {"stage": stage}, "optimizer": optimizer, "batch": {"accumulation": 2}}
    share = torch.arange(world.rank, 4, world.size)
    engines = [shardwise.initialize(each, config, world=world) for each in (made, judge)]
    generator, discriminator = engines
    for step in range(3):
        for microbatch in range(2):
            seeded_by = torch.Generator().manual_seed(10 * step + microbatch)
            noise, real = torch.randn(2, 4, 3, generator=seeded_by, dtype=torch.float64)[:, share]
            fake = generator(noise)
            discriminator.backward((discriminator(real) - 1).square().mean())
            discriminator.backward(discriminator(fake.detach()).square().mean())
            judge.requires_grad_(False)
            loss = (discriminator(fake) - 1).square().mean()
            generator.backward(loss)
            judge.requires_grad_(True)
            generator.step()
            discriminator.step()
    found = {
        f"{i}.{name}": each for i, engine in enumerate(engines) for name, each in engine.state_dict().items()
    }
    for engine in engines:
        engine.close()
    return found


def generated_plainly() -> dict[str, Tensor]:
    """The same without engines."""
    nets = made, judge = two_nets()
    optimizers = [optim.SGD(each.parameters(), lr=0.1) for each in nets]
    for step in range(3):
        for microbatch in range(2):
            seeded_by = torch.Generator().manual_seed(10 * step + microbatch)
            noise, real = torch.randn(2, 4, 3, generator=seeded_by, dtype=torch.float64)
            fake = made(noise)
            ((judge(real) - 1).square().mean() / 2).backward()
            (judge(fake.detach()).square().mean() / 2).backward()
            judge.requires_grad_(False)
            ((judge(fake) - 1).square().mean() / 2).backward()
            judge.requires_grad_(True)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return {f"{i}.{name}": each for i, net in enumerate(nets) for name, each in net.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_engines_in_one_loop(ranks: Any, stage: int) -> None:
    wanted = generated_plainly()
    for found in ranks(2).run(generated, stage):
        assert worst(found, wanted) <= LIMIT


CONFIGS: dict[int, list[Any]] = {
    1: [{}],
    2: [{"zero": {"stage": stage}} for stage in range(4)],
    4: [{"zero": {"stage": stage}, "mesh": {"dp": {"replicate": 2, "shard": 2}}} for stage in (3, 1)],
}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_the_plain_loops(ranks: Any, size: int) -> None:
    for found in ranks(size).run(measure_all, CONFIGS[size]):
        for config, wrong in zip(CONFIGS[size], found, strict=True):
            assert not wrong, f"{config}: {wrong}"
