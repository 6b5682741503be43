"""How an engine is put together: start weights, optimizers, compiled blocks."""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim
from transformers.modeling_outputs import CausalLMOutput

import shardwise
from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.world import World, join
from shardwise.kernels.initializers import Constant, Normal, Uniform
from tests.engine.nets import Language, seeded
from tests.engine.plain import train, worst
from tests.parallel.zero.nets import AroundABlock, Net
from tests.parallel.zero.test_hooks import piece

LIMIT = 1e-10


@pytest.fixture
def world() -> Iterator[World]:
    """One process."""
    yield join(quiet=True)


# Start weights -----------------------------------------------------------------------------------------------------


def on_meta() -> Language:
    with torch.device("meta"):
        return Language()


def rules(model: nn.Module) -> dict[str, Any]:
    table = {"norm": Constant(1.0), "bias": Constant(0.0), "up": Uniform(-0.2, 0.2)}
    return {
        name: next((rule for part, rule in table.items() if part in name), Normal(0.1))
        for name, _ in model.named_parameters()
    }


def digest(state: dict[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in state.items():
        whole.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def drawn(world: World, stage: int, precision: str) -> str:
    model = on_meta()
    engine = shardwise.initialize(
        model, {"zero": {"stage": stage}, "precision": precision}, initial=rules(model), world=world
    )
    assert model.head.weight is model.embed.weight, "tying survives meta"
    state = engine.state_dict()
    engine.close()
    return digest(state)


def test_start_weights_are_the_same_bits_everywhere(ranks: Any) -> None:
    for precision in ("fp64", "fp32", "bf16"):
        found = {
            one
            for size, stages in ((1, [0]), (2, [0, 1, 2, 3]), (4, [1, 3]))
            for stage in stages
            for one in ranks(size).run(drawn, stage, precision)
        }
        assert len(found) == 1, precision
    assert ranks(1).run(drawn, 0, "fp64") != ranks(1).run(drawn, 0, "fp32")


def of_rank_0(world: World) -> None:
    """A model that comes initialised differently on each rank, as a whole or in part."""
    first = seeded(Language, seed=0).state_dict()
    for stage in (0, 1, 2, 3):
        engine = shardwise.initialize(
            seeded(Language, seed=world.rank), {"zero": {"stage": stage}}, world=world
        )
        assert worst(engine.state_dict(), first) == 0.0
        engine.close()
        some = {name: Constant(0.5) for name in ("norm.weight", "blocks.1.up.bias")}
        engine = shardwise.initialize(
            seeded(Language, seed=world.rank), {"zero": {"stage": stage}}, world=world, initial=some
        )
        wanted = {n: torch.full_like(t, 0.5) if n in some else t for n, t in first.items()}
        assert worst(engine.state_dict(), wanted) == 0.0, stage
        engine.close()


def test_an_initialised_model_takes_rank_0s_weights(ranks: Any) -> None:
    ranks(2).run(of_rank_0)


def test_nobody_says_how_meta_starts(world: World) -> None:
    with pytest.raises(UsageError, match=r"parameters are on meta.*embed\.weight.*initial="):
        shardwise.initialize(on_meta(), {}, world=world)


def test_a_buffer_on_meta_has_no_values(world: World) -> None:
    model = on_meta()
    model.register_buffer("mask", torch.ones(2, device="meta"))
    with pytest.raises(UsageError, match="'mask' of a Language is on meta"):
        shardwise.initialize(model, {}, initial=rules(model), world=world)


# Optimizers --------------------------------------------------------------------------------------------------------


class Signed(optim.Optimizer):
    """Somebody's own elementwise optimizer, with a setting that has no default."""

    def __init__(self, params: Any, lr: float, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["decay"]).add_(parameter.grad)
                    parameter.sub_(torch.tanh(mean), alpha=group["lr"])


def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """One group of vectors and one of matrices, with options of their own."""
    return [
        {"params": [p for p in parameters if p.dim() < 2], "lr": 0.02},
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "sgd in groups": lambda ps: optim.SGD(in_groups(ps), lr=0.1, momentum=0.9, nesterov=True),
    "adamw in groups": lambda ps: optim.AdamW(in_groups(ps), lr=0.01, amsgrad=True),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: optim.Adamax(ps, lr=0.01),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=1.0),
    "rprop": lambda ps: optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: optim.ASGD(ps, lr=0.01),
    "own": lambda ps: Signed(ps, 0.01),
}


def with_optimizer(world: World, name: str) -> float:
    make = OPTIMIZERS[name]
    plain = seeded(Net)
    truth = train(
        plain,
        make(list(plain.parameters())),
        [[(piece(step, i), 1.0) for i in range(world.size)] for step in range(3)],
        lambda model, batch: model(*batch),
        clip=0.5,
    )
    largest = 0.0
    for stage in range(4):
        model = seeded(Net)
        given: Any = make(list(model.parameters())) if stage % 2 else lambda ps: make(list(ps))
        engine = shardwise.initialize(
            model,
            {"zero": {"stage": stage}, "max_grad_norm": 0.5},
            optimizer=given,
            elementwise=name == "own",
            world=world,
        )
        for step, wanted in enumerate(truth):
            engine.train_step([piece(step, world.rank)])
            largest = max(largest, worst(engine.state_dict(), wanted.weights))
        engine.close()
    return largest


def with_all_optimizers(world: World) -> dict[str, float]:
    return {name: with_optimizer(world, name) for name in OPTIMIZERS}


def test_a_torch_optimizer_of_the_users(ranks: Any) -> None:
    for errors in ranks(2).run(with_all_optimizers):
        assert {name for name, error in errors.items() if error > LIMIT} == set()


def groups_by_name(world: World) -> float:
    plain = seeded(Language)
    named = dict(plain.named_parameters())
    vectors = [p for n, p in named.items() if "norm" in n or n.endswith("bias")]
    slow = [p for n, p in named.items() if n.startswith("embed")]
    others = [p for p in named.values() if not any(p is q for q in vectors + slow)]
    optimizer = optim.AdamW(
        [{"params": others}, {"params": vectors, "weight_decay": 0.0}, {"params": slow, "lr": 0.001}],
        lr=0.01,
        weight_decay=0.2,
    )
    tokens = torch.arange(10).view(2, 5)
    truth = train(plain, optimizer, [[((tokens, tokens), 1.0)]] * 3, lambda model, batch: model(*batch))
    groups = [{"match": "*norm*|*.bias", "weight_decay": 0.0}, {"match": "embed*", "lr": 0.001}]
    settings = {"type": "adamw", "lr": 0.01, "weight_decay": 0.2, "groups": groups}
    largest = 0.0
    for stage in range(4):
        engine = shardwise.initialize(
            seeded(Language),
            {"zero": {"stage": stage}, "optimizer": settings, "batch": {"duplicates": "allow"}},
            world=world,
        )
        for wanted in truth:
            engine.train_step([(tokens, tokens)])
            state = engine.state_dict()
            largest = max(largest, worst({name: state[name] for name in wanted.weights}, wanted.weights))
        engine.close()
    return largest


def test_groups_by_name(ranks: Any) -> None:
    assert max(ranks(2).run(groups_by_name)) <= LIMIT


def test_optimizers_that_need_whole_tensors_are_refused(world: World) -> None:
    model = seeded(Net)
    for given, name in (
        (optim.Adafactor(model.parameters()), "Adafactor"),
        (optim.LBFGS(model.parameters()), "LBFGS"),
        (Signed(model.parameters(), 0.1), "Signed"),
    ):
        with pytest.raises(UsageError, match=f"{name} is not known to treat each element alone"):
            shardwise.initialize(model, {}, optimizer=given, world=world)


def test_what_an_optimizer_must_be(world: World) -> None:
    model = seeded(Net)
    with pytest.raises(UsageError, match=r"14 trained parameters are not in it: blocks\.0\.up\.weight"):
        shardwise.initialize(
            model,
            {},
            optimizer=optim.SGD(model.first.parameters()),
            world=world,
        )
    with pytest.raises(ConfigError, match="in the configuration and as an argument"):
        shardwise.initialize(
            model, {"optimizer": {"lr": 1.0}}, optimizer=optim.SGD(model.parameters()), world=world
        )
    stepped = optim.Adam(model.parameters())
    model(*piece(0, 0)).backward()
    stepped.step()
    with pytest.raises(UsageError, match="it has stepped already"):
        shardwise.initialize(model, {}, optimizer=stepped, world=world)


# Compiled blocks ---------------------------------------------------------------------------------------------------


def dynamo_anew() -> None:
    """torch hides this warning of its own unless warnings are errors."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(world: World, stage: int, backend: str) -> tuple[float, list[int]]:
    """Error against the plain loop, and graphs and breaks after each step."""
    dynamo_anew()
    plain = seeded(Net, 10)
    truth = train(
        plain,
        optim.AdamW(plain.parameters(), weight_decay=0.0),
        [[(piece(step, i), 1.0) for i in range(world.size)] for step in range(3)],
        lambda model, batch: model(*batch),
    )
    engine = shardwise.initialize(
        seeded(Net, 10),
        {"zero": {"stage": stage}, "compile": {"scope": "blocks", "backend": backend}},
        world=world,
    )
    largest, graphs = 0.0, []
    for step, wanted in enumerate(truth):
        engine.train_step([piece(step, world.rank)])
        largest = max(largest, worst(engine.state_dict(), wanted.weights))
        counters = torch._dynamo.utils.counters
        graphs.append(counters["stats"]["unique_graphs"])
        assert sum(counters["graph_break"].values()) == 0
    engine.close()
    torch._dynamo.reset()
    return largest, graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(ranks: Any, backend: str) -> None:
    """One graph a block at most, no break, and none anew when weights move or change."""
    for stage in (0, 3):
        for error, graphs in ranks(2).run(compiled, stage, backend):
            assert error <= LIMIT
            assert 1 <= graphs[0] <= 10
            assert graphs == graphs[:1] * 3


def compiled_and_recomputed(world: World) -> float:
    dynamo_anew()
    plain = seeded(AroundABlock)
    truth = train(
        plain,
        optim.AdamW(plain.parameters(), weight_decay=0.0),
        [[(piece(step, i), 1.0) for i in range(world.size)] for step in range(2)],
        lambda model, batch: model(*batch),
    )
    engine = shardwise.initialize(
        seeded(AroundABlock),
        {"zero": {"stage": 3, "debug": True}, "compile": {"scope": "blocks", "backend": "aot_eager"}},
        world=world,
    )
    largest = 0.0
    for step, wanted in enumerate(truth):
        engine.train_step([piece(step, world.rank)])
        largest = max(largest, worst(engine.state_dict(), wanted.weights))
    engine.close()
    torch._dynamo.reset()
    return largest


def test_compiled_blocks_that_recompute(ranks: Any) -> None:
    assert max(ranks(2).run(compiled_and_recomputed)) <= LIMIT


class Answers(nn.Module):
    """Returns what transformers' models do, or a dataclass."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.linear, self.output = nn.Linear(4, 4), output

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        return self.output(loss=logits.square().mean(), logits=logits)


@dataclass
class OwnOutput:
    loss: Tensor
    logits: Tensor


@pytest.mark.parametrize("output", [CausalLMOutput, OwnOutput])
def test_a_loss_function_gets_what_the_model_returns(world: World, output: type) -> None:
    """In fp32 and as it is: in bf16 a loss function that read ``model(x).loss`` met a dictionary."""
    found: list[Any] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found.append(model(x))
        return cast(Tensor, found[0].loss)

    engine = shardwise.initialize(Answers(output), {"precision": "bf16"}, loss=loss, world=world)
    engine.train_step([torch.ones(2, 4)])
    assert type(found[0]) is output
    assert (found[0].loss.dtype, found[0].logits.dtype) == (torch.float32, torch.float32)
