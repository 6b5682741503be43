"""Every stage on every number of ranks equals one process with a plain torch loop.

One global batch of 12 sequences a step is cut into ranks × accumulation pieces. In the second step only 7 are left
and their targets are masked unevenly, so that the pieces weigh differently and some rank has nothing at all. The soak
takes a third step.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.flights import DONE
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.step import end as step_module
from shardwise.engine.step.end import StepTotals
from shardwise.parallel.zero.gradient import Gradient
from shardwise.parallel.zero.weight import Weight
from tests.engine.conformance import Conformance
from tests.engine.nets import PREFETCH_BYTES, VOCABULARY, Language, seeded
from tests.engine.plain import Truth, once, train, worst
from tests.everyday import chosen

SEQUENCES = 12
CONTEXT = 5
CLIP = 0.5
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    "sgd": {"type": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}


class Case(NamedTuple):
    """One row of the table."""

    stage: int
    replicate: int
    accumulation: int
    optimizer: str
    precision: str
    transport: str = "auto"
    reduce: str = "auto"
    ahead: int = 0
    """Units whose gradients still travel; the place in PREFETCH_BYTES of what is gathered ahead."""
    hosts: int = 1
    """Hosts on which the ranks pretend to lie."""
    exchange: str = "auto"

    def __str__(self) -> str:
        more = [f"replicate{self.replicate}"] * (self.replicate > 1) + [self.transport] * (
            self.transport != "auto"
        )
        more += [self.reduce] * (self.reduce != "auto") + [f"ahead{self.ahead}"] * (self.ahead > 0)
        more += [f"hosts{self.hosts}"] * (self.hosts > 1) + [self.exchange] * (self.exchange != "auto")
        return "-".join([f"zero{self.stage}", f"x{self.accumulation}", self.optimizer, self.precision, *more])


class Figures(NamedTuple):
    """Largest errors over all steps; of the weights after the last one, to which every step before has led."""

    gradients: float
    norm: float
    weights: float
    loss: float
    departures: float
    """Steps in which a rank did not do what the Plan has."""


def on_two_hosts() -> list[Case]:
    """Return the rows of four ranks that pretend to lie on two hosts."""
    table = [Case(0, 1, 1, "adamw", "fp64", hosts=2)]
    table += [
        Case(stage, 1, accumulation, "adamw", "fp64", hosts=2)
        for stage, accumulation in ((1, 1), (2, 3), (3, 3))
    ]
    table += [Case(3, 1, 3, "adamw", "fp64", "torch", ahead=1, hosts=2)]
    return table + [Case(2, 1, 3, "adamw", "fp64", hosts=2, exchange=way) for way in ("sum", "all_to_all")]


def cases(size: int, every: bool = False) -> list[Case]:
    """Return the table for ``size`` ranks.

    It has each two of layout, accumulation, optimizer, precision and transport, or ``every`` combination, which the
    soak runs. Four ranks have copies and hosts beside these, and leave to two ranks what needs neither.
    """
    if size == 4 and not every:
        ways = ((1, "sgd", "auto"), (3, "adamw", "torch"))
        table = [Case(stage, 2, count, rule, "fp64", way) for stage in range(4) for count, rule, way in ways]
        table += [Case(2, 2, 3, "adamw", "fp64", "torch", ahead=1), *on_two_hosts()]
        return sorted(table, key=lambda case: case.transport)
    if size == 3:  # not a power of two: 12 sequences in 3 × 2 pieces
        table = [
            Case(stage, 1, accumulation, "adamw", "fp64") for stage in range(4) for accumulation in (1, 2)
        ]
        # Two ranks on the first host and one on the second.
        return table + [Case(stage, 1, 1, "adamw", "fp64", hosts=2) for stage in (0, 3)]
    layouts = [(stage, 1) for stage in range(4)] + [(stage, 2) for stage in range(4) if size == 4]
    table = []
    for stage, replicate in layouts:
        odd = (stage + replicate) % 2 == 1
        table += [
            Case(stage, replicate, accumulation, optimizer, "fp64")
            for accumulation, optimizer in product((1, 3), ("adamw", "sgd"))
            if every or odd == ((accumulation == 1) == (optimizer == "sgd"))
        ]
        table += [
            Case(stage, replicate, accumulation, "sgd", "fp32")
            for accumulation in (1, 3)
            if every or odd == (accumulation == 3)
        ]
        if size > 1:
            table += [Case(stage, replicate, 3, "adamw", "fp64", "torch")] * (every or odd)
            table += [Case(stage, replicate, 3, "sgd", "fp32", "torch")] * (every or not odd)
    if size > 1:
        table += [Case(stage, 1, 3, "adamw", "fp64", reduce="step") for stage in (2, 3)]
        table += [Case(3, 1, 3, "adamw", "fp64", "torch", ahead=ahead) for ahead in (1, 2)]
        table += [Case(2, size // 2 if size > 2 else 1, 3, "adamw", "fp64", "torch", ahead=1)]
        table += [Case(1, 1, 1, "adamw", "fp64", ahead=1)]
    if size == 4:
        table += on_two_hosts()
    return sorted(table, key=lambda case: case.transport)


def data(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the global batch: [12, 5] each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    if step == 1:
        targets[7:] = -100
        targets[1, 2:] = -100
        targets[4, :4] = -100
    return tokens, targets


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def torch_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    options = {key: value for key, value in OPTIMIZERS[name].items() if key != "type"}
    cls = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
    return cls(model.parameters(), **options)


@once
def truth(optimizer: str, precision: str) -> list[Truth]:
    """The plain loop, sequence by sequence, so that the addends are known."""
    model = seeded(Language, dtype=DTYPES[precision])
    steps = []
    for step in range(3):
        tokens, targets = data(step)
        counts = (targets != -100).sum(dim=1).tolist()
        steps.append(
            [((tokens[i : i + 1], targets[i : i + 1]), counts[i]) for i in range(SEQUENCES) if counts[i]]
        )
    return train(model, torch_optimizer(optimizer, model), steps, loss_of, CLIP)


def engine_of(world: Any, case: Case) -> Any:
    hosts = tuple(rank * case.hosts // world.size for rank in range(world.size))
    with patch.object(world, "hosts", hosts):
        engine = shardwise.initialize(
            seeded(Language, dtype=DTYPES[case.precision]),
            {
                "zero": {
                    "stage": case.stage,
                    "reduce": case.reduce,
                    "prefetch_bytes": PREFETCH_BYTES[case.ahead],
                    "reductions_under_way": case.ahead,
                    "exchange": case.exchange,
                },
                "mesh": {"dp": {"replicate": case.replicate, "shard": world.size // case.replicate}},
                "batch": {"accumulation": case.accumulation},
                "optimizer": OPTIMIZERS[case.optimizer],
                "max_grad_norm": CLIP,
                "comm": {"transport": case.transport, "timeout_s": 20.0},
            },
            world=world,
        )
    has_levels = engine._parts.groups["dp_shard"].levels is not None
    is_even = world.size % case.hosts == 0
    assert has_levels == (case.hosts > 1 and case.exchange == "auto" and is_even and case.stage > 0)
    return engine


def measure(world: Any, case: Case, steps: int = 2) -> Figures:
    """Train on this rank's pieces and compare."""
    engine = engine_of(world, case)
    figures, conformance = Figures(0.0, 0.0, 0.0, 0.0, 0.0), Conformance(engine)
    share = SEQUENCES // (world.size * case.accumulation)
    for step, wanted in enumerate(truth(case.optimizer, case.precision)[:steps]):
        tokens, targets = data(step)
        for microbatch in range(case.accumulation):
            first = (microbatch * world.size + world.rank) * share
            piece = tokens[first : first + share], targets[first : first + share]
            weight = int((piece[1] != -100).sum())
            loss = engine(piece if weight else (tokens[:1], targets[:1]))
            engine.backward(loss, weight=weight)
            if microbatch == case.accumulation - 1:
                gradients = engine.gradients()
            result = engine.step()
        assert result is not None and not result.skipped
        figures = Figures(
            max(figures.gradients, worst(gradients, wanted.gradients, wanted.addends)),
            max(figures.norm, abs(result.grad_norm - wanted.norm) / wanted.norm),
            0.0,
            max(figures.loss, abs(result.loss - wanted.loss) / wanted.loss),
            0.0,
        )
    weights = engine.state_dict()
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    del weights["head.weight"]
    engine.close()
    return figures._replace(
        weights=worst(weights, wanted.weights), departures=float(len(conformance.departures))
    )


def measure_all(world: Any, table: list[Case]) -> list[Figures]:
    return [measure(world, case) for case in table]


@pytest.fixture(scope="module")
def measured(ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Figures of the cases of this run, worst over the ranks; one call per number of ranks."""
    rows = chosen(request, "test_equals_one_process", "size", "case")

    @cache
    def get(size: int) -> dict[Case, Figures]:
        table = [case for ranks_of_case, case in rows if ranks_of_case == size]
        by_rank = ranks(size).run(measure_all, table, timeout_s=250.0)
        return {
            case: Figures(*(max(column) for column in zip(*rows, strict=True)))
            for case, *rows in zip(table, *by_rank, strict=True)
        }

    return get


@pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size in (1, 2, 3, 4) for case in cases(size)], ids=str
)
def test_equals_one_process(measured: Any, size: int, case: Case) -> None:
    figures = measured(size)[case]
    limit = 1e-10 if case.precision == "fp64" else 2e-6
    assert max(figures) <= limit, figures


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "case"),
    [(size, case) for size in (1, 2, 4) for case in cases(size, True) if case not in cases(size)],
    ids=str,
)
def test_every_case_equals_one_process(ranks: Any, size: int, case: Case) -> None:
    for figures in ranks(size).run(measure, case, 3):
        assert max(figures) <= (1e-10 if case.precision == "fp64" else 2e-6), figures


# Bugs put in on purpose: the figures must show them ------------------------------------------------------------------


def loses_an_addend(gradient: Gradient) -> None:
    """What one rank has to say about one block never arrives."""
    if gradient.what == "Unit blocks.1" and gradient._around.dp.index == 1 and gradient.staging is not None:
        gradient.staging.zero_()
    _reduce(gradient)


def gathers_what_is_stale(weight: Weight, beside: bool = False) -> Any:
    """The weights that were updated elsewhere never arrive."""
    return DONE if weight.what == "Unit blocks.1" else _gather_updated(weight, beside)


def counts_this_rank_alone(parts: EngineParts, local: Sequence[float], *squares: Any) -> StepTotals:
    """The sum over the ranks is divided by one rank's weight."""
    return _exchange(parts, local, *squares)._replace(weight=local[0])


def scaled_again_by_odd_ranks(parts: EngineParts, local: Any, *squares: Any) -> StepTotals:
    """Gradients are scaled once more by the number of ranks where it is odd."""
    totals = _exchange(parts, local, *squares)
    ranks = parts.dp.size
    return (
        totals._replace(squares=totals.squares * ranks**2, weight=totals.weight / ranks)
        if ranks % 2
        else totals
    )


_reduce, _gather_updated, _exchange = Gradient.reduce, Weight.gather_updated, step_module.exchange
BUGS: dict[str, tuple[Any, str, Any, int, int]] = {
    "an addend is lost": (Gradient, "reduce", loses_an_addend, 1, 2),
    "updated weights are not gathered": (Weight, "gather_updated", gathers_what_is_stale, 2, 2),
    "divided by the local weight": (step_module, "exchange", counts_this_rank_alone, 3, 2),
    "scaled by an odd number of ranks": (step_module, "exchange", scaled_again_by_odd_ranks, 0, 3),
}


def measure_with(world: Any, bug: str) -> Figures:
    place, name, wrong, stage, _ = BUGS[bug]
    with patch.object(place, name, wrong):
        return measure(world, Case(stage, 1, 1, "sgd", "fp64", "torch"))


@pytest.mark.parametrize("bug", BUGS)
def test_figures_show_a_bug(ranks: Any, bug: str) -> None:
    figures = [max(figures) for figures in ranks(BUGS[bug][-1]).run(measure_with, bug)]
    assert max(figures) > 1e-6, figures
