"""The 16-bit contract on running engines: what is computed, kept, summed and sent in which dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.plain import worst
from tests.parallel.zero.nets import SkipsAll
from tests.parallel.zero.test_hooks import piece
from tests.parallel.zero.test_windows import raised
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import NonFiniteError
from shardwise.comm.world import World

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def tokens(step: int, i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + i)
    given = torch.randint(0, VOCABULARY, (3, 6), generator=generator)
    return given[:, :-1], given[:, 1:]


def start(world: World, model: nn.Module, stage: int, precision: Any, **config: Any) -> Any:
    return shardwise.initialize(
        model, {"zero": {"stage": stage}, "precision": precision, **config}, world=world
    )


def by_hand(dtype: torch.dtype, pieces: int, steps: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients and masters after each step of plain mixed precision: 16-bit model, fp32 sums, fp32 AdamW."""
    master = seeded(Language, dtype=F32)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for step in range(steps):
        model = seeded(Language, dtype=dtype)
        with torch.no_grad():
            for mine, wide in zip(model.parameters(), master.parameters(), strict=True):
                mine.copy_(wide)
        sums = {name: torch.zeros_like(p) for name, p in master.named_parameters()}
        for i in range(pieces):
            model.zero_grad()
            model(*tokens(step, i)).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad.float() / pieces
        for name, parameter in master.named_parameters():
            parameter.grad = sums[name].clone()
        optimizer.step()
        found.append((sums, {n: p.detach().to(dtype, copy=True) for n, p in master.named_parameters()}))
    return found


def mixed(world: World) -> None:
    """bf16 compute with fp32 gradients and masters equals plain mixed precision, at every stage.

    15 labels, by which microbatches weigh, are no power of two: a loss times 15 would round otherwise in bf16.
    """
    truth = by_hand(B16, 2 * world.size, 3)
    for stage in range(4):
        for dp in ({"shard": world.size}, {"replicate": world.size, "shard": 1}):
            engine = start(
                world,
                seeded(Language, dtype=F32),
                stage,
                "bf16",
                mesh={"dp": dp},
                batch={"accumulation": 2},
                optimizer={"lr": 1e-2},
            )
            for step, (sums, weights) in enumerate(truth):
                for i in range(2):
                    engine.backward(engine(tokens(step, i * world.size + world.rank)))
                    if i == 1:
                        assert worst(engine.gradients(), sums) <= 1e-6, stage
                    engine.step()
                state = engine.state_dict()
                assert {tensor.dtype for tensor in state.values()} == {B16}
                # A master that differs in its last digit may round the other way.
                assert worst({name: state[name] for name in weights}, weights) <= 1e-3, stage
            engine.close()


def buffers(world: World) -> None:
    """``grad`` is the buffer and ``reduce`` the wire, with the same meaning at every stage."""
    for stage in range(4):
        for grad, reduce, wire in (("fp32", "fp32", 4), ("fp32", "bf16", 2), ("bf16", "bf16", 2)):
            precision = {"compute": "bf16", "grad": grad, "reduce": reduce}
            engine = start(world, seeded(Language, dtype=F32), stage, precision)
            engine.traffic.clear()
            engine.backward(engine(tokens(0, world.rank)))
            gradients = engine.gradients()
            engine.step()
            for bucket, optimizer in engine._parts.trained:
                assert bucket.gradient.buffer.dtype == (F32 if grad == "fp32" else B16)
                assert bucket.weight.shard.dtype is B16 and bucket.weight.master.dtype is F32
                assert {moment.dtype for *_, moment in optimizer.state.moments()} == {F32}
            # Autograd's own bf16 gradients of one microbatch lose nothing on a bf16 wire. Where all ranks keep the sum,
            # that comes back in the dtype of the sum.
            sent = engine.traffic.total("gradients")
            exact = (grad, reduce) == ("fp32", "fp32")
            assert sent.bytes == sent.elements * (3 if exact and stage == 0 else 2), (stage, grad, reduce)
            assert worst(gradients, by_hand(B16, world.size, 1)[0][0]) <= (2e-6 if exact else 2e-2)
            engine.close()
            # What was added up before it travels is wider than autograd's own.
            engine = start(world, seeded(Language, dtype=F32), stage, precision, batch={"accumulation": 2})
            engine.traffic.clear()
            engine.train_step([tokens(0, world.rank), tokens(1, world.rank)])
            sent = engine.traffic.total("gradients")
            assert sent.bytes == sent.elements * (2 if stage >= 2 else wire), (stage, grad, reduce)
            engine.close()


def skips_at_first(world: World) -> None:
    """A rank on which a Unit did not run in the first microbatch must reduce the second as the others do."""

    def batch(step: int, i: int) -> tuple[Tensor, Tensor]:
        x, _ = piece(step, i)
        return x.float(), torch.tensor(i == 1)  # rank 1 skips all blocks in microbatch 0

    for stage in range(4):
        engine = start(world, seeded(SkipsAll, dtype=F32), stage, "bf16", batch={"accumulation": 2})
        plain = seeded(SkipsAll, dtype=F32)
        for step in range(2):
            plain.zero_grad()
            with torch.no_grad():
                for name, tensor in engine.state_dict().items():
                    plain.get_parameter(name).copy_(tensor)
            for i in range(4):
                (plain(*batch(step, i)) / 4).backward()
            for i in range(2):
                engine.backward(engine(batch(step, 2 * i + world.rank)))
                if i == 1:
                    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
                    assert worst(engine.gradients(), wanted) <= 0.05, stage
                engine.step()
        engine.close()


class Growing(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def sums_are_wide(world: World) -> None:
    """256 + 1 + 1 + ... stands still in bf16; the sum over microbatches is taken in fp32."""
    for stage in range(4):
        for grad, wanted in (("fp32", 256 + 15), ("bf16", 256)):
            engine = start(
                world,
                Growing(),
                stage,
                {"compute": "bf16", "grad": grad},
                batch={"accumulation": 16},
                optimizer={"type": "sgd", "lr": 1e-9},
            )
            for i in range(16):
                engine.backward(engine(torch.full((4,), 256.0 if i == 0 else 1.0)))
                if i == 15:
                    gradient = engine.gradients()["w"].float() * 16
                engine.step()
            assert gradient.tolist() == [wanted] * 4, (stage, grad)
            engine.close()


class Looks(nn.Module):
    """Writes down the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, index: Tensor, more: dict[str, Any]) -> Tensor:
        self.seen = [x.dtype, index.dtype, more["mask"].dtype, more["pair"][0].dtype]
        result: Tensor = self.linear(x)
        return self.norm(result.float())


def casts(world: World) -> None:
    """Floating inputs are cast at the root, integers are not, and a loss function gets fp32."""
    losses: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(*batch)
        losses.append(output.dtype)
        return output.square().mean()

    model = Looks()
    engine = shardwise.initialize(
        model,
        {"zero": {"stage": 3}, "precision": {"compute": "bf16", "keep_fp32": ["norm.*"]}},
        loss=loss,
        world=world,
    )
    mask, pair = torch.ones(2, dtype=torch.bool), (torch.ones(1, dtype=torch.float64), 3)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(world.rank))
    engine.train_step([(x, torch.arange(2), {"mask": mask, "pair": pair})])
    assert model.seen == [B16, torch.int64, torch.bool, B16]
    assert losses == [F32]
    state = engine.state_dict()
    assert state["norm.weight"].dtype is F32 and state["linear.weight"].dtype is B16
    engine.close()


class MixedDtypes(nn.Module):
    """One model with parameters of three dtypes, in one Unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4).float(), nn.Sequential(nn.Linear(4, 4).double())) for _ in range(2)
        )
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return (x * self.count.sum()).square().mean()

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        narrow, wide = self
        result: Tensor = wide(torch.tanh(narrow(x.float())).double())
        return result


def dtypes_of_the_model_stay(world: World) -> None:
    """Without ``precision`` a model keeps its own dtypes, each in its own bucket."""

    class Model(MixedDtypes):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                Block(nn.Linear(4, 4).float(), nn.Linear(4, 4).double()) for _ in range(2)
            )

        def through(self, block: nn.Module, x: Tensor) -> Tensor:
            result: Tensor = block(x)
            return result

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Model()

    x = torch.randn(world.size, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = make()
    (sum(plain(x[i]) for i in range(world.size)) / world.size).backward()  # type: ignore[union-attr]
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for stage in range(4):
        engine = start(world, make(), stage, {})
        engine.backward(engine(x[world.rank]))
        gradients = engine.gradients()
        assert worst(gradients, wanted) <= 2e-6
        wide = {n: g for n, g in gradients.items() if g.dtype is torch.float64}
        assert set(wide) == {n for n in wanted if "blocks" not in n or n.split(".")[2] == "1"}
        engine.step()
        state = engine.state_dict()
        assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in plain.state_dict().items()}
        assert state["count"].tolist() == [0, 1, 2]
        engine.close()


@pytest.mark.parametrize(
    "story",
    [mixed, buffers, skips_at_first, sums_are_wide, casts, dtypes_of_the_model_stay],
    ids=lambda story: story.__name__,
)
def test_contract(ranks: Any, story: Callable[[World], None]) -> None:
    ranks(2).run(story)


def wires(world: World) -> None:
    """Replicas too speak the wire's dtype."""
    engine = start(
        world,
        seeded(Language, dtype=F32),
        2,
        {"compute": "bf16", "grad": "fp32", "reduce": "bf16"},
        mesh={"dp": {"replicate": 2, "shard": 2}},
    )
    engine.traffic.clear()
    engine.train_step([tokens(0, world.rank)])
    sent = engine.traffic.total("gradients")
    assert sent.bytes == 2 * sent.elements
    engine.close()


def test_replicas_speak_the_wires_dtype(ranks: Any) -> None:
    ranks(4).run(wires)


# fp16 --------------------------------------------------------------------------------------------------------------


def half(world: World, stage: int, **scale: Any) -> Any:
    return start(
        world,
        Growing(),
        stage,
        {"compute": "fp16", "loss_scale": scale},
        optimizer={"type": "sgd", "lr": 0.5},
    )


def feed(engine: Any, value: float) -> Any:
    engine.backward(engine(torch.full((4,), value)))
    return engine.step()


def overflows(world: World) -> None:
    """One rank overflows: all skip together, the scale halves at the second time, nothing moves meanwhile."""
    for stage in range(4):
        engine = half(world, stage, init_scale=2.0**15, growth_interval=2)
        result = feed(engine, 0.25)
        assert not result.skipped and result.grad_norm == 0.5
        before = engine.state_dict()["w"]
        assert before.tolist() == [1 - 0.125] * 4
        for wanted in (2.0**15, 2.0**14):
            # Rank 1's gradient is 60000 × 2^15 / 2 in fp16.
            result = feed(engine, 60000.0 if world.rank == 1 else 0.25)
            assert result.skipped and engine.loss_scale == wanted
            assert engine.state_dict()["w"].tolist() == before.tolist()
        for wanted in (2.0**14, 2.0**15):
            assert not feed(engine, 0.25).skipped
            assert engine.loss_scale == wanted
        assert engine.step_count == 5
        engine.close()


def reaches_the_floor(world: World) -> None:
    """At the floor the run stops, and the module whose output is not finite is named."""
    for stage in (0, 3):
        engine = start(
            world,
            seeded(Language, dtype=F32),
            stage,
            {"compute": "fp16", "loss_scale": {"init_scale": 2.0, "hysteresis": 1}},
        )
        engine.module.blocks[1].down.register_forward_hook(lambda module, inputs, output: output * 1e6)
        assert engine.train_step([tokens(0, world.rank)]).skipped
        before = engine.state_dict()
        text = raised(NonFiniteError, lambda engine=engine: engine.train_step([tokens(0, world.rank)]))  # type: ignore[misc]
        assert "step 2: gradients are not finite, and the loss scale is at its minimum, 1.0" in text
        assert "output is 'blocks.1.down'" in text
        assert worst(engine.state_dict(), before) == 0.0
        engine.close()


def small_gradients_survive(world: World) -> None:
    """2^-26 is below fp16's smallest number; the scale carries it through the backward pass."""
    for start_at, wanted in ((2.0**10, 2.0**-26), (1.0, 0.0)):
        engine = half(world, 0, init_scale=start_at)
        engine.backward(engine(torch.full((4,), 2.0**-13)) * 2.0**-13)
        assert engine.gradients()["w"].tolist() == [wanted] * 4
        engine.step()
        engine.close()


@pytest.mark.parametrize(
    "story", [overflows, reaches_the_floor, small_gradients_survive], ids=lambda story: story.__name__
)
def test_fp16(ranks: Any, story: Callable[[World], None]) -> None:
    ranks(2).run(story)
