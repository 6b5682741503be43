"""``engine.close()`` gives the model back: as it came, but for the numbers in it.

An inventory of hooks, attributes, children and classes of every module and parameter is the same before ``initialize``
and after ``close``, and the gradients of the closed model in plain torch are those of a fresh copy, to the bit.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World, join
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.plain import worst


def gated(queries: Tensor, values: Tensor) -> Tensor:
    return torch.sigmoid(queries) * values


class Block(nn.Module):
    """Has all that an engine replaces: attention, batch norm, dropout, a forward to run again, a method."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])
        self.drop = nn.Dropout(share, inplace=True)
        self.attention = gated
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # the user's own: stays as the engine leaves it
        return x + self.drop(self.inner[1](self.attention(self.inner[0](self.norm(x)), x)))

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.inner[1](x)


class Net(nn.Module):
    """A tied embedding around blocks, a part of the first of which is frozen."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(Block(share) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].inner[0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), targets)


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (6, 2), generator=torch.Generator().manual_seed(100 * step + i))
    return tokens[:, 0], tokens[:, 1]


def inventory(model: nn.Module) -> dict[str, Any]:
    """Everything that could have been hung on a model, by name; numbers left out."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = (id(module), type(module))
        for key, value in vars(module).items():
            if "hooks" in key:
                found[f"{name}.{key}"] = value if value is None else [id(each) for each in value.values()]
            elif key not in ("_parameters", "_buffers", "_modules", "seen"):
                found[f"{name}.{key}"] = value
    for name, each in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        hooks = [
            list((getattr(each, key) or {}).values())
            for key in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        of_it = (type(each), id(each), each.dtype, each.shape, each.requires_grad, each.is_leaf, each.grad)
        found[f"{name}:"] = (*of_it, vars(each), hooks)
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """In plain torch, in training mode, dropout drawn from one seed."""
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model(*piece(9, 0)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def closed(world: Any, config: dict[str, Any], dtype: torch.dtype) -> None:
    model = seeded(Net, dtype=dtype)
    before = inventory(model)
    for _ in range(2):  # ``initialize`` takes it again
        engine = shardwise.initialize(model, config, world=world)
        for step in range(2):
            engine.train_step([piece(step, world.rank)])
        engine.evaluate([(piece(3, world.rank), None)])
        if "forward_methods" in config["zero"]:
            engine.backward(model.blocks[0].doubled(torch.ones(2, 6, dtype=dtype)).sum())
        whole = engine.state_dict()
        assert inventory(model) != before
        engine.close()
        assert inventory(model) == before
        # Not rounded twice: what the engine computed with is what the model rounds to.
        held = model.state_dict()
        assert worst({name: held[name].to(tensor.dtype) for name, tensor in whole.items()}, whole) == 0
        fresh = seeded(Net, dtype=dtype)
        fresh.load_state_dict(held)
        wanted, got = gradients(fresh), gradients(model)
        assert len(wanted) == len(list(fresh.parameters())) - 1, "all but the frozen one"
        assert all(torch.equal(got[name], wanted[name]) for name in wanted | got)
        for each in (model, fresh):
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
            each.zero_grad()
        assert worst(model.state_dict(), fresh.state_dict()) == 0


CASES = [
    ({"zero": {"stage": 0}}, torch.float64),
    ({"zero": {"stage": 1}, "recompute": "full", "batch_norm": "synchronized"}, torch.float64),
    ({"zero": {"stage": 2}, "recompute": "selective", "precision": "bf16"}, torch.float32),
    ({"zero": {"stage": 3, "forward_methods": ["blocks.*.doubled"]}}, torch.float64),
    (
        {"zero": {"stage": 3}, "recompute": "full", "batch_norm": "synchronized", "precision": "bf16"},
        torch.float32,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case[0].values())))
@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_model_is_a_fresh_one_with_other_numbers(ranks: Any, size: int, case: Any) -> None:
    if size == 1:
        closed(join(quiet=True), *case)
    else:
        ranks(size).run(closed, *case)


def gone_on(world: Any, stage: int) -> None:
    """A second engine goes on where the first one stopped, with all the bits of its masters."""
    config = {"zero": {"stage": stage}, "precision": "bf16", "optimizer": {"type": "sgd", "lr": 1e-3}}
    found = []
    for closes in (False, True):
        model = seeded(Net, 0.0, dtype=torch.float32)
        engine = shardwise.initialize(model, config, world=world)
        for step in range(4):
            engine.train_step([piece(step, world.rank)])
            if closes and step == 1:
                engine.close()
                engine = shardwise.initialize(model, config, world=world)
        engine.close()
        # Parameters alone: batch statistics become rank 0's.
        found.append({name: each.detach() for name, each in model.named_parameters()})
    assert worst(*found) == 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_second_engine_goes_on_from_the_masters(ranks: Any, stage: int) -> None:
    ranks(2).run(gone_on, stage)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
def test_a_compiled_forward_is_given_back() -> None:
    torch._dynamo.reset()
    model = seeded(Language)
    before = inventory(model)
    config = {"compile": {"scope": "blocks", "backend": "eager"}, "recompute": "full", "zero": {"stage": 3}}
    engine = shardwise.initialize(model, config, world=join(quiet=True))
    assert inventory(model) != before
    engine.close()
    assert inventory(model) == before


def of_specs(world: Any, stage: int) -> None:
    layers = [
        shardwise.LayerSpec(nn.Linear, 4, 4),
        nn.Dropout(0.5),
        torch.tanh,
        shardwise.LayerSpec(nn.Linear, 4, 2),
    ]
    model = shardwise.Layers(layers, loss=nn.functional.mse_loss)
    batch = (torch.ones(2, 4), torch.zeros(2, 2))
    engine = shardwise.initialize(model, {"zero": {"stage": stage}}, world=world)
    engine.train_step([batch])
    engine.close()
    assert type(model.get_submodule("1")) is nn.Dropout
    model(*batch).backward()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = shardwise.initialize(model, {"zero": {"stage": stage}}, world=world)
    assert worst(again.state_dict(), kept) == 0
    again.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_that_the_engine_built_stay(ranks: Any, stage: int) -> None:
    ranks(2).run(of_specs, stage)


@pytest.fixture
def world() -> World:
    return join(quiet=True)


def test_what_the_user_changed_meanwhile_stays(world: World) -> None:
    model = seeded(Net)
    drop, block = model.blocks[0].drop, model.blocks[0]
    engine = shardwise.initialize(model, {"recompute": "full"}, world=world)
    model.blocks[0].drop.p = 0.25
    model.blocks[1].drop = nn.Identity()
    model.eval()
    block.forward = gated  # type: ignore[method-assign, assignment]
    engine.close()
    assert block.drop is drop and drop.p == 0.25 and drop.inplace and not drop.training
    assert type(model.blocks[1].drop) is nn.Identity and block.forward is gated


def test_a_closed_engine_lends_no_weights(world: World) -> None:
    """At stage 3 the end of such a context would take the weights away from a model that is given back."""
    engine = shardwise.initialize(seeded(Net), {"zero": {"stage": 3}}, world=world)
    engine.close()
    for call in (engine.full_parameters, engine.gathered):
        with pytest.raises(UsageError, match="this engine is closed"), call():
            pass
