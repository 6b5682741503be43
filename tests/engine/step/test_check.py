"""The first step of a cut model is compared with the uncut one: right models pass, and a step after edits is compared.

The bugs that the check has to find are listed in tests/verify/bugs.py, and found in tests/verify/test_bugs_check.py.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError
from shardwise.comm.world import World
from shardwise.engine.step.check import FirstStepCheck
from tests.engine.nets import Language, seeded
from tests.engine.test_model_parallel import Layout, config_of, model_of, pieces
from tests.verify.bugs import norm_gradients_not_summed, stale_weights

RIGHT = [
    Layout(tp=2),
    Layout(tp=2, family="gpt2", sequence=False, dropout=0.2),
    Layout(pp=2, microbatches=3, dropout=0.2, recompute="full"),
    Layout(pp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, family="gpt2"),
    Layout(pp=2, tp=2, microbatches=3, family="gpt2", dropout=0.2),
    Layout(pp=2, dp=2, stage=3, microbatches=3),
    Layout(dp=2, tp=2, stage=3, microbatches=2, recompute="selective", kv_heads=1),
]


class Seen:
    """What a check did on this rank: what differed (empty: nothing) where it compared, why it did not otherwise."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.left_out: list[str] = []


@contextmanager
def looking() -> Iterator[Seen]:
    seen = Seen()
    difference, say = FirstStepCheck._difference, FirstStepCheck._say

    def compares(self: FirstStepCheck, *args: Any) -> str:
        seen.compared.append(difference(self, *args))
        return seen.compared[-1]

    def says(self: FirstStepCheck, reason: str) -> None:
        seen.left_out.append(reason)
        say(self, reason)

    with patch.object(FirstStepCheck, "_difference", compares), patch.object(FirstStepCheck, "_say", says):
        yield seen


def first_step(world: World, layout: Layout, edits: bool = False, **changes: Any) -> str:
    """What is refused of it. ``edits``: weights, between a first evaluation and the step."""
    engine = shardwise.initialize(model_of(layout), config_of(layout) | changes, world=world)
    batches, weights = pieces(layout, engine.dp_index, 0)
    try:
        if edits:
            engine.evaluate([(batches[0], 1.0)])
            with engine.full_parameters(write=True) as whole, torch.no_grad():
                for parameter in whole.values():
                    parameter.mul_(1.25)
        engine.train_step(batches, weights)
    except PlanError as error:
        return str(error)
    finally:
        engine.close()
    return ""


# Refused -----------------------------------------------------------------------------------------------------------


def stale_after_edits(world: World) -> str:
    """Weights are edited between a first evaluation and the step, which gathers those of before."""
    with stale_weights(world.rank):
        return first_step(world, Layout(pp=2, dp=2, stage=3, microbatches=3), edits=True)


def test_weights_of_before_an_edit_are_refused_before_a_weight_moves(ranks: Any) -> None:
    (words,) = set(ranks(4).run(stale_after_edits))
    assert words.startswith("check: the model cut by mesh."), words


# Passed ------------------------------------------------------------------------------------------------------------


def right(world: World, layouts: list[Layout]) -> list[tuple[str, list[str], list[str]]]:
    found = []
    for layout in layouts:
        with looking() as seen:
            found.append((first_step(world, layout), seen.compared, seen.left_out))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_right_models_are_compared_and_pass(ranks: Any, size: int) -> None:
    layouts = [layout for layout in RIGHT if layout.size == size]
    for layout, *rows in zip(layouts, *ranks(size).run(right, layouts), strict=True):
        assert all(refused == "" for refused, _, _ in rows), (layout, rows)
        assert [compared for _, compared, _ in rows].count([""]) == layout.dp, (layout, rows)


def nothing_changes(world: World) -> None:
    """Weights, generators and traffic of a run are those of one without the check, to the bit."""
    layout = Layout(tp=2, family="gpt2", dropout=0.2)

    def run(check: str) -> Any:
        torch.manual_seed(5)
        random.seed(5)
        engine = shardwise.initialize(
            model_of(layout), config_of(layout) | {"check_first_step": check}, world=world
        )
        for step in range(2):
            engine.train_step(*pieces(layout, 0, step))
        found = engine.state_dict(), torch.rand(1), random.random(), dict(engine.traffic.counts)
        engine.close()
        return found

    with looking() as seen:
        (with_it, *others), (without, *others_without) = run("auto"), run("off")
    assert seen.compared == [""] * (world.rank == 0)
    assert all(torch.equal(with_it[name], without[name]) for name in without)
    assert others == others_without


def dtypes(world: World) -> None:
    """fp32 and bf16 round, and pass."""
    for precision in ("fp32", "bf16"):
        for mesh in ({"tp": 2}, {"pp": 2}):
            model = seeded(Language, dtype=torch.float32) if "pp" in mesh else model_of(Layout(tp=2)).float()
            tokens = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(1))
            with looking() as seen:
                engine = shardwise.initialize(model, {"mesh": mesh, "precision": precision}, world=world)
                engine.train_step([(tokens, tokens)])
                engine.close()
            assert sum(seen.compared == [""] for _ in "1") == (world.rank == ("pp" in mesh)), seen.left_out


class Counts(nn.Module):
    """Buffers that a pass changes and that count in it; a module that is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.norm(self.linear(x))) / float(self.calls)
        self.calls += 1
        return y


def buffers(world: World) -> None:
    with looking() as seen:
        config = {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}
        engine = shardwise.initialize(seeded(Counts), config, world=world)
        x = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        engine.train_step([x[0], x[1]])
        calls = engine.state_dict()["blocks.3.calls"]
        engine.close()
    assert seen.compared == [""] * world.rank and calls == 3


# Loops of a user's own ---------------------------------------------------------------------------------------------


def own_loop(world: World) -> None:
    """Compared where the loss is the engine's own, where it is the user's function of logits, of two passes, where two
    losses are; said and left out where the loss reaches weights by another way."""
    layout = Layout(tp=2, microbatches=2)
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))

    def own(engine: Any) -> list[Tensor]:
        return [engine((tokens, tokens))]

    def of_logits(engine: Any) -> list[Tensor]:
        return [engine(tokens).float().logsumexp(-1).mean()]

    def scaled(engine: Any) -> list[Tensor]:
        return [engine((tokens, tokens)) * 2]

    def of_two(engine: Any) -> list[Tensor]:
        return [(engine(tokens) - engine(tokens.flip(0)).detach()).square().mean() + engine(tokens).mean()]

    def twice(engine: Any) -> list[Tensor]:
        logits = engine(tokens)
        return [logits.square().mean(), logits.logsumexp(-1).mean()]

    def penalized(engine: Any) -> list[Tensor]:
        return [engine((tokens, tokens)) + engine.log_probs(tokens, tokens).mean()]

    for losses in (own, of_logits, scaled, of_two, twice, penalized):
        with looking() as seen:
            engine = shardwise.initialize(model_of(layout), config_of(layout), world=world)
            for _ in range(2):
                found = losses(engine)
                for i, loss in enumerate(found):
                    engine.backward(loss, retain_graph=i + 1 < len(found))
                engine.step()
            engine.close()
        if losses is penalized:
            assert not seen.compared and "by another way" in seen.left_out[0]
        else:
            assert seen.compared == [""] * (world.rank == 0) and not seen.left_out, (losses, seen.left_out)


def own_loop_with_a_bug(world: World) -> None:
    """A planted bug is refused where the loss is the user's function of logits."""
    layout = Layout(tp=2)
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    with norm_gradients_not_summed(world.rank):
        engine = shardwise.initialize(model_of(layout), config_of(layout), world=world)
        engine.backward(engine(tokens).logsumexp(-1).mean())
        with pytest.raises(PlanError, match="gradients of .* parameters differ"):
            engine.step()
        engine.close()


def other_model(world: World) -> None:
    """A loss function that calls the engine's model instead of the one that it is given, or a part of it, calls the
    copy's where the copy runs."""
    layout = Layout(tp=2, stage=3)
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    model = model_of(layout)

    def entirely(_: nn.Module, batch: Any) -> Any:
        return model(*batch)

    def partly(given: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = given(*batch) + model.embed(batch[0]).mean() * 0
        return loss

    for whole in (True, False):
        model = model_of(layout)
        loss = entirely if whole else partly
        with looking() as seen:
            engine = shardwise.initialize(
                model, config_of(layout._replace(sequence=whole)), world=world, loss=loss
            )
            engine.train_step([(tokens, tokens)])
            engine.close()
        assert seen.compared == [""] * (world.rank == 0), seen.left_out


class Scaler:
    """A hook that is an object, with state."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls.append(1)
        return output * (1 + 0.5 * len(self.calls))


def hooks(world: World) -> None:
    """A user's hooks run on the copy, and what they count or collect is the copy's own there."""
    layout = Layout(pp=2)
    model, calls, scaler, count = model_of(layout), [], Scaler(), 0

    def counts(*_: Any) -> None:
        nonlocal count
        count += 1
        calls.append(1)

    model.blocks[-1].register_forward_hook(counts)
    model.blocks[0].register_forward_hook(scaler)
    model.blocks[-1].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 1.5,))
    with looking() as seen:
        engine = shardwise.initialize(model, config_of(layout), world=world)
        engine.train_step(*pieces(layout, 0, 0))
        engine.close()
    assert seen.compared == [""] * world.rank and not seen.left_out
    assert len(calls) == count == world.rank and len(scaler.calls) == 1 - world.rank
    layout = Layout(tp=2)
    model, calls = model_of(layout), []
    model.blocks[-1].mlp.down.register_full_backward_hook(lambda *_: calls.append(1))
    with looking() as seen:
        engine = shardwise.initialize(model, config_of(layout), world=world)
        engine.train_step(*pieces(layout, 0, 0))
        engine.close()
    assert calls == [1], "a layer that is cut keeps its hooks"
    assert seen.compared == [""] * (world.rank == 0)


def centred(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


def hooks_on_slices(world: World) -> None:
    """A hook that mixes features of a layer which tp cuts is refused by name; one on whole features is right."""
    layout = Layout(tp=2, family="gpt2")
    for path, is_right in (("mlp.down", True), ("mlp.up", False)):
        model = model_of(layout)
        model.blocks[0].get_submodule(path).register_forward_hook(centred)
        engine = shardwise.initialize(model, config_of(layout), world=world)
        if is_right:
            engine.train_step(*pieces(layout, 0, 0))
        else:
            with pytest.raises(
                PlanError, match=r"blocks.0.mlp.up has a hook of yours.*a slice of the features"
            ):
                engine.train_step(*pieces(layout, 0, 0))
        engine.close()
    model = model_of(layout)
    model.blocks[0].mlp.up.register_forward_hook(centred)
    engine = shardwise.initialize(model, config_of(layout), world=world)
    with (
        patch.object(FirstStepCheck, "_obstacle", lambda self: "the memory is full"),
        pytest.raises(PlanError, match=r"blocks.0.mlp.up has a hook.*cannot be compared: the memory is full"),
    ):
        engine.train_step(*pieces(layout, 0, 0))
    engine.close()


def forwards(world: World) -> None:
    """A forward that was put on a module calls the copy's own in a copy of it."""
    for layout in (Layout(pp=2), Layout(tp=2, family="gpt2")):
        model = model_of(layout)
        own = model.blocks[-1].forward
        model.blocks[-1].forward = lambda *args, own=own, **kwargs: own(*args, **kwargs) * 1.5
        with looking() as seen:
            engine = shardwise.initialize(model, config_of(layout), world=world)
            engine.train_step(*pieces(layout, 0, 0))
            engine.close()
        assert seen.compared == [""] * (world.rank == (layout.pp == 2)), seen.left_out
    model = model_of(Layout(tp=2, family="gpt2"))
    up = model.blocks[0].mlp.up
    own_up = up.forward
    up.forward = lambda x: own_up(x).softmax(-1)
    with pytest.raises(
        PlanError, match=r"blocks.0.mlp.up is a Linear whose forward was replaced on the instance"
    ):
        shardwise.initialize(model, config_of(Layout(tp=2, family="gpt2")), world=world)


def trained_beside(world: World) -> None:
    """What a loss function trains outside of the model gets its gradient once."""
    layout = Layout(tp=2)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    with looking() as seen:
        engine = shardwise.initialize(
            model_of(layout), config_of(layout), world=world, loss=lambda model, batch: model(*batch) * factor
        )
        loss = engine.train_step([(tokens, tokens)]).loss
        engine.close()
    assert seen.compared == [""] * (world.rank == 0)
    assert factor.grad is not None and abs(float(factor.grad) - loss) < 1e-9


def passed(world: World, layout: Layout, before: Any = None, autocast: bool = False) -> tuple[str, str]:
    """What is refused of a first step after ``before(model)``, which a user did to it, and why it was not compared."""
    model = model_of(layout).float() if autocast else model_of(layout)
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    engine = shardwise.initialize(model, config_of(layout), world=world)
    if before is not None:
        before(model)
    with looking() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = engine((tokens, tokens))
        engine.backward(loss)
        try:
            engine.step()
        except PlanError as error:
            return str(error), ""
        finally:
            engine.close()
    assert bool(seen.compared) is (world.rank == 0 and not any(seen.left_out))
    return "", "".join(seen.left_out)


def what_a_user_changed(world: World) -> None:
    """Frozen later, hooks on modules and on gradients, autocast around the pass: compared."""
    habits: list[Any] = [
        lambda model: model.embed.requires_grad_(False),
        lambda model: model.norm.weight.register_hook(lambda grad: grad / 2),
        lambda model: model.norm.register_forward_hook(lambda *a: a[2] * 2),
    ]
    for habit in habits:
        assert passed(world, Layout(tp=2), habit) == ("", "")
    assert passed(world, Layout(tp=2), autocast=True) == ("", "")


def unfinished(world: World) -> None:
    """Passes that no backward pass follows are no part of the step, and few of them are kept."""
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))
    for passes in (4, 20):
        with looking() as seen:
            engine = shardwise.initialize(model_of(Layout(tp=2)), config_of(Layout(tp=2)), world=world)
            losses = [engine((tokens, tokens)) for _ in range(passes)]
            assert engine.check is not None and len(engine.check._running) <= 8
            engine.backward(losses[-1])
            engine.step()
            engine.close()
        assert seen.compared == [""] * (world.rank == 0 and passes == 4)
        assert passes == 4 or "more than 8 passes" in seen.left_out[0]


def numpys_generator(world: World) -> None:
    """The copy draws what the pass drew, and all ranks go on as if there were no copy."""
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(*batch) * (1 + np.random.rand())
        return found

    np.random.seed(5)
    with looking() as seen:
        engine = shardwise.initialize(model_of(Layout(tp=2)), config_of(Layout(tp=2)), world=world, loss=loss)
        engine.train_step([(tokens, tokens)])
        engine.close()
    following = np.random.rand()
    np.random.seed(5)
    assert following == np.random.rand(2)[1]
    assert seen.compared == [""] * (world.rank == 0), seen.left_out


def rounded_inside(world: World) -> None:
    """A pass that rounds to 16 bits inside, though all weights are fp32, is held to what 16 bits can tell."""
    layout = Layout(tp=2, family="gpt2")
    tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(*batch)
        return found

    taken: list[Any] = []
    tolerances = FirstStepCheck._tolerances

    def takes(self: FirstStepCheck) -> Any:
        taken.append(tolerances(self))
        return taken[-1]

    with looking() as seen, patch.object(FirstStepCheck, "_tolerances", takes):
        engine = shardwise.initialize(model_of(layout).float(), config_of(layout), world=world, loss=loss)
        engine.train_step([(tokens, tokens)])
        engine.close()
    assert seen.compared == [""] * (world.rank == 0)
    assert [each.gradient for each in taken] == [0.3] * (world.rank == 0)


class Overflows(Counts):
    """The first loss of all does."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = super().forward(x)
        return loss * (1e30 if float(self.blocks[-1].calls) == 2 else 1)


def skipped(world: World) -> None:
    """The step after a skipped one begins with the buffers that it left; small gradients in fp16 have their norm."""
    precision = {"compute": "fp16", "grad": "fp16", "loss_scale": {"init_scale": 2.0**12}}
    engine = shardwise.initialize(
        seeded(Overflows).float(),  # type: ignore[arg-type]
        {"mesh": {"pp": 2}, "precision": precision},
        world=world,
        loss=lambda model, x: model(x).float() * 1e-4,
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    with looking() as seen:
        results = [engine.train_step([x]) for _ in range(2)]
    engine.close()
    assert [result.skipped for result in results] == [True, False], results
    assert seen.compared == [""] * world.rank and not any(seen.left_out), (seen.compared, seen.left_out)


@pytest.mark.parametrize(
    "story",
    [
        nothing_changes,
        dtypes,
        buffers,
        own_loop,
        own_loop_with_a_bug,
        other_model,
        hooks,
        hooks_on_slices,
        what_a_user_changed,
        unfinished,
        numpys_generator,
        skipped,
        rounded_inside,
        forwards,
        trained_beside,
    ],
    ids=lambda story: story.__name__,
)
def test_two_ranks(ranks: Any, story: Any) -> None:
    ranks(2).run(story)
