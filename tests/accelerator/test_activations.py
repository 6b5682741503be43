"""What blocks save waits in host memory beside a pretended device: the bits of a run that keeps it; no weight moves."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from shardwise.tiers import activations as module
from shardwise.tiers.activations import ActivationOffload
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.engine import test_offload
from tests.engine.test_offload import Case
from tests.ranks import RankPool

Moves = list[ActivationOffload]


class LateCopies:
    """Copies run when the computation waits for them, and there are NaNs until then: as late as a stream may be. Ranks
    are threads."""

    def __init__(self) -> None:
        self.made: Moves = []
        self._down: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def begin_down(self, tensor: Tensor) -> Tensor:
        there = torch.full(tensor.shape, 0xFF, dtype=tensor.dtype)
        self._down[get_ident()].append((there, tensor))
        return there

    def down_by_now(self, device: torch.device) -> Callable[[], None]:
        copies = self._down.pop(get_ident(), [])

        def wait() -> None:
            for there, tensor in copies:
                there.copy_(tensor, non_blocking=True)
            copies.clear()

        return wait

    def to_computation(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        into.fill_(0xFF)
        copies = [source]

        def wait() -> None:
            if copies:
                into.copy_(copies.pop(), non_blocking=True)

        return wait


@contextmanager
def late_copies(small: int = 64) -> Iterator[Moves]:
    """``small``: bytes of a storage that stays. What is made meanwhile is handed out."""
    late, init = LateCopies(), ActivationOffload.__init__

    def noted(self: ActivationOffload, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        late.made.append(self)

    with ExitStack() as stack:
        for name in ("begin_down", "down_by_now", "to_computation"):
            stack.enter_context(patch.object(module, name, getattr(late, name)))
        stack.enter_context(patch.object(module, "SMALL_BYTES", small))
        stack.enter_context(patch.object(ActivationOffload, "__init__", noted))
        yield late.made


class Other(NamedTuple):
    """What else is done to blocks."""

    experts: bool = False
    ep: int = 1
    mlp: int = 0
    """Tokens of a tile; 0: none."""


def config_of(case: Case, other: Other, moves: bool) -> dict[str, Any]:
    offload = {"activations": "host"} if moves else {}
    config = case.config(None) | {"offload": offload, "max_grad_norm": None}
    config["mesh"]["ep"] = other.ep
    return config | ({"tiles": {"mlp": other.mlp}} if other.mlp else {})


def gpt(other: Other) -> nn.Module:
    if not other.experts:
        return test_offload.gpt().double()
    torch.manual_seed(0)
    experts = {"count": 4, "hidden": 6, "first": 1, "shared": 1}
    sizes: dict[str, Any] = {"context": test_offload.CONTEXT, "vocab": test_offload.VOCABULARY}
    return Gpt(GptPolicy(layers=3, width=8, heads=2, hidden=12, experts=experts, **sizes)).double()


def trained(world: Any, case: Case, other: Other, moves: bool) -> tuple[list[Any], bool]:
    """(losses, norms and weights of two steps, with an evaluation between, to the bit), (whether bytes moved)."""
    engine = shardwise.initialize(gpt(other), config_of(case, other, moves), world=world)
    data, found = engine._parts.dp.index, []
    for step in range(2):
        batches = test_offload.batches(data, step, case.accumulation)
        result = engine.train_step(batches)
        found += [
            result.loss.hex(),
            result.grad_norm.hex(),
            engine.evaluate([(each, 1.0) for each in batches]).hex(),
        ]
    found += [(name, tensor.cpu().numpy().tobytes()) for name, tensor in engine.state_dict().items()]
    row = engine._parts.site.ledger.bytes_by_row().get("activations", 0)
    engine.close()
    return found, row > 0


def compare(world: Any, case: Case, other: Other) -> list[Any]:
    """[whether all is equal, whether host memory was taken without, and with]"""
    plain, moved = trained(world, case, other, False), trained(world, case, other, True)
    return [plain[0] == moved[0], plain[1], moved[1]]


def compare_on(_: Any, case: Case, other: Other) -> list[Any]:
    device, size = register(), max(case.tp * case.pp, 1 + (case.stage > 0))
    with late_copies() as made, Bench() as bench:
        found: list[Any] = Crew(size, device).run(compare, case, other)
        found.append([any(each.bytes.up > 0 for each in made), bench.misplaced])
    return found


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (Case(accumulation=2, recompute="selective"), Other()),
        (Case(3, recompute="full"), Other()),
        (Case(pp=2, accumulation=3), Other()),
        (Case(3), Other(experts=True, ep=2)),
        *(
            pytest.param(case, Other(), marks=pytest.mark.soak)
            for case in (
                *(Case(recompute="full"), Case(1), Case(2, recompute="selective"), Case(3, accumulation=2)),
                *(
                    Case(tp=2),
                    Case(tp=2, recompute="full"),
                    Case(pp=2, accumulation=3, recompute="selective"),
                ),
            )
        ),
        *(
            pytest.param(case, other, marks=pytest.mark.soak)
            for case in (Case(), Case(2, recompute="full"), Case(tp=2), Case(pp=2, accumulation=2))
            for other in (Other(mlp=5), Other(experts=True))
        ),
        pytest.param(Case(1, recompute="full"), Other(True, 2, 5), marks=pytest.mark.soak),
    ],
    ids=lambda each: "-".join(
        f"{key}{value}" for key, value in each._asdict().items() if value != type(each)._field_defaults[key]
    ),
)
def test_the_bits_of_a_run_that_keeps_them(device_process: RankPool, case: Case, other: Other) -> None:
    """The last stage of a pipeline has one block, whose backward pass follows at once: nothing moves there."""
    [found] = device_process.run(compare_on, case, other)
    moves = [True, False] if case.pp == 2 else [True] * (len(found) - 1)
    assert found == [*[[True, False, each] for each in moves], [True, []]]


class Again(nn.Module):
    """Its blocks run one after another, and then all of them once more."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = x + block(x)
        return x.square().mean()


def run_again(world: Any, moves: bool) -> list[str]:
    with Bench(), late_copies():
        config = {"offload": {"activations": "host" if moves else "device"}}
        engine = shardwise.initialize(Again(), config, world=world)
        x = torch.ones(3, 8).to(world.device)
        results = [engine.train_step([x]) for _ in range(3)]
        return [number.hex() for result in results for number in (result.loss, result.grad_norm)]


def both_ways(_: Any) -> list[list[str]]:
    return [Crew(1, register()).run(run_again, moves)[0] for moves in (False, True)]


def test_a_stack_that_runs_again(device_process: RankPool) -> None:
    """The RELOAD of its first run passed the REDUCEs of its last one, whose gradients were to come: refused as late."""
    [[kept, moved]] = device_process.run(both_ways)
    assert kept == moved


def told_without(world: Any, kind: Kind, places: list[int] | None) -> list[str]:
    """The divergences of two steps in which the list lacks some of its Actions; None: no handler does any."""
    with Bench(), late_copies():
        engine = shardwise.initialize(
            test_offload.gpt().double(), config_of(Case(3), Other(), True), world=world
        )
        program, walker = engine._parts.program, engine._parts.walker
        listed = [each for each in program.step() if each.kind is kind]
        assert len(listed) == 2, "the last block's tensors stay"
        gone = [listed[place] for place in places or ()]
        right = program.step
        program.step = lambda: tuple(each for each in right() if each not in gone)
        if places is None:
            walker.handlers[kind] = lambda action: None
        program.begin(program.microbatches)
        engine.train_step(test_offload.batches(world.rank, 0, 1))
        told = list(engine.trace.divergences)
        engine.close()
        return told


def each_left_out(_: Any, kind: Kind, places: list[int] | None) -> list[list[str]]:
    return list(Crew(2, register()).run(told_without, kind, places))


@pytest.mark.parametrize("kind", [Kind.OFFLOAD, Kind.RELOAD])
@pytest.mark.parametrize(("places", "told"), [([], 0), ([0], 1), ([1], 1), ([0, 1], 2), (None, 2)])
def test_a_move_that_is_left_out_is_told(
    device_process: RankPool, kind: Kind, places: list[int] | None, told: int
) -> None:
    [found] = device_process.run(each_left_out, kind, places)
    assert [len(each) >= told if told else not each for each in found] == [True, True], found


def told_of_blocks_inside_units(world: Any) -> list[str]:
    """The divergences of steps in which the Units are parts of the blocks whose tensors move."""
    with Bench(), late_copies() as made:
        config = config_of(Case(3), Other(), True)
        config["zero"] = {**config["zero"], "units": ["blocks.*.attention"]}
        engine = shardwise.initialize(test_offload.gpt().double(), config, world=world)
        told = []
        for step in range(3):
            engine.train_step(test_offload.batches(world.rank, step, 1))
            told += engine.trace.divergences
        assert any(each.bytes.up > 0 for each in made)
        engine.close()
        return told


def blocks_inside_units(_: Any) -> list[list[str]]:
    return list(Crew(2, register()).run(told_of_blocks_inside_units))


def test_a_block_that_is_no_unit_has_no_reload(device_process: RankPool) -> None:
    [found] = device_process.run(blocks_inside_units)
    assert found == [[], []]


def refused_on(_: Any) -> str:
    config = {"offload": {"activations": "host"}}
    with pytest.raises(ConfigError) as caught:
        Crew(1, register()).run(lambda world: shardwise.initialize(nn.Linear(2, 2), config, world=world))
    return str(caught.value)


def test_a_model_without_blocks_is_refused(device_process: RankPool) -> None:
    [text] = device_process.run(refused_on)
    assert text.startswith("offload.activations: host, but the model's blocks are not found")


# Blocks on the host -------------------------------------------------------------------------------------------------

ROWS, WIDTH, INNER = 3, 4, 8
SAVED = ROWS * (WIDTH + INNER) * 8
"""Bytes of a block's input, and of what its relu returns, which the next layer saves too."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.inner = torch.empty(0)
        self.came: Callable[[Tensor], None] | None = lambda grad: None

    def forward(self, x: Tensor) -> Tensor:
        self.inner = torch.relu(self.up(x))
        out: Tensor = x + self.down(self.inner)
        if self.came is not None and out.requires_grad:
            out.register_hook(self.came)
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).double()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A loss on gradients: its backward pass goes through a backward pass."""
    x = x.clone().requires_grad_()
    [grad] = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    return grad.square().mean()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Two passes before one backward pass."""
    return (model(x) * model(2 * x)).mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@contextmanager
def wrapped(keeps_last: bool = True) -> Iterator[tuple[nn.Sequential, ActivationOffload]]:
    """Blocks on the host, whose copies are as late as a stream's."""
    with late_copies():
        model = blocks()
        activations = ActivationOffload(model, torch.device("cpu"), keeps_last)
        activations.wrap(list(model.named_children()))
        yield model, activations


def gradients(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Of two steps, added."""
    for _ in range(2):
        loss(model, batch()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("keeps_last", [True, False])
@pytest.mark.parametrize("loss", [mean_square, penalty, twice])
def test_gradients_of_passes(loss: Callable[[nn.Module, Tensor], Tensor], keeps_last: bool) -> None:
    wanted = gradients(blocks(), loss)
    with wrapped(keeps_last) as (model, activations):
        assert all(map(torch.equal, wanted, gradients(model, loss)))
        assert len(wanted) == 12 and activations.bytes.up > 0


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
def test_compiled_blocks() -> None:
    """What a compiled forward saves goes the same way."""
    wanted = gradients(blocks(), mean_square)
    with late_copies():
        model = blocks()
        for block in model:
            block.came, block.forward = None, torch.compile(block.forward, backend="aot_eager")
        activations = ActivationOffload(model, torch.device("cpu"), keeps_last=True)
        activations.wrap(list(model.named_children()))
        found = gradients(model, mean_square)
    assert all((one - other).norm() <= 1e-14 * other.norm() for one, other in zip(found, wanted, strict=True))
    assert activations.bytes.up == activations.bytes.down > 0


def test_bytes_come_one_block_ahead_and_no_weight_moves() -> None:
    with wrapped() as (model, activations):
        came: list[int] = []
        for block in model:
            block.came = lambda grad: came.append(activations.bytes.up)
        mean_square(model, batch()).backward()
        moved = activations.bytes
        moved.count()
        assert came == [0, SAVED, 2 * SAVED], "at the gradients of the outputs of blocks 2, 1 and 0"
        assert [moved.down, moved.up, moved.most, moved.held] == [2 * SAVED, 2 * SAVED, 2 * SAVED, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].inner.detach().add_(1),
        lambda model: model[2].inner.detach().add_(1),
        lambda model: model[1].down.weight.detach().add_(1),
    ],
)
def test_what_changed_since_is_refused(change: Callable[[nn.Module], Any]) -> None:
    """An activation that moved, one of the last block, and a weight."""
    with wrapped() as (model, _):
        loss = mean_square(model, batch())
        change(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_small_storages_and_others_checkpoints_stay() -> None:
    with wrapped() as (model, activations):
        with torch.autograd.graph.save_on_cpu():
            model(batch())
        with torch.no_grad():
            model(batch())
        with patch.object(module, "SMALL_BYTES", SAVED):
            model(batch())
        assert activations.bytes.down == 0
        model(batch())
        assert activations.bytes.down == 2 * SAVED
