"""Experts of several ranks beside what else an engine does: updates by whole tensors, frozen weights, lists of layers,
weights from elsewhere, compiled blocks. All equal one process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise
from shardwise import Layers, LayerSpec, MixtureOfExperts, RouterPolicy
from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import GptExperts
from shardwise.models.upcycle import upcycled, upcycled_policy
from tests.engine.nets import seeded
from tests.engine.plain import train, worst
from tests.engine.test_experts import CLIP, Layout, Mixture, config_of, data, pieces
from tests.optim import plain_rules

# Updates by whole tensors ------------------------------------------------------------------------------------------

RULES = {
    "lamb": {"lr": 0.02, "weight_decay": 0.1},
    "lars": {"lr": 5.0, "weight_decay": 0.1},
    "muon": {"lr": 0.02, "weight_decay": 0.1, "rest_lr": 0.01, "ns_dtype": "fp64"},
}
OFTEN = [
    ("lamb", Layout(dp=2, ep=2, stage=3, microbatches=2)),
    ("lamb", Layout(tp=2, etp=2)),
    ("muon", Layout(dp=2, ep=2, stage=1)),
]
EVERY = [
    ("lars", Layout(tp=2, ep=2)),
    ("muon", Layout(tp=2, ep=2)),
    ("lamb", Layout(dp=4, ep=2, stage=3)),
    ("muon", Layout(dp=4, ep=2, stage=3)),
    ("lamb", Layout(dp=2, tp=2, ep=2, etp=2, stage=3)),
    ("lamb", Layout(pp=2, tp=2, ep=2, microbatches=2)),
]


def is_matrix(name: str) -> bool:
    """Of ``Mixture``: what Muon takes by itself. A stack of experts has three dims."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def by_formula(kind: str, steps: int) -> list[dict[str, Tensor]]:
    """Weights after each step of one process."""
    batches = []
    for step in range(steps):
        tokens, targets = data(step)
        counts = (targets != -100).sum(1).tolist()
        batches.append([((tokens[i : i + 1], targets[i : i + 1]), float(n)) for i, n in enumerate(counts)])

    def numbers(name: str) -> dict[str, Any]:
        return RULES[kind]

    rule = plain_rules.muon(numbers, is_matrix) if kind == "muon" else getattr(plain_rules, kind)(numbers)
    return plain_rules.train(seeded(Mixture), rule, batches, lambda model, batch: model(*batch), CLIP)


def by_engine(world: Any, kind: str, layout: Layout, steps: int = 2) -> float:
    """Largest error of a weight."""
    config = {**config_of(layout), "optimizer": {"type": kind, **RULES[kind]}}
    engine = shardwise.initialize(seeded(Mixture), config, world=world)
    largest = 0.0
    for step, wanted in enumerate(by_formula(kind, steps)):
        engine.train_step(*pieces(layout, engine.dp_index, step))
        state = engine.state_dict()
        largest = max(largest, worst({name: state[name] for name in wanted}, wanted))
    engine.close()
    return largest


@pytest.mark.parametrize(("kind", "layout"), OFTEN, ids=str)
def test_updates_by_whole_tensors(ranks: Any, kind: str, layout: Layout) -> None:
    """A stack's norm is that of all its experts, wherever these lie."""
    assert max(ranks(layout.size).run(by_engine, kind, layout)) <= 1e-10


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "layout"), EVERY, ids=str)
def test_updates_by_whole_tensors_in_every_layout(ranks: Any, kind: str, layout: Layout) -> None:
    assert max(ranks(layout.size).run(by_engine, kind, layout)) <= 1e-10


# Models of the tests' own ------------------------------------------------------------------------------------------

WIDTH, PARTS = 8, 4


class Adapted(nn.Module):
    """An expert whose own weights stand still; two small matrices beside them learn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.narrow, self.wide = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x) + self.wide(self.narrow(x))))
        return result


class Block(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module] | None = None, is_frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.adapter = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        router = RouterPolicy(balance="loss", balance_weight=0.1)
        self.mlp = MixtureOfExperts(WIDTH, 4, 4, router=router, expert=expert)
        if is_frozen:
            self.mlp.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        result: Tensor = x + y + self.adapter(y)
        return result


class Net(nn.Module):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*given) for _ in range(2))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, targets)


def batch(step: int, part: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + part)
    x, targets = torch.randn(2, 2, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return x, targets


def error_of(world: Any, model: nn.Module, plain: nn.Module, config: dict[str, Any]) -> float:
    """Largest of loss, norm and weights over two steps; infinite where a frozen weight moved."""
    dtype = next(plain.parameters()).dtype
    frozen = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    learning = [p for p in plain.parameters() if p.requires_grad]
    for module in plain.modules():
        if isinstance(module, MixtureOfExperts):  # what a part's loss is multiplied by
            module.surroundings.scale = lambda: 1 / PARTS
    steps = [[(batch(step, part, dtype), 1.0) for part in range(PARTS)] for step in range(2)]
    truth = train(
        plain, torch.optim.AdamW(learning, lr=0.01), steps, lambda model, batch: model(*batch), CLIP
    )
    engine = shardwise.initialize(
        model, {"optimizer": {"lr": 0.01, "weight_decay": 0.01}, "max_grad_norm": CLIP, **config}, world=world
    )
    largest = 0.0
    for step, wanted in enumerate(truth):
        mine = range(engine.dp_index, PARTS, engine.dp_size)
        result = engine.train_step([batch(step, part, dtype) for part in mine])
        state = engine.state_dict()
        largest = max(
            largest,
            abs(result.loss / wanted.loss - 1),
            abs(result.grad_norm / wanted.norm - 1),
            worst({name: state[name] for name in wanted.weights}, wanted.weights),
        )
        if any(not torch.equal(state[name], value) for name, value in frozen.items()):
            largest = float("inf")
    engine.close()
    return largest


def config(ep: int = 1, pp: int = 1, stage: int = 0, **more: Any) -> dict[str, Any]:
    mesh = {"mesh": {"ep": ep, "pp": pp}, "batch": {"accumulation": PARTS * pp // 2}}
    return {**mesh, "zero": {"stage": stage}, **more}


# Frozen weights ----------------------------------------------------------------------------------------------------


def frozen(world: Any) -> list[float]:
    """Whole layers of experts that stand still beside adapters; adapters inside of experts."""
    return [
        error_of(world, seeded(Net, *given), seeded(Net, *given), config(ep=2, stage=stage, **more))
        for given, stage, more in (
            ((None, True), 3, {"recompute": "full"}),
            ((Adapted,), 1, {}),
        )
    ]


def test_frozen_weights_stand_still_and_adapters_learn(ranks: Any) -> None:
    for errors in ranks(2).run(frozen):
        assert max(errors) <= 1e-10, errors


# Lists of layers ---------------------------------------------------------------------------------------------------


def in_a_list(of: Callable[[], Any]) -> Layers:
    return Layers([of() for _ in range(3)], loss=F.mse_loss)


def lists(world: Any) -> list[float]:
    found = [
        error_of(world, seeded(in_a_list, Block), seeded(in_a_list, Block), where)
        for where in (config(ep=2, stage=3), config(pp=2))
    ]
    for where in (config(ep=2), config(pp=2)):
        plain = in_a_list(lambda: LayerSpec(Block))
        plain.build_all()
        found.append(error_of(world, in_a_list(lambda: LayerSpec(Block)), plain, where) * 1e-4)  # in fp32
    return found


def test_layers_of_a_list(ranks: Any) -> None:
    """Built before or on their stage."""
    for errors in ranks(2).run(lists):
        assert max(errors) <= 1e-10, errors


# Weights from elsewhere --------------------------------------------------------------------------------------------

SHAPE = {"layers": 2, "width": WIDTH, "heads": 2, "context": 6, "vocab": 13, "hidden": 4}


def made_of_dense(folder: str) -> Gpt:
    """A dense model's weights as a file of one with experts, and that model on one process."""
    dense = seeded(Gpt, GptPolicy(**SHAPE), dtype=torch.float32)
    router = RouterPolicy(top_k=2, balance="none")
    policy = upcycled_policy(dense.policy, GptExperts(count=4, router=router))
    found = upcycled(policy, dense.get_parameter, lambda name: dense.get_parameter(name).dtype)
    tensors = {name: each.make() for name, each in found.items()}
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, f"{folder}/experts.safetensors")
    made = Gpt(policy)
    made.load_state_dict(tensors)
    tokens, targets = data(0)
    torch.testing.assert_close(made(tokens, targets), dense(tokens, targets))
    return made.double()


def begun(world: Any, folder: str) -> list[float]:
    """Largest error of a start weight, and of one after a step."""
    plain, (tokens, targets) = made_of_dense(folder), data(0)
    with torch.device("meta"):
        empty = Gpt(plain.policy)
    engine = shardwise.initialize(
        empty,
        {
            "mesh": {"ep": 2},
            "zero": {"stage": 3},
            "precision": "fp64",
            "init_from": f"{folder}/experts.safetensors",
            "optimizer": {"type": "sgd", "lr": 0.5},
        },
        world=world,
    )
    found = [worst(engine.state_dict(), plain.state_dict())]
    plain(tokens, targets).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    engine.train_step([(tokens.chunk(2)[world.rank], targets.chunk(2)[world.rank])])
    found.append(worst(engine.state_dict(), plain.state_dict()))
    engine.close()
    return found


def test_a_dense_model_begins_as_experts_of_two_ranks(ranks: Any, tmp_path: Path) -> None:
    for start, after in ranks(2).run(begun, str(tmp_path)):
        assert start == 0 and after <= 1e-10


# Compiled blocks ---------------------------------------------------------------------------------------------------


def compiled(world: Any) -> float:
    torch._dynamo.reset()
    words = {"compile": {"scope": "blocks", "backend": "eager"}}
    with warnings.catch_warnings():
        # What dynamo does itself: it looks at every input, and makes an object of each autograd.Function.
        warnings.filterwarnings("ignore", "The .grad attribute|.*should not be instantiated")
        return error_of(world, seeded(Net), seeded(Net), config(ep=2, stage=3, **words))


def test_compiled_blocks_go_round_experts(ranks: Any) -> None:
    assert max(ranks(2).run(compiled)) <= 1e-10
