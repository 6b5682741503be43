"""A weight that is not there is a loud error, whatever the user does; and what the user may do works."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CommError, ConfigError, NonFiniteError, UsageError
from shardwise.parallel.zero import layout
from tests.engine.nets import seeded
from tests.engine.plain import against_plain, train, worst
from tests.parallel.zero.nets import WIDTH, Block, Net
from tests.parallel.zero.test_hooks import piece

STAGES = (0, 1, 2, 3)


def start(world: Any, stage: int, model: nn.Module | None = None, **config: Any) -> Any:
    model = seeded(Net) if model is None else model
    zero = {"stage": stage, **config.pop("zero", {})}
    return shardwise.initialize(model, {"zero": zero, "comm": {"timeout_s": 10.0}, **config}, world=world)


def raised(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """The text of the expected error; anything else passes through."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("nothing was raised")


# What must be loud -------------------------------------------------------------------------------------------------


def released_weights(world: Any) -> None:
    engine = start(world, 3)
    model = engine.module
    assert model.blocks[0].up.weight.shape == (WIDTH + 2, WIDTH)
    assert "'first.bias' of Unit (root), which is released" in raised(UsageError, model.first.bias.isnan)
    # A method that is not forward runs outside the Unit's window.
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    said = raised(UsageError, lambda: model.blocks[0].inner(x))
    assert "'blocks.0.up.weight' of Unit blocks.0, which is released" in said and "engine.run" in said
    engine(piece(0, world.rank))  # dropped
    # The engine stands between two steps again, with the weights of before.
    assert engine.train_step([piece(0, world.rank)]).step == 1
    engine.close()


class Inside(Net):
    """The loss uses a block's weight after its window."""

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        loss = super().forward(x, flag)
        return loss + 0.1 * self.blocks[1].up.weight.square().sum()


class Smuggled(Net):
    """A view of a weight leaves its window: its value was read inside, its memory is another Unit's later."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.blocks[0].up.register_forward_hook(lambda m, i, o: kept.append(m.weight.view(-1)))
        x = super().middle(x, flag)
        handle.remove()
        return x * kept[0].square().sum()


def reads_outside(world: Any) -> None:
    for model, kinds in ((seeded(Inside), UsageError), (seeded(Smuggled), (NonFiniteError, UsageError))):
        engine = start(world, 3, model, zero={"debug": True})
        raised(kinds, lambda engine=engine: engine.train_step([piece(0, world.rank)]))  # type: ignore[misc]
        engine.close()


class Opaque:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class OpaqueBlock(Block):
    def forward(self, x: Any) -> Any:
        return Opaque(super().forward(x.y if isinstance(x, Opaque) else x))


class ReturnsOpaque(Net):
    """Nobody can hang a hook on the tensors inside a foreign object."""

    def block(self) -> nn.Module:
        return OpaqueBlock()

    def middle(self, x: Any, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = x.y
        return result


def opaque_output(world: Any) -> None:
    engine = start(world, 3, seeded(ReturnsOpaque))
    loss = engine(piece(0, world.rank))
    assert "released" in raised(UsageError, lambda: engine.backward(loss))
    engine.close()


def direct_backward(world: Any) -> None:
    for stage in STAGES:
        engine = start(world, stage)
        loss = engine(piece(0, world.rank))
        assert "engine.backward(loss)" in raised(UsageError, loss.backward)
        engine.close()


def unfrozen(world: Any) -> None:
    model = seeded(Net)
    model.blocks[1].requires_grad_(False)
    engine = start(world, 2, model)
    engine.train_step([piece(0, world.rank)])
    model.blocks[1].requires_grad_(True)
    text = raised(UsageError, lambda: engine.train_step([piece(1, world.rank)]))
    assert "blocks.1.up.weight was frozen" in text
    model.blocks[1].requires_grad_(False)
    model.blocks[0].requires_grad_(False)  # freezing later is fine: no rank uses it, nothing moves
    before = engine.state_dict()
    engine.train_step([piece(1, world.rank)])
    after = engine.state_dict()
    assert torch.equal(before["blocks.0.up.weight"], after["blocks.0.up.weight"])
    assert not torch.equal(before["blocks.2.up.weight"], after["blocks.2.up.weight"])
    engine.close()


def other_collectives(world: Any) -> None:
    """One rank's collectives differed in name, not in size: no transport would notice."""
    engine = start(world, 3, comm={"transport": "torch", "timeout_s": 10.0})
    before = engine.state_dict()
    engine.backward(engine(piece(0, world.rank)))
    if world.rank == 1:
        engine.traffic.sequence ^= 1 << 20
    assert "same collectives" in raised(CommError, engine.step)
    assert worst(engine.state_dict(), before) == 0.0
    engine.close()


def behind_the_engines_back(world: Any) -> None:
    """A model whose parameters are given other memory, or loaded, after initialize() would train on without effect."""
    for stage in (0, 2):
        engine = start(world, stage)
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()
        x, flag = piece(0, world.rank)
        assert "does not lie in the engine's memory" in raised(
            UsageError,
            lambda engine=engine, x=x, flag=flag: engine.train_step([(x, flag)]),  # type: ignore[misc]
        )
        engine.close()
        engine = start(world, stage, seeded(Net, dtype=torch.float32), precision="bf16")
        with torch.no_grad():
            engine.module.first.weight.fill_(2)
        engine.train_step([(x, flag)])  # the edit is the master from here on (tests/engine/test_edits.py)
        assert float(engine.full_tensor("first.weight").min()) > 1.5
        engine.close()
    engine = start(world, 3)
    first = engine.module.first.weight
    for value in (
        torch.zeros(first.shape, dtype=first.dtype),
        first.data * 2,
    ):  # the next gather would undo both
        assert "first.weight' of Unit (root), which is released now, is replaced (data)" in raised(
            UsageError,
            lambda value=value: setattr(first, "data", value),  # type: ignore[misc]
        )
    engine.close()
    for stage in (0, 1, 2):  # where the weight is its own master, what is loaded stays
        engine = start(world, stage)
        engine.module.load_state_dict(seeded(Net, seed=1).state_dict())
        plain = seeded(Net, seed=1)
        pieces = [(piece(0, i), 1.0) for i in range(world.size)]
        truth = train(
            plain,
            torch.optim.AdamW(plain.parameters(), weight_decay=0.0),
            [pieces],
            lambda model, batch: model(*batch),
        )
        engine.train_step([piece(0, world.rank)])
        assert worst(engine.state_dict(), truth[0].weights) <= 1e-10
        engine.close()


LOUD = [
    behind_the_engines_back,
    released_weights,
    reads_outside,
    opaque_output,
    direct_backward,
    unfrozen,
    other_collectives,
]


@pytest.mark.parametrize("story", LOUD, ids=lambda story: story.__name__)
def test_is_loud(ranks: Any, story: Callable[[Any], None]) -> None:
    ranks(2).run(story)


# What must work ----------------------------------------------------------------------------------------------------


def twice(model: nn.Module, batch: Any) -> Tensor:
    """Two forward passes of one model before one backward pass (siamese)."""
    x, flag = batch
    loss: Tensor = model(x, flag) + model(x.flip(0) * 2, flag) * model(x + 1, flag).detach()
    return loss


def siamese(world: Any) -> None:
    for stage in STAGES:
        for config in ({"stage": stage}, {"stage": stage, "debug": True, "prefetch_bytes": 1}):
            error = against_plain(world, lambda: seeded(Net), piece, {"zero": config}, loss_of=twice)
            assert error <= 1e-10, (config, error)


def evaluation_in_between(world: Any) -> None:
    """A no_grad pass between forward and backward, between microbatches and before step() changes nothing."""

    def look(engine: Any) -> None:
        with torch.no_grad():
            engine(piece(3, 0))

    for stage in STAGES:
        config = {"zero": {"stage": stage, "debug": True}, "batch": {"accumulation": 2}}
        error = against_plain(world, lambda: seeded(Net), piece, config, before_backward=look)
        assert error <= 1e-10, (stage, error)
        engine = start(world, stage)
        engine.backward(engine(piece(0, world.rank)))
        assert engine.evaluate([(piece(1, 0), 1.0)]) > 0
        engine.step()
        engine.close()


def forgotten_pass(world: Any) -> None:
    """A forward pass with gradients that nobody walks back (a metric without no_grad) changes nothing."""

    def look(engine: Any) -> None:
        engine(piece(3, 0))

    for stage in STAGES:
        config = {"zero": {"stage": stage, "debug": True}}
        error = against_plain(world, lambda: seeded(Net), piece, config, before_backward=look)
        assert error <= 1e-10, (stage, error)


class Stumbles(Net):
    """Fails in the middle of a pass where the input is empty."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if not len(x):
            raise ValueError("an empty batch")
        return self.blocks[2](self.blocks[1](x))


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no way back")


def failures_leave_nothing(world: Any) -> None:
    """An exception in forward or backward, caught by the user, does not reach into the next step."""
    for stage in STAGES:
        model = seeded(Stumbles)
        engine = start(world, stage, model)
        plain = seeded(Stumbles)
        truth = train(
            plain,
            torch.optim.AdamW(plain.parameters(), weight_decay=0.0),
            [[(piece(step, i), 1.0) for i in range(world.size)] for step in range(2)],
            lambda model, batch: model(*batch),
        )
        for step, wanted in enumerate(truth):
            x, flag = piece(step, world.rank)
            raised(ValueError, lambda engine=engine, x=x, flag=flag: engine((x[:0], flag)))  # type: ignore[misc]
            loss = FailsBackward.apply(model.blocks[0](x)).sum() + engine((x, flag))
            raised(ValueError, lambda engine=engine, loss=loss: engine.backward(loss))  # type: ignore[misc]
            raised(UsageError, engine((x, flag)).backward)
            at = x.clone().requires_grad_()
            value = model(FailsBackward.apply(at), flag)
            raised(ValueError, partial(torch.autograd.grad, value, at))
            engine.backward(engine((x, flag)))
            raised(ValueError, partial(engine.evaluate, [((x[:0], flag), 1.0)]))
            assert worst(engine.gradients(), wanted.gradients, wanted.addends) <= 1e-10, stage
            raised(ValueError, partial(engine.evaluate, [((x[:0], flag), 1.0)]))
            engine.step()
            assert worst(engine.state_dict(), wanted.weights) <= 1e-10, stage
        engine.close()


class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyboardInterrupt


class Interrupts(Net):
    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        x = super().middle(x, flag)
        return Interrupted.apply(x) if flag.item() else x  # type: ignore[no-any-return]


def interrupted_backward(world: Any) -> None:
    """Ctrl-C in a backward pass: half of its gradients have landed, and the next one says so."""
    for stage in STAGES:
        engine = start(world, stage, seeded(Interrupts))
        x, _ = piece(0, world.rank)
        loss, good = engine((x, torch.tensor(True))), (x, torch.tensor(False))
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        assert "engine.discard()" in raised(UsageError, partial(engine, good))
        engine.discard()
        assert engine.train_step([good]).divergences == ()
        engine.close()


class CallsItself(Net):
    """A first guess without gradients (self-conditioning)."""

    is_guessing = False

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        if self.is_guessing:
            return super().forward(x, flag)
        self.is_guessing = True
        with torch.no_grad():
            x = x + self(x, flag)
        self.is_guessing = False
        return super().forward(x, flag)


def calls_itself(world: Any) -> None:
    for stage in (0, 1, 2):
        error = against_plain(world, lambda: seeded(CallsItself), piece, {"zero": {"stage": stage}})
        assert error <= 1e-10, (stage, error)
        engine = start(world, stage, seeded(CallsItself))
        engine.backward(engine(piece(0, world.rank)))
        engine.evaluate([(piece(0, 0), 1.0)])
        assert engine.step().divergences == ()
        assert tuple(engine.trace.actions) == engine.plan.actions["all"]
        engine.close()


def block_by_itself(world: Any) -> None:
    """A block that is looked at between steps, without gradients, is no part of a step."""
    for stage in STAGES:
        engine = start(world, stage)
        for step in range(2):
            with torch.no_grad():
                engine.module.blocks[1](piece(step, 0)[0])
            assert engine.train_step([piece(step, world.rank)]).divergences == ()
        engine.close()


class FlagsOrder(Net):
    """Where the flag is set the blocks run backwards."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in reversed(self.blocks) if flag.item() else self.blocks:
            x = block(x)
        return x


def orders_that_differ(world: Any) -> None:
    """Where weights are not gathered in the forward pass the ranks may run their Units in any order."""
    for stage in (0, 1, 2):
        error = against_plain(world, lambda: seeded(FlagsOrder), piece, {"zero": {"stage": stage}}, steps=4)
        assert error <= 1e-10, (stage, error)


class Drops(Net):
    """Leaves out one block, which the flag names."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i != int(flag) else x
        return x


def layer_drop(world: Any) -> None:
    """First all ranks leave out the same block, which then stood last in the order; then each rank another."""

    def dropped(step: int, i: int) -> tuple[Tensor, Tensor]:
        block = [1, i % 2, (i + 1) % 4, 3, 2 * (i % 2)][step]
        return piece(step, i)[0], torch.tensor(block)

    for stage in STAGES:
        for zero in ({}, {"prefetch_bytes": 1, "debug": True}):
            config = {"zero": {"stage": stage, **zero}, "comm": {"timeout_s": 10.0}}
            error = against_plain(world, lambda: seeded(Drops, 4), dropped, config, steps=5)
            assert error <= 1e-10, (stage, zero, error)


def evaluation_first(world: Any) -> None:
    """What is made in an evaluation under inference_mode serves the training steps after it."""

    def look(engine: Any) -> None:
        with torch.inference_mode():
            engine(piece(3, 0))

    for stage in STAGES:
        engine = start(world, stage)
        look(engine)
        engine.train_step([piece(0, world.rank)])
        engine.close()
        error = against_plain(
            world, lambda: seeded(Net), piece, {"zero": {"stage": stage}}, before_backward=look
        )
        assert error <= 1e-10, (stage, error)


def order_that_changes(world: Any) -> None:
    """All ranks change their order together, again and again, after the lists were made."""

    def together(step: int, i: int) -> tuple[Tensor, Tensor]:
        return piece(0, 10 * step + i)[0], torch.tensor(step % 2 == 1)

    for zero in ({}, {"prefetch_bytes": 1, "debug": True}):
        error = against_plain(
            world, lambda: seeded(FlagsOrder), together, {"zero": {"stage": 3, **zero}}, steps=5
        )
        assert error <= 1e-10, (zero, error)


class Parts(Net):
    """Methods other than forward; one of them calls forward."""

    def encode(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks[1](self.blocks[0](self.first(x)))
        return result

    def both(self, x: Tensor, flag: Tensor) -> Tensor:
        return self(x, flag) + self.last(self.encode(x)).square().mean()


def other_methods(world: Any) -> None:
    for stage in STAGES:
        plain = seeded(Parts)
        truth = train(
            plain,
            torch.optim.AdamW(plain.parameters(), weight_decay=0.0),
            [[(piece(step, i), 1.0) for i in range(world.size)] for step in range(3)],
            lambda model, batch: model.both(*batch) + model.encode(batch[0]).square().mean(),
        )
        engine = start(world, stage, seeded(Parts))
        for step, wanted in enumerate(truth):
            x, flag = piece(step, world.rank)
            loss = engine.run("both", x, flag) + engine.run("encode", x).square().mean()
            engine.backward(loss)
            assert worst(engine.gradients(), wanted.gradients, wanted.addends) <= 1e-10, stage
            engine.step()
            assert worst(engine.state_dict(), wanted.weights) <= 1e-10, stage
        engine.close()


class Generates(Net):
    """Runs its blocks again and again, without gradients of its own accord."""

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.middle(x, x)
        return x


def generates_in_between(world: Any) -> None:
    """A method without gradients is no pass of the step, and none of its backward pass."""
    for stage in STAGES:
        engine = start(world, stage, seeded(Generates))
        for step in range(2):
            x, flag = piece(step, world.rank)
            engine.run("generate", x)
            assert engine.train_step([(x, flag)]).divergences == ()
            assert tuple(engine.trace.actions) == engine.plan.actions["all"]
        engine.close()


def same_bits(world: Any) -> None:
    """Poison, pauses and gathers ahead change no bit; nor does the transport."""
    seen = set()
    for zero, comm in (
        ({}, {}),
        ({"debug": True}, {}),
        ({"reuse_buffers": False}, {}),
        ({"prefetch_bytes": 1}, {}),
        ({"prefetch_bytes": 5000, "debug": True}, {"debug_delay_s": 0.002}),
        ({}, {"transport": "torch", "debug_delay_s": 0.002}),
        ({"prefetch_bytes": 1}, {"transport": "torch"}),
        ({"prefetch_bytes": 5000}, {"transport": "torch"}),
    ):
        model = seeded(Net, 6, dtype=torch.float32)
        engine = start(world, 3, model, zero=zero, comm={"timeout_s": 10.0, **comm}, max_grad_norm=0.1)
        for step in range(4):
            x, flag = piece(step, world.rank)
            engine.train_step([(x.float(), flag)])
        state = engine.state_dict()
        seen.add(tuple(tuple(tensor.flatten().tolist()) for tensor in state.values()))
        engine.close()
    assert len(seen) == 1


def few_slots(world: Any) -> None:
    """Eight blocks take turns in one piece of memory, beside as many as are gathered ahead: by bytes, one at least."""
    blocks = 0
    for ahead, share, wanted in ((0, True, 1), (0.5, True, 2), (1.5, True, 2), (2, True, 3), (0, False, 8)):
        zero = {"prefetch_bytes": int(8 * ahead * blocks), "reuse_buffers": share}
        engine = start(world, 3, seeded(Net, 8), zero=zero)
        blocks, (_, first) = engine.plan.units[1].elements, engine._parts.hooks[0].states[:2]
        for step in range(2):
            engine.train_step([piece(step, world.rank)])
        pool = first.buckets[0].weight._around.weights
        assert pool.bytes == 8 * (engine.plan.units[0].elements + wanted * blocks), (ahead, share)
        assert first.buckets[0].weight._around.gradients.bytes <= 8 * (
            engine.plan.units[0].elements + 2 * blocks
        )
        engine.close()


def nothing_is_left(world: Any) -> None:
    """A closed engine and its model are gone when nobody holds them."""
    for stage in STAGES:
        engine = start(world, stage)
        engine.train_step([piece(0, world.rank)])
        engine.close()
        gone = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.module.first.weight)]
        del engine
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3, stage


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss on the gradient of the output: the backward pass is walked backwards."""
    x, flag = batch
    x = x.clone().requires_grad_()
    value: Tensor = model(x, flag)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + (slope.norm() - 1).square()


def three_passes(model: nn.Module, batch: Any) -> Tensor:
    """As a critic is trained: on what is real, on what is made, and on the gradient in between."""
    x, flag = batch
    loss: Tensor = model(x, flag) - model(x + 1, flag) + penalized(model, (x * 0.5, flag))
    return loss


class Forces(Net):
    """The gradient of the energy in the middle of the forward pass; weights of the root are used after it."""

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.last(self.middle(self.first(x), flag)).square().mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        result: Tensor = energy + self.last(force).square().mean()
        return result


def gradient_penalty(world: Any) -> None:
    """Exact where weights stay; where they are gathered the second walk is refused, not wrong."""
    for stage in (0, 1, 2):
        error = against_plain(
            world, lambda: seeded(Net), piece, {"zero": {"stage": stage}}, loss_of=penalized
        )
        assert error <= 1e-10, (stage, error)
    for loss_of in (penalized, three_passes):
        for accumulation in (1, 2):
            config = {"zero": {"stage": 3, "reuse_buffers": False}, "batch": {"accumulation": accumulation}}
            error = against_plain(world, lambda: seeded(Net), piece, config, loss_of=loss_of)
            assert error <= 1e-10, (loss_of, accumulation, error)
    error = against_plain(
        world, lambda: seeded(Forces), piece, {"zero": {"stage": 3, "reuse_buffers": False}}, steps=2
    )
    assert error <= 1e-10, error
    engine = start(world, 3)
    loss = penalized(engine.module, piece(0, world.rank))
    assert "zero.reuse_buffers: false" in raised(UsageError, lambda: engine.backward(loss))
    penalized(engine.module, piece(0, world.rank))  # looked at and never walked back
    engine.train_step([piece(0, world.rank)])
    engine.close()


def use_elsewhere(world: Any) -> None:
    """A weight that another module uses: named in zero.external_parameters it is there, like an external parameter."""
    for stage in STAGES:
        config = {"zero": {"stage": stage, "external_parameters": ["blocks.1.up.weight"]}}
        error = against_plain(world, lambda: seeded(Inside), piece, config)
        assert error <= 1e-10, (stage, error)
    with pytest.raises(
        ConfigError, match=r"zero\.external_parameters: pattern 'blocks\.9\.\*' matches no parameter"
    ):
        start(world, 3, zero={"external_parameters": ["blocks.9.*"]})


class Methods(Net):
    """A block's method other than forward, called from outside; and a loss as Lightning has it."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.inner(x)  # type: ignore[operator]
        return x

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = self(*batch) + self.first.weight.square().sum()
        return loss + self.blocks[0].inner(batch[0]).mean()  # type: ignore[operator]


def methods_by_name(world: Any) -> None:
    for stage in STAGES:
        config = {"zero": {"stage": stage, "forward_methods": ["blocks.*.inner", "training_step"]}}
        for accumulation in (1, 2):
            error = against_plain(
                world,
                lambda: seeded(Methods),
                piece,
                {**config, "batch": {"accumulation": accumulation}},
                loss_of=lambda model, batch: model.training_step(batch),
            )
            assert error <= 1e-10, (stage, error)
    for pattern in ("blocks.*.outer", "first.forward"):
        with pytest.raises(ConfigError, match="zero.forward_methods"):
            start(world, 3, zero={"forward_methods": [pattern]})
    engine = start(world, 3, seeded(Methods), zero={"forward_methods": ["blocks.*.inner"]})
    engine.close()
    assert "inner" not in vars(engine.module.blocks[0])


WORKS = [
    gradient_penalty,
    use_elsewhere,
    methods_by_name,
    siamese,
    evaluation_in_between,
    forgotten_pass,
    failures_leave_nothing,
    interrupted_backward,
    calls_itself,
    block_by_itself,
    orders_that_differ,
    order_that_changes,
    layer_drop,
    evaluation_first,
    other_methods,
    generates_in_between,
    same_bits,
    few_slots,
    nothing_is_left,
]


@pytest.mark.parametrize("story", WORKS, ids=lambda story: story.__name__)
def test_works(ranks: Any, story: Callable[[Any], None]) -> None:
    ranks(2).run(story)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_may_have_windows(precision: str) -> None:
    """Cut or not is one question, and whether a weight has memory of its own between windows another."""
    found = []
    for windows in (False, True):
        wants = partial(layout.strategy_of, windows=windows)
        with ExitStack() as stack:
            stack.enter_context(patch.object(layout, "strategy_of", wants))
            engine = start(None, 3, seeded(Net, dtype=torch.float32), precision=precision)
            losses = []
            for step in range(3):
                x, flag = piece(step, 0)
                losses.append(engine.train_step([(x.float(), flag)]).loss)
            state = {name: tensor.tolist() for name, tensor in engine.state_dict().items()}
            assert (engine.held_bytes()["gathered"] > 0) == windows
            if windows:
                assert "'first.bias' of Unit (root), which is released" in raised(
                    UsageError, engine.module.first.bias.isnan
                )
            engine.close()
            assert torch.isfinite(engine.module.first.bias).all()
        found.append((losses, state))
    assert found[0] == found[1]
