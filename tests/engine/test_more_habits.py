"""Forty habits of training scripts: each is right to 1e-9 of one plain process in fp64, or refused by name.

A habit is one function that is run twice: on plain torch with the whole batch, and on an engine on two ranks. It trains
through ``run``, which alone differs, and edits the model, its optimizer or its losses as scripts do. The losses of all
steps and all weights at the end are compared. A ShardwiseError is a refusal; anything else is a failure.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ShardwiseError, UsageError
from tests.engine.nets import seeded
from tests.engine.plain import worst

WORDS, WIDTH = 8, 8
ROWS = {"blocks.*.up": "column", "blocks.*.down": "row", "": "replicate"}
TP: dict[str, Any] = {"mesh": {"tp": 2}, "tensor": {"table": ROWS}}
PP: dict[str, Any] = {"mesh": {"pp": 2}}
HOST: dict[str, Any] = {"offload": {"optimizer": "host"}}
WHOLE: dict[str, Any] = {}


def stage(number: int, **more: Any) -> dict[str, Any]:
    """Return a configuration of one ZeRO stage."""
    return {"zero": {"stage": number}, **more}


class Block(nn.Module):
    """A norm and two linears around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return changed


class Net(nn.Module):
    """A small language model whose forward pass returns its loss."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


Piece = tuple[Any, ...]


def piece(step: int, i: int) -> Piece:
    """Return tokens and targets of one of the two parts of a batch."""
    drawn = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + i))
    return drawn[:, :-1], drawn[:, 1:]


class Habit(NamedTuple):
    """What a script does, and on what."""

    act: Callable[["Plain | Engine"], None]
    config: dict[str, Any]
    make: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch)
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01
    )
    piece: Callable[[int, int], Piece] = piece
    loss_tolerance: float = 1e-9


class Plain:
    """One process that trains on both pieces of every batch."""

    rank = 0

    def __init__(self, habit: Habit):
        self.habit = habit
        self.model = seeded(habit.make)
        self.optimizer = habit.optimizer(list(self.model.parameters()))
        self.losses: list[float] = []

    def forward(self, step: int) -> Tensor:
        parts = [self.habit.loss(self.model, self.habit.piece(step, i)) for i in range(2)]
        return (parts[0] + parts[1]) / 2

    def backward(self, loss: Tensor, **named: Any) -> None:
        loss.backward(**named)
        self.losses.append(float(loss.detach()))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number: int) -> None:
        self.backward(self.forward(number))
        self.update()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class Engine:
    """Two ranks: each brings a piece, or both compute on both pieces where the model is cut."""

    def __init__(self, habit: Habit, world: Any):
        self.habit, self.rank = habit, world.rank
        SEED[0] = world.rank
        model = seeded(habit.make)
        self.optimizer = habit.optimizer(list(model.parameters()))
        self.is_cut = "mesh" in habit.config
        batch = {"batch": {"accumulation": 2}} if self.is_cut else {}
        self.engine = shardwise.initialize(
            model,
            {"comm": {"timeout_s": 20.0}, **batch, **habit.config},
            world=world,
            loss=habit.loss,
            optimizer=self.optimizer,
        )
        self.model = self.engine.module
        self.losses: list[float] = []

    def forward(self, step: int) -> Tensor:
        found: Tensor = self.engine(self.habit.piece(step, self.rank))
        return found

    def backward(self, loss: Tensor, **named: Any) -> None:
        self.engine.backward(loss, **named)

    def update(self) -> None:
        result = self.engine.step()
        if result is not None:
            self.losses.append(result.loss)

    def step(self, number: int) -> None:
        if self.is_cut:
            self.losses.append(self.engine.train_step([self.habit.piece(number, i) for i in range(2)]).loss)
        else:
            self.backward(self.forward(number))
            self.update()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.engine.state_dict())


HABITS: dict[str, Habit] = {}


def habit(name: str, config: dict[str, Any], **more: Any) -> Callable[[Any], Any]:
    """Add a function to the habits."""

    def add(act: Any) -> Any:
        HABITS[name] = Habit(act, config, **more)
        return act

    return add


def train(run: Any, count: int = 2, start: int = 0) -> None:
    """Train some steps."""
    for number in range(start, start + count):
        run.step(number)


# Edits of weights between steps ------------------------------------------------------------------------------------


def edited(edit: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    """Return a script that edits the model between two steps."""

    def act(run: Any) -> None:
        train(run)
        edit(run.model)
        train(run, start=2)

    return act


def scale_each(model: nn.Module) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.5)


def through_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= 0.5


def through_dlpack(model: nn.Module) -> None:
    for p in model.parameters():
        torch.from_dlpack(p.detach()).mul_(0.5)


def as_a_vector(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(flat, model.parameters())


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}, assign=True)


def drawn_anew(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.head.reset_parameters()


def in_another_dtype(model: nn.Module) -> None:
    model.float()
    model.double()


def rounded() -> nn.Module:
    """Return a net whose weights are numbers of bf16, so that rounding changes none of them."""
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(
                torch.where(p == 0, 0.25, p).bfloat16()
            )  # a step of 1e-30 is lost beside every number but 0
    return net


def standing(edit: Callable[[nn.Module], Any], config: dict[str, Any]) -> Habit:
    """Return a habit of editing weights whose masters are wider; a rate near 0 leaves the edit alone to be seen."""
    still = lambda parameters: torch.optim.SGD(parameters, lr=1e-30)  # noqa: E731
    return Habit(edited(edit), {"precision": "bf16", **config}, rounded, optimizer=still, loss_tolerance=0.1)


HABITS["each weight's data halved, bf16"] = standing(scale_each, stage(1))
HABITS["weights set from one vector, bf16"] = standing(as_a_vector, stage(2))
HABITS["weights halved through dlpack, bf16"] = standing(through_dlpack, stage(0))
HABITS["each weight's data halved, state on the host"] = Habit(edited(scale_each), stage(1, **HOST))
HABITS["weights halved through numpy, state on the host"] = Habit(edited(through_numpy), stage(2, **HOST))
HABITS["weights halved through dlpack, state on the host"] = Habit(edited(through_dlpack), stage(1, **HOST))
HABITS["weights set from one vector"] = Habit(edited(as_a_vector), stage(1))
HABITS["load_state_dict with assign"] = Habit(edited(assigned), stage(0))
HABITS["a head that is drawn anew, state on the host"] = Habit(edited(drawn_anew), stage(2, **HOST))
HABITS["weights to fp32 and back"] = Habit(edited(in_another_dtype), stage(1))


@habit("p.data given another tensor", stage(2))
def data_given(run: Any) -> None:
    train(run)
    for p in run.model.parameters():
        p.data = p.data * 0.5
    train(run, start=2)


# Surgery on modules ------------------------------------------------------------------------------------------------


def with_weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.head)


def pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.head, "weight", amount=0.5)


def swapped_blocks(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


HABITS["weight_norm on a layer of a running model"] = Habit(edited(with_weight_norm), stage(1))
HABITS["pruning a layer of a running model"] = Habit(edited(pruned), stage(1))
HABITS["two blocks that change places"] = Habit(edited(swapped_blocks), stage(3))


@habit("a patched forward of the model", stage(3))
def patched_root(run: Any) -> None:
    run.model.forward = lambda tokens, targets: 2 * type(run.model).forward(run.model, tokens, targets)
    train(run)


@habit("a patched forward of the model on stages", PP)
def patched_root_on_stages(run: Any) -> None:
    run.model.forward = lambda tokens, targets: 2 * type(run.model).forward(run.model, tokens, targets)
    train(run)


# Hooks where a model is cut ----------------------------------------------------------------------------------------


@habit("a pre-hook with keywords on a cut layer", TP)
def hook_before_a_cut_layer(run: Any) -> None:
    run.model.blocks[0].down.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] / args[0].norm(),), kwargs), with_kwargs=True
    )
    train(run)


@habit("a backward hook on a cut layer", TP)
def hook_behind_a_cut_layer(run: Any) -> None:
    run.model.blocks[0].up.register_full_backward_hook(
        lambda module, given, grads: (given[0] * (1 + 1e4 * grads[0].square().sum()),)
    )
    train(run)


@habit("a hook on all modules of torch, with cut layers", TP)
def hook_on_all_modules(run: Any) -> None:
    def act(module: nn.Module, args: Any, out: Any) -> Any:
        return out / (1 + out.square().mean()) if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(act)
    try:
        train(run)
    finally:
        handle.remove()


class NormedGradient(Block):
    """A block that scales the gradient of its features by their norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        changed: Tensor = x + self.down(y)
        return changed


HABITS["a model with cut layers"] = Habit(train, TP)
HABITS["a tensor hook on cut features"] = Habit(train, TP, lambda: Net(NormedGradient))


# Random numbers ----------------------------------------------------------------------------------------------------


SEED = [0]
"""The seed of the next model's own generators: the rank, as scripts seed them."""


class Noisy(nn.Module):
    """A model that adds noise and takes the same noise away: its loss does not depend on what was drawn."""

    def __init__(self, draw: Callable[["Noisy", Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.draw = draw
        self.generators = torch.Generator(), np.random.default_rng(SEED[0]), random.Random(SEED[0])
        self.generators[0].manual_seed(SEED[0])
        with torch.no_grad():
            for block in self.blocks:
                block.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        noise = self.draw(self, x)
        y = x + noise
        for block in self.blocks:
            y = block(y)
        return (y - noise - x).square().mean() + 0 * y.sum()


def own_generator(model: Any, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=model.generators[0], dtype=x.dtype)


def own_numpy(model: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(model.generators[1].normal(size=tuple(x.shape)))


def own_random(model: Any, x: Tensor) -> Tensor:
    return torch.full_like(x, model.generators[2].random())


def multinomial(model: Any, x: Tensor) -> Tensor:
    return torch.multinomial(torch.ones(WIDTH), x.numel(), replacement=True).view(x.shape).to(x.dtype)


def seeded_by_rank(run: Any) -> None:
    torch.manual_seed(run.rank)
    random.seed(run.rank)
    np.random.seed(run.rank)
    train(run, 1)


def numbers(step: int, i: int) -> Piece:
    return (
        torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + i), dtype=torch.float64),
    )


def noisy(draw: Callable[[Any, Tensor], Tensor], config: dict[str, Any]) -> Habit:
    """Return a habit of drawing noise by ``draw`` in a model whose ranks are seeded unlike."""
    return Habit(seeded_by_rank, config, lambda: Noisy(draw), piece=numbers)


HABITS["noise of the model's own generator on stages"] = noisy(own_generator, PP)
HABITS["noise of the model's own numpy generator on stages"] = noisy(own_numpy, PP)
HABITS["noise of the model's own random.Random on stages"] = noisy(own_random, PP)
HABITS["multinomial draws on stages"] = noisy(multinomial, PP)


# Losses ------------------------------------------------------------------------------------------------------------


def ragged(step: int, i: int) -> Piece:
    """Return a piece whose first part has fewer counted labels than its second."""
    tokens, targets = piece(step, i)
    targets = targets.clone()
    targets[:, : 3 - 2 * i] = -100
    return tokens, targets


def whole_of(mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss that is a sum over counted labels divided by their number."""

    def loss(model: Any, batch: Any) -> Tensor:
        total, count = mean(model.logits(batch[0]), batch[1])
        return total / count

    return loss


def focal(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets != -100
    chosen = logits.log_softmax(-1)[kept].gather(-1, targets[kept][:, None])[:, 0]
    return -((1 - chosen.exp()).square() * chosen).sum(), kept.sum()


def margin(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = (targets != -100).to(logits.dtype)
    right = logits.gather(-1, targets.clamp(min=0)[..., None])
    return ((1 + logits - right).clamp(min=0).sum(-1) * kept).sum(), kept.sum().clamp(min=1)


class Ragged(Plain):
    """One process whose loss is over the counted labels of the whole batch."""

    def forward(self, step: int) -> Tensor:
        parts = [self.habit.piece(step, i) for i in range(2)]
        whole = tuple(torch.cat([part[k] for part in parts]) for k in range(2))
        return self.habit.loss(self.model, whole)


HABITS["a focal loss over counted labels"] = Habit(train, stage(2), loss=whole_of(focal), piece=ragged)
HABITS["a margin loss over counted labels"] = Habit(train, stage(0), loss=whole_of(margin), piece=ragged)
WHOLE_BATCH = set(HABITS) - {name for name in HABITS if "counted labels" not in name}


@habit("two losses of one forward pass, one of them twice", stage(3))
def backward_twice(run: Any) -> None:
    for number in range(2):
        loss = run.forward(number)
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        run.update()
        if isinstance(run, Plain):
            run.losses[-2:] = [sum(run.losses[-2:])]


@habit("a forward pass that nobody goes back through", stage(3))
def forward_for_nothing(run: Any) -> None:
    for number in range(2):
        run.forward(number + 50)
        run.step(number)


@habit("zero_grad of the model before the step", stage(2))
def zeroed_too_early(run: Any) -> None:
    run.backward(run.forward(0))
    run.model.zero_grad()
    run.update()
    train(run, start=1)


@habit("a gradient put into p.grad by hand", stage(1))
def gradient_by_hand(run: Any) -> None:
    train(run)
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    run.update()


@habit("autograd.grad instead of a backward pass", stage(1))
def by_autograd_grad(run: Any) -> None:
    parameters = list(run.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(run.forward(0), parameters), strict=True):
        p.grad = g
    run.update()


# The optimizer that was given --------------------------------------------------------------------------------------


@habit("moments of the given optimizer set to zero", stage(1))
def moments_to_zero(run: Any) -> None:
    train(run)
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
    if isinstance(run, Engine) and not run.optimizer.state:
        raise AssertionError("the loop above did nothing, and nobody said so")
    train(run, start=2)


@habit("load_state_dict of the given optimizer", stage(1))
def optimizer_loaded(run: Any) -> None:
    train(run)
    parameters = run.optimizer.param_groups[0]["params"]
    state = {i: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
             for i, p in enumerate(parameters)}  # fmt: skip
    groups = [{**group, "params": list(range(len(parameters)))} for group in run.optimizer.param_groups]
    run.optimizer.load_state_dict({"state": state, "param_groups": groups})
    train(run, start=2)


@habit("a group of the given optimizer taken out", stage(2), optimizer=lambda parameters: torch.optim.SGD(
    [{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.1, momentum=0.9))  # fmt: skip
def group_taken_out(run: Any) -> None:
    train(run)
    run.optimizer.param_groups.pop()
    train(run, start=2)


HABITS["a rate that is a tensor"] = Habit(
    train,
    stage(1),
    optimizer=lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False
    ),
)
HABITS["an optimizer that maximizes"] = Habit(
    train,
    stage(2),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, maximize=True),
)


# Recomputed blocks -------------------------------------------------------------------------------------------------

CALLS = [0]


class GlobalCounter(Block):
    """A block whose output depends on a counter of the module file."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(x * (1 + 0.1 * (CALLS[0] % 4)))


class OwnNumpy(Block):
    """A block that draws from a numpy generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drawer = np.random.default_rng(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(1 + self.drawer.random()))


class InPlace(Block):
    """A block that writes over its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return super().forward(x)


class History(Block):
    """A block that keeps a list of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().abs().mean()))
        return super().forward(x * (1 + 0.1 * len(self.seen)))


FULL: dict[str, Any] = {"recompute": "full"}


def afresh(model: Any, batch: Any) -> Tensor:
    """Return the loss of a pass that starts with no state in the blocks, as each rank's first pass does."""
    CALLS[0] = 0
    for block in model.blocks:
        block.drawer, block.seen = np.random.default_rng(4), []
    loss: Tensor = model(*batch)
    return loss


HABITS["a recomputed block that counts in a global"] = Habit(
    train, FULL, lambda: Net(GlobalCounter), loss=afresh
)
HABITS["a recomputed block that draws from its own numpy generator"] = Habit(
    train, FULL, lambda: Net(OwnNumpy), loss=afresh
)
HABITS["a recomputed block that keeps what it saw"] = Habit(train, FULL, lambda: Net(History), loss=afresh)
HABITS["a recomputed block that writes over its input"] = Habit(train, FULL, lambda: Net(InPlace))
HABITS["a recomputed block with a spectral norm"] = Habit(
    train,
    {**FULL, "batch": {"duplicates": "allow"}},
    lambda: Net(lambda: _spectral(Block())),
    piece=lambda step, i: piece(step, 0),
)
HABITS["the engine's steps with anomaly detection"] = Habit(
    lambda run: _with_anomaly_detection(run), stage(3)
)


def _spectral(block: Block) -> Block:
    nn.utils.parametrizations.spectral_norm(block.up)
    block.up.eval()
    return block


def _with_anomaly_detection(run: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        train(run)


# Files and modes of a step -----------------------------------------------------------------------------------------


@habit("load inside of full_parameters", stage(3))
def load_inside(run: Any) -> None:
    train(run)
    if isinstance(run, Plain):
        return
    folder = Path(tempfile.gettempdir(), f"shardwise-habits-{os.getppid()}")
    run.engine.save(folder)
    run.engine.wait_for_save()
    try:
        with run.engine.full_parameters(write=True):
            run.engine.load(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@habit("a frozen layer between forward and backward", stage(2))
def frozen_between(run: Any) -> None:
    train(run, 1)
    loss = run.forward(1)
    run.model.head.weight.requires_grad_(False)
    run.backward(loss)
    run.model.head.weight.requires_grad_(True)
    run.update()
    train(run, start=2)


class Odd(nn.Module):
    """Parameters of unusual forms: a number, one without elements, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(WIDTH, 6).t())
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.turned) * self.scale
        return self.out(torch.tanh(y)).square().mean() + self.nothing.sum()


HABITS["parameters of unusual forms"] = Habit(train, stage(3), Odd, piece=numbers)


def verdict_of(world: Any, name: str) -> tuple[str, str]:
    """Return "right", "refused" or "wrong" with what shows it."""
    habit = HABITS[name]
    plain = (Ragged if name in WHOLE_BATCH else Plain)(habit)
    try:
        habit.act(plain)
    except ShardwiseError:
        plain.losses.clear()
    torch.manual_seed(0)
    try:
        engine = Engine(habit, world)
        habit.act(engine)
        weights = engine.weights()
    except ShardwiseError as error:
        return "refused", f"{type(error).__name__}: {error}"
    wanted = plain.weights()
    if set(weights) != set(wanted):
        return "wrong", f"names differ: {sorted(set(weights) ^ set(wanted))}"
    off = worst(weights, wanted)
    losses = max((abs(a - b) for a, b in zip(engine.losses, plain.losses, strict=True)), default=0.0)
    engine.engine.close()
    is_right = off <= 1e-9 and losses <= habit.loss_tolerance
    return ("right" if is_right else "wrong"), f"weights {off:.1e}, losses {losses:.1e}"


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_right_or_refused(name: str, ranks: Any) -> None:
    verdicts = ranks(2).run(verdict_of, name)
    assert {verdict for verdict, _ in verdicts} <= {"right", "refused"}, verdicts


def test_a_table_that_begins_no_cut_of_the_sequence_is_right(ranks: Any) -> None:
    """Column layers gathered whole sequences, doubled their gradients, and every habit on cut layers was refused."""
    assert [verdict for verdict, _ in ranks(2).run(verdict_of, "a model with cut layers")] == ["right"] * 2


def test_the_given_optimizer_is_whole_again_after_close() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = shardwise.initialize(model, optimizer=optimizer, loss=lambda model, x: model(x).square().mean())
    for use in (len, list, lambda state: state.get(model.weight), lambda state: state.clear()):
        with pytest.raises(UsageError, match="engine.set_full_tensor"):
            use(optimizer.state)
    engine.close()
    assert len(optimizer.state) == 0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert "exp_avg" in optimizer.state[model.weight]
