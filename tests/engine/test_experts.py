"""Experts on several ranks equal one process with a plain torch loop: alone, and with all else that cuts a model.

One global batch of 8 sequences a step is cut into data-parallel ranks × microbatches, unevenly where they do not
divide. In the last step targets are masked unevenly.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import MixtureOfExperts, RouterPolicy
from shardwise.base.errors import MeshError, PlanError
from shardwise.checkpoint import verify
from shardwise.comm.world import join
from shardwise.compose.spec import AxisPlacement
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.expert.experts import Experts
from shardwise.parallel.expert.surroundings import RoutedTokens
from shardwise.parallel.zero.gradient import Gradient, GradientState
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.mesh import DENSE, EXPERT
from shardwise.plan.placement import ContiguousRun
from shardwise.plan.registry import TensorInfo
from shardwise.plan.slices import TensorSlices
from tests.engine.conformance import Conformance, evaluation_departures
from tests.engine.nets import Language, seeded
from tests.engine.plain import Truth, once, train, worst
from tests.engine.step.test_check import looking
from tests.everyday import chosen

SEQUENCES, CONTEXT, VOCABULARY, WIDTH, HIDDEN, EXPERTS = 8, 6, 13, 8, 4, 4
OPTIMIZER = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CLIP = 0.5


class Mixture(Gpt):
    """A small LLaMA whose feed-forward layers are mixtures of experts: with and without drops, shared experts and a
    residual branch."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(
            GptPolicy(layers=4, width=WIDTH, heads=2, context=CONTEXT, vocab=VOCABULARY, hidden=8)
        )
        kinds: list[dict[str, Any]] = [
            {},
            {"router": RouterPolicy(capacity=1.0), "shared": 1},
            {"residual": True},
            {"router": RouterPolicy(top_k=1, capacity=1.0, drop="position", min_capacity=1)},
        ]
        for block, kind in zip(self.blocks, kinds, strict=True):
            block.mlp = MixtureOfExperts(WIDTH, HIDDEN, experts, **kind)

    def tensor_table(self) -> dict[str, str]:
        return {name: words for name, words in super().tensor_table().items() if ".mlp." not in name}


class Layout(NamedTuple):
    """One row of the table."""

    pp: int = 1
    replicate: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    stage: int = 0
    microbatches: int = 1
    virtual_stages: int = 1
    sequence: bool = True
    recompute: str = "none"
    rows: int | None = None
    hosts: int = 1
    """That the ranks pretend to be on."""
    told: bool = True
    """Whether the engine knows which backward pass is the last of its step."""
    exchange: str = "counted"
    ahead: bool = False
    """Whether all weights are gathered ahead, as on a device."""
    cp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.replicate * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        default = Layout()._asdict()
        said = [f"{key}{value}" for key, value in self._asdict().items() if value != default[key]]
        return "-".join(said) or "one"


class Figures(NamedTuple):
    """Largest errors over three steps."""

    gradients: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    loss: float = 0.0
    departures: float = 0.0
    """Steps in which a rank did not do what the Plan has."""


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    if step == 2:
        targets[6:] = -100
        targets[1, 2:] = -100
    return tokens, targets


@once
def truth() -> list[Truth]:
    """The plain loop, sequence by sequence, so that the addends are known."""
    model = seeded(Mixture)
    steps = []
    for step in range(3):
        tokens, targets = data(step)
        counts = (targets != -100).sum(dim=1).tolist()
        steps.append([((tokens[i : i + 1], targets[i : i + 1]), n) for i, n in enumerate(counts) if n])
    options = {key: value for key, value in OPTIMIZER.items() if key != "type"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return train(model, optimizer, steps, lambda model, batch: model(*batch), CLIP)


def config_of(layout: Layout) -> dict[str, Any]:
    return {
        "mesh": {
            "pp": layout.pp,
            "dp": {"replicate": layout.replicate, "shard": layout.dp},
            "cp": layout.cp,
            "tp": layout.tp,
            "ep": layout.ep,
            "etp": layout.etp,
        },
        "zero": {"stage": layout.stage, "prefetch_bytes": layout.ahead << 26},
        "tensor": {"sequence_parallel": layout.sequence},
        "pipeline": {
            "schedule": "interleaved_1f1b" if layout.virtual_stages > 1 else "1f1b",
            "virtual_stages": layout.virtual_stages,
            "partition": "uniform",
        },
        "recompute": layout.recompute,
        "experts": {"rows": layout.rows, "exchange": layout.exchange},
        "batch": {"accumulation": layout.microbatches},
        "optimizer": OPTIMIZER,
        "max_grad_norm": CLIP,
        "comm": {"timeout_s": 20.0},
    }


def pieces(layout: Layout, dp_index: int, step: int) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """This rank's microbatches and their numbers of targets."""
    ranks = layout.replicate * layout.dp
    parts = layout.microbatches * ranks
    tokens, targets = (torch.tensor_split(each, parts) for each in data(step))
    mine = range(dp_index, parts, ranks)
    return [(tokens[i], targets[i]) for i in mine], [float((targets[i] != -100).sum()) for i in mine]


def measure(world: Any, layout: Layout, check: str = "auto") -> Figures:
    """Train three steps and compare."""
    config = {**config_of(layout), "check_first_step": check}
    hosts = tuple(rank * layout.hosts // layout.size for rank in range(layout.size))
    with patch.object(world, "hosts", hosts):
        engine = shardwise.initialize(seeded(Mixture), config, world=world)
    training, step_of = engine._training, engine._training.step
    found: dict[str, Tensor] = {}

    def with_gradients(weight: float | None = None) -> Any:
        if engine._parts.accumulation.is_complete:
            found.clear()
            found.update(engine.gradients())
        return step_of(weight)

    training.step = with_gradients  # type: ignore[method-assign]
    figures, conformance = Figures(), Conformance(engine)
    for step, wanted in enumerate(truth()):
        batches, weights = pieces(layout, engine.dp_index, step)
        result = engine.train_step(batches, weights) if layout.told else untold(engine, batches, weights)
        state = engine.state_dict()
        now = Figures(
            worst(found, wanted.gradients, wanted.addends),
            abs(result.grad_norm / wanted.norm - 1),
            worst({name: state[name] for name in wanted.weights}, wanted.weights),
            abs(result.loss / wanted.loss - 1),
        )
        figures = Figures(*map(max, figures, now))
    if layout.hosts > 1:
        assert all(
            len(cut.forward._dispatcher.levels) == 2
            for cut in engine.module.modules()
            if type(cut) is Experts
        )
        assert all(0 < tally.rows_crossed < tally.rows_sent for tally in engine.expert_tallies().values())
    departures = conformance.departures * layout.told + evaluation_departures(engine, list(batches[:2]))
    engine.close()
    return figures._replace(departures=float(len(departures)))


def untold(engine: Any, batches: list[Any], weights: list[float]) -> Any:
    """A step of which nobody says, until its last backward pass has run, that it was the last."""
    for batch, weight in zip(batches, weights, strict=True):
        engine.set_boundary(False)
        engine.backward(engine(*batch), weight)
        engine.set_boundary(batch is batches[-1])
        result = engine.step()
    return result


def measure_all(world: Any, layouts: list[Layout]) -> list[Figures]:
    return [measure(world, layout) for layout in layouts]


PAIRS = [
    Layout(dp=2, ep=2, stage=3, recompute="full"),
    Layout(dp=2, ep=2, stage=1, microbatches=2, rows=13),
    Layout(dp=2, stage=3, rows=9, recompute="full"),
    Layout(tp=2, ep=2, sequence=False, recompute="selective"),
    Layout(tp=2, etp=2, microbatches=2),
    Layout(replicate=2, dp=2, ep=2, stage=2, microbatches=2, told=False),
    Layout(tp=2, stage=2, microbatches=2, told=False),
    Layout(dp=2, tp=2, ep=4, sequence=False, recompute="full", rows=11, hosts=2),
    Layout(dp=2, tp=2, ep=2, etp=2, stage=2, rows=20),
    Layout(pp=2, dp=2, ep=2, stage=3, microbatches=3),
    Layout(pp=2, tp=2, ep=2, microbatches=2, virtual_stages=2, recompute="full"),
    Layout(dp=4, ep=4, stage=3, microbatches=2, hosts=2, exchange="blocks"),
    # Sequences of 6 tokens: over 2 ranks with padding, over 3 without.
    Layout(cp=2, ep=2, stage=3, recompute="full"),
    Layout(cp=2, microbatches=2, rows=9),
    Layout(cp=3, stage=1, microbatches=2),
    Layout(cp=2, tp=2, ep=4, stage=2, exchange="blocks"),
    Layout(cp=2, pp=2, ep=2, microbatches=3),
]
"""Every axis with every other one, ZeRO at each stage, both sequence modes."""
EVERY = [
    Layout(dp=2, tp=2, ep=2, stage=3, recompute="full", ahead=True),
    Layout(dp=4, ep=4, stage=3, microbatches=2, hosts=2),
    Layout(dp=2, tp=2, ep=2, stage=3, microbatches=2, recompute="full"),
    Layout(dp=2, tp=2, ep=4, stage=1, sequence=False),
    Layout(cp=2, tp=2, ep=2, sequence=False, microbatches=2),
    Layout(dp=2, ep=2, stage=3, recompute="full", exchange="blocks"),
    Layout(dp=2, stage=3, recompute="full", exchange="blocks"),
    Layout(pp=2, tp=2, ep=2, microbatches=2, virtual_stages=2, recompute="full", exchange="blocks"),
    Layout(dp=2, tp=2, ep=2, etp=2, stage=2, microbatches=2, recompute="selective", exchange="blocks"),
    Layout(dp=4, ep=4, stage=1, microbatches=2, hosts=2, told=False, exchange="blocks"),
    Layout(dp=4, ep=2, stage=2, microbatches=2, recompute="selective", rows=8),
    *(
        Layout(dp=4, ep=ep, stage=stage, microbatches=m)
        for ep, stage, m in product((1, 2, 4), range(4), (1, 2))
    ),
    *(
        Layout(dp=2, tp=2, ep=ep, etp=etp, stage=stage, sequence=sequence, microbatches=2)
        for (ep, etp), stage, sequence in product(
            ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)), range(4), (True, False)
        )
    ),
    *(
        Layout(replicate=2, dp=2, ep=ep, etp=etp, stage=stage, recompute=how)
        for (ep, etp), stage, how in product(((2, 1), (1, 2)), (1, 3), ("full", "selective"))
    ),
    *(
        Layout(pp=2, dp=dp, tp=tp, ep=2, stage=stage, microbatches=2, virtual_stages=virtual, recompute=how)
        for (dp, tp), stage, virtual, how in product(
            ((1, 2), (2, 1)), (0, 2, 3), (1, 2), ("none", "full", "selective")
        )
    ),
    Layout(pp=2, dp=2, tp=2, ep=2, etp=2, stage=3, microbatches=3, recompute="full"),
    Layout(pp=2, replicate=2, dp=2, ep=2, stage=3, microbatches=2, virtual_stages=2),
]


@pytest.fixture(scope="module")
def measured(ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Figures of the layouts of this run, worst over the ranks; one call per number of ranks."""
    layouts = [layout for (layout,) in chosen(request, "test_equals_one_process", "layout")]

    @cache
    def get(size: int) -> dict[Layout, Figures]:
        table = [layout for layout in layouts if layout.size == size]
        by_rank = ranks(size).run(measure_all, table)
        return {
            layout: Figures(*(max(column) for column in zip(*rows, strict=True)))
            for layout, *rows in zip(table, *by_rank, strict=True)
        }

    return get


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_equals_one_process(measured: Any, layout: Layout) -> None:
    figures = measured(layout.size)[layout]
    assert max(figures) <= 1e-10, figures


# Planted bugs ------------------------------------------------------------------------------------------------------


def summed_once_more() -> Any:
    """The gradient of an expert, the sum over all tokens already, times the ranks that share the experts."""
    right = Gradient.finish_reduce

    def wrong(self: Gradient) -> None:
        was_reduced = self.state is GradientState.REDUCED
        right(self)
        if was_reduced and self.layout.key.axes == EXPERT:
            self.owned.mul_(2)

    return patch.object(Gradient, "finish_reduce", wrong)


def experts_left_out_of_the_norm() -> Any:
    """Those of other ranks along "tp" than the first."""
    right = TensorSlices.is_first

    def wrong(self: TensorSlices, info: TensorInfo, run: ContiguousRun) -> bool:
        return right(self, info, run) and (info.axes == DENSE or self.mesh.index("tp", self.rank) == 0)

    return patch.object(TensorSlices, "is_first", wrong)


def router_not_summed() -> Any:
    """Each rank along "tp" keeps what its own tokens say of the router."""
    return patch(
        "shardwise.compose.describe.AxisPlacement", lambda place, gradient: AxisPlacement(place, place)
    )


def dense_strategy_for_all() -> Any:
    """Dense gradients stay cut and were reduced with their microbatch, so nobody reduces those of experts, which do
    not."""
    return patch.object(UnitWindows, "not_reduced", property(lambda self: set()))


def padding_has_experts() -> Any:
    """Padding of context parallelism counts in balances and takes room."""
    return patch.object(RoutedTokens, "counted", None)


BUGS = [
    (Layout(cp=2), padding_has_experts, "gradients"),
    (Layout(dp=2, ep=2), summed_once_more, "gradients"),
    (Layout(tp=2, ep=2), experts_left_out_of_the_norm, "norm"),
    (Layout(tp=2, ep=2), router_not_summed, "gradients"),
    (Layout(replicate=2, dp=2, ep=2, stage=2, told=False), dense_strategy_for_all, "gradients"),
]


def with_bug(world: Any, layout: Layout, plant: Callable[[], Any]) -> Figures:
    with plant():
        return measure(world, layout, "off")  # which sees some of them itself


@pytest.mark.parametrize(("layout", "plant", "shows"), BUGS, ids=[bug[1].__name__ for bug in BUGS])
def test_planted_bugs_are_seen(ranks: Any, layout: Layout, plant: Callable[[], Any], shows: str) -> None:
    assert max(getattr(figures, shows) for figures in ranks(layout.size).run(with_bug, layout, plant)) > 1e-6


def checked(world: Any, plant: Callable[[], Any]) -> tuple[str, list[str]]:
    """What a first step is refused for, and what the check found where it compared."""
    layout = Layout(dp=2, ep=2, stage=3)
    with plant(), looking() as seen:
        engine = shardwise.initialize(seeded(Mixture), config_of(layout), world=world)
        try:
            engine.train_step(*pieces(layout, engine.dp_index, 0))
            return "", seen.compared
        except PlanError as error:
            return str(error), seen.compared
        finally:
            engine.close()


@pytest.mark.parametrize("plant", [nullcontext, summed_once_more])
def test_the_first_step_is_compared_where_ep_alone_cuts(ranks: Any, plant: Callable[[], Any]) -> None:
    for refused, found in ranks(2).run(checked, plant):
        assert len(found) == 1
        if plant is nullcontext:
            assert (refused, found) == ("", [""])
        else:
            assert refused.startswith(
                "check: the model cut by mesh.ep: 2 does not compute what the uncut one does"
            )
            assert "blocks.0.mlp.experts.gate_up by 1" in refused


# Checkpoints -------------------------------------------------------------------------------------------------------


def visit(world: Any, layout: Layout, folder: str, number: int, steps: int) -> dict[str, list[float]]:
    """Load step ``number``, where it is one, train, save as the next; the weights."""
    engine = shardwise.initialize(
        seeded(Mixture, dtype=torch.float32), {**config_of(layout), "precision": "bf16"}, world=world
    )
    if number:
        engine.load(f"{folder}/{number}")
    for step in range(steps):
        engine.train_step(*pieces(layout, engine.dp_index, step))
    engine.save(f"{folder}/{number + 1}", asynchronous=False)
    weights = {name: tensor.double().flatten().tolist() for name, tensor in engine.state_dict().items()}
    engine.close()
    return weights


def test_no_bit_changes_from_layout_to_layout(ranks: Any, tmp_path: Path) -> None:
    """ep 4 with ZeRO-3 -> one rank -> ep 2 with ZeRO-1: weights, masters and moments."""
    folder = str(tmp_path)
    trained = ranks(4).run(visit, Layout(dp=4, ep=4, stage=3), folder, 0, 2)
    alone = visit(join(quiet=True), Layout(), folder, 1, 0)
    again = ranks(2).run(visit, Layout(dp=2, ep=2, stage=1), folder, 2, 0)
    assert all(weights == alone for weights in (*trained, *again))
    steps = [next((tmp_path / str(number)).glob("step_*")) for number in (1, 2, 3)]
    assert not any(map(verify, steps))
    first, *others = [
        {path.name: path.read_bytes() for path in step.rglob("*.safetensors")} for step in steps
    ]
    assert first and all(first == other for other in others)


# Refusals ----------------------------------------------------------------------------------------------------------


def dropping(inside: str) -> Mixture:
    """Dropout by a function, as attributes tell of, or by a module."""
    model = seeded(Mixture)
    if inside == "experts":
        model.blocks[1].mlp.experts.activation_dropout = 0.1
    else:
        model.blocks[1].mlp.add_module("late", torch.nn.Dropout(0.2))
    return model


def refusals(world: Any) -> list[str]:
    with pytest.raises(PlanError, match="no router has a capacity"):
        made = seeded(Mixture)
        made.blocks = torch.nn.ModuleList([made.blocks[0]])
        shardwise.initialize(made, {"mesh": {"ep": 2}, "experts": {"exchange": "blocks"}}, world=world)
    found = []
    for make, mesh in (
        (lambda: seeded(Mixture, experts=3), {"ep": 2}),
        (lambda: seeded(Language), {"ep": 2}),
        (lambda: seeded(Mixture), {"ep": 4}),
        (lambda: dropping("experts"), {"ep": 2}),
        (lambda: dropping("mixture"), {"ep": 2}),
    ):
        with pytest.raises((PlanError, MeshError)) as caught:
            shardwise.initialize(make(), {"mesh": mesh}, world=world)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_cut_is_told_on_all_ranks(ranks: Any) -> None:
    one, other = ranks(2).run(refusals)
    assert one == other
    for text, says in zip(
        one,
        (
            "3 experts do not divide over mesh.ep=2",
            "has no experts",
            "ep=4 × etp=1 = 4 does not divide",
            "blocks.1.mlp.experts drops inside itself: Experts (activation_dropout=0.1)",
            "blocks.1.mlp drops inside itself: late (p=0.2). A mask would be drawn by rows",
        ),
        strict=True,
    ):
        assert says in text


@pytest.mark.soak
@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_every_layout_equals_one_process(ranks: Any, layout: Layout) -> None:
    for figures in ranks(layout.size).run(measure, layout):
        assert max(figures) <= 1e-10, figures


def beside_layers_of_unknown_form(world: Any) -> float:
    """Largest error of a gradient of a model that nobody has a table for."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, shared=1)
        )

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = seeded(make).double()
    loss(alone, x).backward()
    engine = shardwise.initialize(seeded(make).double(), {"mesh": {"tp": 2}}, loss=loss, world=world)
    engine.backward(engine(x))
    found = engine.gradients()
    engine.step()  # compares with the uncut model too
    engine.close()
    return worst(found, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})


def test_a_model_without_a_table_has_gradients_of_all_tokens(ranks: Any) -> None:
    """Rows of its other modules said that a router's gradient is whole on every rank."""
    assert max(ranks(2).run(beside_layers_of_unknown_form)) < 1e-12


def made_in_pieces(world: Any) -> float:
    """Largest difference of a weight that was made in pieces and then dealt to ranks of ep."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(MixtureOfExperts(WIDTH, HIDDEN, EXPERTS))

    with shardwise.sharded_init():
        model = seeded(make)
    config = {"mesh": {"dp": 2, "ep": 2}, "zero": {"stage": 3}}
    engine = shardwise.initialize(model, config, loss=lambda model, x: model(x).sum(), world=world)
    found = engine.state_dict()
    engine.close()
    return worst(found, dict(seeded(make).state_dict()))


def test_a_model_made_in_pieces_has_its_own_experts(ranks: Any) -> None:
    assert max(ranks(2).run(made_in_pieces)) == 0


def taken_again(world: Any) -> str:
    model = seeded(Mixture)
    shardwise.initialize(model, {"mesh": {"dp": 2, "ep": 2}}, world=world).close()
    try:
        shardwise.initialize(model, {"mesh": {"dp": 2, "ep": 2}}, world=world)
    except shardwise.base.errors.UsageError as error:
        return str(error)
    return ""


def test_a_model_whose_experts_were_cut_is_not_cut_again(ranks: Any) -> None:
    """Its routers know four experts, and its ranks have two each: it trained on without an error."""
    for said in ranks(2).run(taken_again):
        assert "was cut along tp, pp or ep by an engine before" in said


class Residual(torch.nn.Module):
    """A mixture with its residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(
            WIDTH, HIDDEN, EXPERTS, RouterPolicy(balance="loss", balance_weight=0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(x)


def in_a_list() -> shardwise.Layers:
    """Layers that are built where they live, and one that is built already."""
    layers = [
        shardwise.LayerSpec(torch.nn.Embedding, VOCABULARY, WIDTH),
        shardwise.LayerSpec(Residual),
        seeded(Residual),
        shardwise.LayerSpec(Residual),
        shardwise.LayerSpec(torch.nn.Linear, WIDTH, VOCABULARY),
    ]
    return shardwise.Layers(
        layers, lambda x, y: torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()), seed=3
    ).double()


def of_a_list(world: Any, mesh: dict[str, int]) -> tuple[dict[str, Tensor], int]:
    """Weights after two steps, one microbatch of two sequences after the other; elements of experts on this rank."""
    config = {"mesh": mesh, "optimizer": {"type": "sgd", "lr": 0.5}, "zero": {"stage": 1}}
    ranks = mesh.get("dp", 1)
    engine = shardwise.initialize(in_a_list(), config | {"batch": {"accumulation": 4 // ranks}}, world=world)
    for step in range(2):
        batches = list(zip(*(each.split(2) for each in data(step)), strict=True))
        engine.train_step(batches[engine.dp_index :: ranks])
    state = engine.state_dict()
    held = sum(unit.elements for unit in engine.plan.units if unit.name.endswith("experts"))
    engine.close()
    return state, held


def test_layers_of_a_list_are_cut_where_they_are_built(ranks: Any) -> None:
    alone, _ = of_a_list(join(quiet=True), {})
    found = ranks(4).run(of_a_list, {"pp": 2, "dp": 2, "ep": 2})
    assert all(worst(weights, alone) < 1e-10 for weights, _ in found)
    assert [held for _, held in found] == [n * EXPERTS // 2 * 3 * HIDDEN * WIDTH for n in (2, 2, 1, 1)]
