"""A scheduler of torch or transformers on the optimizer that was given: the weights of plain torch, step for step.

The engine once took the first learning rate and kept it: OneCycleLR trained at a twenty-fifth of its top, and with
transformers' warm-up, which starts at 0, no weight ever moved.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs

import shardwise
from shardwise.base.errors import ConfigError, MismatchError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

STEPS = 12
ROWS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(self.head(x), y)


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().double()


def adamw(model: Net) -> optim.Optimizer:
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.003}]
    return optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sgd(model: Net) -> optim.Optimizer:
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "weight_decay": 0.2}]
    return optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)


def _transformers(name: str, *arguments: int) -> Callable[[Any], Any]:
    def make(optimizer: optim.Optimizer) -> Any:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(optimizer, *arguments)

    return make


SCHEDULERS: dict[str, tuple[Callable[[Net], optim.Optimizer], Callable[[Any], Any]]] = {
    "OneCycle, momentum": (sgd, lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=STEPS)),
    "OneCycle, betas": (adamw, lambda o: lrs.OneCycleLR(o, max_lr=[0.1, 0.02], total_steps=STEPS)),
    "CosineAnnealing": (adamw, lambda o: lrs.CosineAnnealingLR(o, T_max=9, eta_min=1e-4)),
    "WarmRestarts": (adamw, lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2)),
    "Step": (sgd, lambda o: lrs.StepLR(o, 3, 0.5)),
    "MultiStep": (sgd, lambda o: lrs.MultiStepLR(o, [2, 5, 6], 0.3)),
    "Exponential": (adamw, lambda o: lrs.ExponentialLR(o, 0.8)),
    "Lambda": (adamw, lambda o: lrs.LambdaLR(o, [lambda e: (e + 1) / 20, lambda e: 0.9**e])),
    "ReduceOnPlateau": (sgd, lambda o: lrs.ReduceLROnPlateau(o, factor=0.2, patience=0, threshold=0.2)),
    "Cyclic": (sgd, lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=4, base_momentum=0.5)),
    "Sequential": (
        adamw,
        lambda o: lrs.SequentialLR(
            o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.PolynomialLR(o, total_iters=8, power=2)], [4]
        ),
    ),
    "transformers cosine": (adamw, _transformers("get_cosine_schedule_with_warmup", 4, STEPS)),
    "transformers linear": (adamw, _transformers("get_linear_schedule_with_warmup", 3, STEPS)),
    "transformers inverse sqrt": (adamw, _transformers("get_inverse_sqrt_schedule", 3)),
}


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def plain(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and rates of a plain loop."""
    make, scheduled = SCHEDULERS[name]
    model = net()
    optimizer = make(model)
    scheduler = scheduled(optimizer)
    rates = []
    for step in range(STEPS):
        loss = model(*data(step))
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        _advance(scheduler, loss.item())
    return dict(model.state_dict()), rates


def _advance(scheduler: Any, loss: float) -> None:
    # Rounded: the mean over ranks differs from that of one batch in its last digits, and a plateau compares.
    scheduler.step(*([round(loss, 9)] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))


def ours(
    world: World, stage: int, name: str, early: bool, folder: str | None = None
) -> tuple[Any, list[float]]:
    """``early``: the scheduler is made before the engine. With a folder: saved in the middle, and gone on with anew."""

    def begin() -> tuple[Any, Any]:
        model = net()
        optimizer = make(model)
        scheduler = scheduled(optimizer) if early else None
        engine = shardwise.initialize(model, {"zero": {"stage": stage}}, optimizer=optimizer, world=world)
        return engine, scheduler or scheduled(optimizer)

    make, scheduled = SCHEDULERS[name]
    engine, scheduler = begin()
    rates = []
    for step in range(STEPS):
        if folder is not None and step == 5:
            state = scheduler.state_dict()
            engine.save(folder, asynchronous=False)
            engine.close()
            engine, scheduler = begin()
            engine.load(folder)
            scheduler.load_state_dict(state)
        x, y = data(step)
        share = ROWS // world.size
        mine = slice(world.rank * share, (world.rank + 1) * share)
        told = engine.lr
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.backward(engine(x[mine], y[mine]))
            result = engine.step()
            _advance(scheduler, result.loss)
        assert result.lr == told
        rates.append(result.lr)
    weights = engine.state_dict()
    engine.close()
    return weights, rates


def all_of(world: World, folder: str, every: bool) -> list[tuple[str, int, float, float]]:
    """(scheduler, stage, error of the weights, of the rates), at the stages in turn or at ``every`` one"""
    found = []
    for place, name in enumerate(SCHEDULERS):
        wanted, wanted_rates = plain(name)
        for stage in (0, 3) if every else ((0, 3)[place % 2],):
            path = f"{folder}/{world.size}/{name}/{stage}" if stage or name == "Step" else None
            weights, rates = ours(world, stage, name, early=stage == 0, folder=path)
            error = max(float((weights[key] - wanted[key]).abs().max()) for key in wanted)
            off = max(abs(a - b) for a, b in zip(rates, wanted_rates, strict=True))
            found.append((name, stage, error, off))
    return found


@pytest.mark.parametrize(
    ("size", "every"),
    [(2, False), *(pytest.param(size, True, marks=pytest.mark.soak) for size in (1, 2))],
    ids=["2", "1, every stage", "2, every stage"],
)
def test_weights_are_those_of_plain_torch(ranks: Any, tmp_path: Path, size: int, every: bool) -> None:
    """Also through a checkpoint in the middle, with the scheduler's own state_dict."""
    for rows in ranks(size).run(all_of, str(tmp_path), every):
        assert len(rows) == (1 + every) * len(SCHEDULERS)
        for name, stage, error, off in rows:
            assert error <= 1e-12 and off <= 1e-15, (name, stage, error, off)


def test_a_rate_set_by_hand(ranks: Any) -> None:
    (moved,) = ranks(1).run(by_hand)
    assert moved == pytest.approx([0.5, 0.25, 0.0, 0.125])


def by_hand(world: World) -> list[float]:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sum()

    model = One()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    engine = shardwise.initialize(model, optimizer=optimizer, world=world)
    moved, before = [], 0.0
    for lr in (0.5, 0.25, None, 0.125):
        # Zero for one step is the user's word where a scheduler is attached.
        optimizer.param_groups[0].update({"lr": 0.0, "initial_lr": 0.5} if lr is None else {"lr": lr})
        engine.backward(engine(torch.ones(1)))
        engine.step()
        now = float(engine.state_dict()["w"])
        moved.append(before - now)
        before = now
    engine.close()
    return moved


def refusals(world: World) -> dict[str, str]:
    """What is said where the numbers cannot be meant."""
    said = {}

    def attempt(name: str, change: Callable[[optim.Optimizer], Any], config: dict[str, Any]) -> None:
        model = net()
        optimizer = adamw(model)
        try:
            engine = shardwise.initialize(model, config, optimizer=optimizer, world=world)
            change(optimizer)
            x, y = data(world.rank)
            engine.backward(engine(x, y))
            engine.step()
            said[name] = ""
        except UsageError as error:
            said[name] = str(error)
            engine.backward(engine(x, y))  # the engine stands between two steps
        engine.close()

    def zero(optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    def part(optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[1]["weight_decay"] = 0.1 * world.rank

    attempt("zero", zero, {})
    attempt("both", lambda o: lrs.StepLR(o, 3), {"schedule": {"warmup_steps": 3}})
    attempt("groups", lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), {})
    attempt("ranks part", part, {})
    attempt("nothing", lambda o: None, {"schedule": {"warmup_steps": 3}})
    return said


def test_what_cannot_be_meant_is_refused(ranks: Any) -> None:
    first, second = ranks(2).run(refusals)
    assert first == second
    assert "learning rate of every group is 0" in first["zero"]
    assert "both would write" in first["both"]
    assert "3 groups now and had 2" in first["groups"]
    assert "the ranks work with different learning rates" in first["ranks part"]
    assert first["nothing"] == ""


HOOKS = {
    "step_pre_hook": lambda optimizer, args, named: None,
    "step_post_hook": lambda optimizer, args, named: None,
    "state_dict_pre_hook": lambda optimizer: None,
    "state_dict_post_hook": lambda optimizer, state: None,
    "load_state_dict_pre_hook": lambda optimizer, state: None,
    "load_state_dict_post_hook": lambda optimizer: None,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_would_never_be_called_are_refused(kind: str) -> None:
    """An average of the weights in a step_post_hook stood still, without a word."""
    model, world = net(), World(0, 1)
    optimizer = adamw(model)
    handle = getattr(optimizer, f"register_{kind}")(HOOKS[kind])
    with pytest.raises(UsageError, match=f"hooks of register_{kind} .*on_step"):
        shardwise.initialize(model, optimizer=optimizer, world=world)
    handle.remove()
    engine = shardwise.initialize(model, optimizer=optimizer, world=world)
    handle = getattr(optimizer, f"register_{kind}")(HOOKS[kind])
    engine.backward(engine(*data(0)))
    with pytest.raises(UsageError, match=f"register_{kind}"):
        engine.step()
    handle.remove()
    engine.backward(engine(*data(0)))
    assert engine.step().step == 1
    engine.close()


def test_the_given_optimizer_has_no_moments_to_save() -> None:
    """Its state was empty in the file, and what was loaded into it never reached the engine."""
    model = net()
    optimizer = adamw(model)
    state = optimizer.state_dict()
    engine = shardwise.initialize(model, optimizer=optimizer, world=World(0, 1))
    with pytest.raises(UsageError, match="engine.save"):
        optimizer.state_dict()
    with pytest.raises(UsageError, match="engine.load"):
        optimizer.load_state_dict(state)
    engine.close()
    optimizer.load_state_dict(optimizer.state_dict())


class WithTable(nn.Module):
    """One table beside one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        policy = TablePolicy(
            name="user",
            rows=9,
            width=4,
            placement="data_parallel",
            optimizer=RowOptimizerPolicy(type="sgd", lr=0.4),
        )
        self.tables = EmbeddingCollection([policy], seed=2)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.out = nn.Linear(4, 1)

    def forward(self, keys: Tensor) -> Tensor:
        found = self.tables({"user": Ragged.of_lists([[key] for key in keys.tolist()])})["user"]
        return self.out(found).square().mean()


TABLE_SCHEDULERS: dict[str, Callable[[optim.Optimizer, float], Any]] = {
    "Step": lambda o, top: lrs.StepLR(o, 2, 0.5),
    "Lambda": lambda o, top: lrs.LambdaLR(o, lambda e: (e + 1) / 4),
    "OneCycle": lambda o, top: lrs.OneCycleLR(o, top, total_steps=6, cycle_momentum=False),
}


def tables_follow(world: World) -> list[float]:
    """Error of the rows against torch's Embedding under an SGD and a scheduler of its own."""
    found = []
    for scheduled in TABLE_SCHEDULERS.values():
        model = WithTable()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        config = {"precision": "fp64", "zero": {"stage": 3}}
        engine = shardwise.initialize(model, config, optimizer=optimizer, world=world)
        scheduler = scheduled(optimizer, 0.05)
        plain = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1)).double()
        plain.load_state_dict({"0.weight": table_of(engine), **dense_of(engine)})
        both = [
            optim.SGD(plain[0].parameters(), lr=0.4),
            optim.SGD(plain[1].parameters(), lr=0.05),
        ]
        schedulers = [scheduled(both[0], 0.4), scheduled(both[1], 0.05)]
        for step in range(5):
            keys = torch.arange(4) * (step + 1) % 9
            engine.backward(engine(keys.chunk(world.size)[world.rank]))
            engine.step()
            scheduler.step()
            plain.zero_grad()
            plain(keys).square().mean().backward()
            for each, its in zip(both, schedulers, strict=True):
                each.step()
                its.step()
        wrong = [table_of(engine) - plain[0].weight, dense_of(engine)["1.weight"] - plain[1].weight]
        found.append(max(float(each.detach().abs().max()) for each in wrong))
        engine.close()
    return found


def table_of(engine: Any) -> Tensor:
    """All rows, of all ranks."""
    rows = engine.tables["tables"].rows_here("user")
    whole = torch.zeros(9, 4, dtype=torch.float64)
    whole[rows.keys] = rows.weights.double()
    return whole


def dense_of(engine: Any) -> dict[str, Tensor]:
    state = engine.state_dict()
    return {f"1.{name}": state[f"out.{name}"] for name in ("weight", "bias")}


@pytest.mark.parametrize("size", [1, 2])
def test_tables_follow_the_scheduler_of_the_given_optimizer(ranks: Any, size: int) -> None:
    """Their rates are their own, times what the scheduler makes of that of the first group."""
    for errors in ranks(size).run(tables_follow):
        assert max(errors) <= 1e-12, errors


def test_a_rate_of_zero_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="lr is 0 for every group"):
        shardwise.initialize(net(), {"optimizer": {"lr": 0.0}})


def skipping(world: World) -> tuple[list[float], list[bool]]:
    """fp16: an overflow in the second of four steps of a warm-up."""

    class Net16(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum()

    config = {
        "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0, "hysteresis": 1}},
        "schedule": {"warmup_steps": 4},
        "optimizer": {"type": "sgd", "lr": 1.0},
    }
    engine = shardwise.initialize(Net16(), config, world=world)
    rates, skipped = [], []
    for step in range(4):
        engine.backward(engine(torch.full((2, 4), 60000.0 if step == 1 else 0.5 + world.rank)))
        result = engine.step()
        rates.append(result.lr)
        skipped.append(result.skipped)
    engine.close()
    return rates, skipped


def test_a_skipped_step_is_none_of_the_schedule(ranks: Any) -> None:
    for rates, skipped in ranks(2).run(skipping):
        assert skipped == [False, True, False, False]
        assert rates == [0.25, 0.5, 0.5, 0.75]


def test_an_optimizer_of_another_engine_is_refused_as_such() -> None:
    """It was refused for hooks that no user had registered."""
    model, world = net(), World(0, 1)
    optimizer = adamw(model)
    engine = shardwise.initialize(model, optimizer=optimizer, world=world)
    with pytest.raises(UsageError, match=r"another engine works with it.*close\(\)"):
        shardwise.initialize(nn.Sequential(model), optimizer=optimizer, world=world)
    engine.close()


def test_a_step_of_other_groups_is_refused_before_a_weight_is_filled(tmp_path: Path) -> None:
    """It was refused behind them: the weights of the step, and the moments and numbers of the run."""
    model, world = net(), World(0, 1)
    engine = shardwise.initialize(model, optimizer=adamw(model), world=world)
    engine.backward(engine(*data(0)))
    engine.step()
    engine.save(tmp_path, asynchronous=False)
    other = net()
    late = shardwise.initialize(other, optimizer=optim.AdamW(other.parameters(), lr=0.01), world=world)
    before = late.state_dict()
    with pytest.raises(MismatchError, match="saved with 2 groups, the one given now has 1"):
        late.load(tmp_path)
    assert all(tensor.equal(before[name]) for name, tensor in late.state_dict().items())


def test_momenta_of_the_configuration_reach_the_weights(tmp_path: Path) -> None:
    """one_cycle against torch's Adam with the same numbers written by hand; saved in the middle, and gone on with."""
    cycle = {"type": "one_cycle", "min_lr": 0.01, "max_lr": 0.09, "rise_steps": 4, "second_beta": 0.9}
    config = {"schedule": cycle, "optimizer": {"type": "adam"}, "precision": "fp64"}
    scales = [0.0, 0.25, 0.5, 0.75, 1.0, 0.75]
    plain_net = net()
    plain_adam = optim.Adam(plain_net.parameters())
    engine = shardwise.initialize(net(), config, world=World(0, 1))
    for step, scale in enumerate(scales):
        if step == 3:
            engine.save(tmp_path, asynchronous=False)
            engine.close()
            engine = shardwise.initialize(net(), config, world=World(0, 1))
            engine.load(tmp_path)
        first = 0.9 - 0.1 * scale if step else 0.8
        plain_adam.param_groups[0].update(lr=0.01 + 0.08 * scale, betas=(first, 0.9))
        plain_adam.zero_grad()
        plain_net(*data(step)).backward()
        plain_adam.step()
        engine.backward(engine(*data(step)))
        assert engine.step().lr == pytest.approx(0.01 + 0.08 * scale)
    for name, weight in engine.state_dict().items():
        assert (weight - plain_net.state_dict()[name]).abs().max() <= 1e-12
    engine.close()
