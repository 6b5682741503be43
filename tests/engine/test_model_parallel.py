"""Slices, stages, recomputation and ZeRO, alone and together, equal one process with a plain torch loop.

One global batch of 10 sequences a step is cut into data-parallel ranks × microbatches, unevenly where they do not
divide: shapes change from one microbatch to the next. In the second step the targets are masked unevenly. The soak
takes a third step.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.pipeline.policy import FOLDED, SPLIT
from tests.engine.conformance import Conformance, evaluation_departures
from tests.engine.plain import Truth, once, train, worst
from tests.everyday import chosen

SEQUENCES, CONTEXT, VOCABULARY = 10, 12, 19
CLIP = 0.5
MASKED = 1
"""The step whose targets are masked, in unlike numbers in the microbatches."""
OPTIMIZER = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Layout(NamedTuple):
    """One row of the table."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    microbatches: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence: bool = True
    recompute: str = "none"
    family: str = "llama"
    kv_heads: int = 4
    reshard_after_forward: bool = True
    transport: str = "auto"
    partition: str = "uniform"
    dropout: float = 0.0
    layers: int = 4
    heads: int = 4
    tile: int = 0
    """Tokens; 0: none."""
    overlap: int = 0
    """Pieces; 0: the configuration says nothing."""
    cp: int = 1
    context: str = "auto"
    """Method of context parallelism."""
    ulysses: int = 0
    """Ranks that exchange heads; 0: as the method has it."""
    replicate: int = 1
    """Copies of the cut state along dp (HSDP)."""
    seconds: str = ""
    """File by which "measured" stages are cut."""

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        default = Layout()._asdict()
        words = {"family": "", "transport": "", "context": ""}
        said = [
            f"{words.get(key, key)}{value}" for key, value in self._asdict().items() if value != default[key]
        ]
        return "-".join(said) or "one"


class Figures(NamedTuple):
    """Largest errors over all steps; of the weights after the last one, to which every step before has led."""

    gradients: float
    norm: float
    weights: float
    loss: float
    departures: float
    """Steps in which a rank did not do what the Plan has."""


def policy_of(layout: Layout) -> GptPolicy:
    kv_heads = min(layout.kv_heads, layout.heads) if layout.family == "llama" else None
    return GptPolicy(
        family=layout.family,  # type: ignore[arg-type]
        layers=layout.layers,
        width=4 * layout.heads,
        heads=layout.heads,
        kv_heads=kv_heads,
        context=CONTEXT,
        vocab=VOCABULARY,
        hidden=24,
        dropout=layout.dropout,
    )


def model_of(layout: Layout) -> Gpt:
    return Gpt(policy_of(layout)).to(torch.float64)


def data(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the global batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    targets = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
    if step == MASKED:
        targets[7:9] = -100
        targets[1, 2:] = -100
        targets[4, :4] = -100
    return tokens, targets


@once
def truth(family: str, kv_heads: int, layers: int, heads: int) -> list[Truth]:
    """The plain loop, sequence by sequence, so that the addends are known."""
    model = model_of(Layout(family=family, kv_heads=kv_heads, layers=layers, heads=heads))
    steps = []
    for step in range(3):
        tokens, targets = data(step)
        counts = (targets != -100).sum(dim=1).tolist()
        steps.append(
            [((tokens[i : i + 1], targets[i : i + 1]), counts[i]) for i in range(SEQUENCES) if counts[i]]
        )
    options = {key: value for key, value in OPTIMIZER.items() if key != "type"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    return train(model, optimizer, steps, lambda model, batch: model(*batch), CLIP)


def _dp_of(layout: Layout) -> Any:
    if layout.replicate == 1:
        return layout.dp
    return {"replicate": layout.replicate, "shard": layout.dp // layout.replicate}


def config_of(layout: Layout, check: str = "auto") -> dict[str, Any]:
    return {
        "mesh": {"pp": layout.pp, "dp": _dp_of(layout), "cp": layout.cp, "tp": layout.tp},
        "zero": {"stage": layout.stage, "reshard_after_forward": layout.reshard_after_forward},
        "tensor": {"sequence_parallel": layout.sequence, "overlap": layout.overlap or "auto"},
        "pipeline": {
            "schedule": layout.schedule,
            "virtual_stages": layout.virtual_stages,
            "partition": layout.partition,
            **({"seconds": layout.seconds} if layout.seconds else {}),
        },
        "context": {"method": layout.context, "ulysses": layout.ulysses or None},
        "recompute": layout.recompute,
        "tiles": {"logits": layout.tile or "off", "mlp": layout.tile or "off"},
        "check_first_step": check,
        "batch": {"accumulation": layout.microbatches},
        "optimizer": OPTIMIZER,
        "max_grad_norm": CLIP,
        "comm": {"transport": layout.transport, "timeout_s": 20.0},
    }


def pieces(layout: Layout, dp_index: int, step: int) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """This rank's microbatches and their numbers of targets."""
    parts = layout.microbatches * layout.dp
    tokens, targets = (torch.tensor_split(each, parts) for each in data(step))
    mine = range(dp_index, parts, layout.dp)
    return [(tokens[i], targets[i]) for i in mine], [float((targets[i] != -100).sum()) for i in mine]


def measure(world: Any, layout: Layout, check: str = "auto", steps: int = 2) -> Figures:
    """Train and compare."""
    engine = shardwise.initialize(model_of(layout), config_of(layout, check), world=world)
    found: dict[str, Tensor] = {}
    engine_step = engine._training.step

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete:
            found.clear()
            found.update(engine.gradients())
        return engine_step()

    engine._training.step = with_gradients  # type: ignore[method-assign]
    figures, conformance = Figures(0.0, 0.0, 0.0, 0.0, 0.0), Conformance(engine)
    dp_index = engine.dp_index
    wanted_steps = truth(layout.family, layout.kv_heads, layout.layers, layout.heads)[:steps]
    for step, wanted in enumerate(wanted_steps):
        batches, weights = pieces(layout, dp_index, step)
        result = engine.train_step(batches, weights)
        assert not result.skipped
        figures = Figures(
            max(figures.gradients, worst(found, wanted.gradients, wanted.addends)),
            max(figures.norm, abs(result.grad_norm / wanted.norm - 1)),
            0.0,
            max(figures.loss, abs(result.loss / wanted.loss - 1)),
            0.0,
        )
    state = engine.state_dict()
    weights = worst({name: state[name] for name in wanted.weights}, wanted.weights)
    departures = conformance.departures + evaluation_departures(engine, list(batches[:2]))
    engine.close()
    return figures._replace(weights=weights, departures=float(len(departures)))


def measure_all(world: Any, layouts: list[Layout]) -> list[Figures]:
    return [measure(world, layout) for layout in layouts]


FAMILIES = (("llama", 4), ("llama", 2), ("gpt2", 4))
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
MICROBATCHES = (1, 2, 3, 5, 8)


METHODS = ("planned", "ring", "ulysses")
WAYS = (
    *((cp, method, 0) for cp in (2, 3, 4) for method in METHODS),
    (4, "planned", 2),
    (4, "ring", 2),
)
"""Ranks along cp, method, and ranks that exchange heads."""


def scheduled(pp: int, schedule: str, microbatches: int) -> Layout:
    if schedule in FOLDED:
        return Layout(pp=pp, microbatches=microbatches, schedule=schedule, layers=2 * pp)
    if schedule != "interleaved_1f1b":
        return Layout(pp=pp, microbatches=microbatches, schedule=schedule)
    return Layout(pp=pp, microbatches=microbatches, schedule=schedule, virtual_stages=2, layers=2 * pp)


LAYOUTS = [
    Layout(),
    Layout(tile=7, family="gpt2"),
    # Slices of matrices and of sequences.
    Layout(tp=2),
    Layout(tp=2, sequence=False, kv_heads=2),
    Layout(tp=2, tile=7, sequence=False, family="gpt2"),
    # Pieces of samples, of tokens that they do not divide, and of a whole sequence.
    Layout(tp=2, overlap=7, microbatches=2, recompute="full", family="gpt2"),
    Layout(tp=2, overlap=4, microbatches=3, sequence=False, transport="torch"),
    Layout(tp=3, heads=6, kv_heads=1, sequence=False),
    Layout(tp=4, kv_heads=1, recompute="full"),
    # Stages.
    scheduled(2, "interleaved_1f1b", 5),
    scheduled(2, "gpipe", 8),
    scheduled(3, "1f1b", 2),
    Layout(pp=2, microbatches=3, recompute="selective", family="gpt2", partition="parameters"),
    Layout(pp=2, tile=5, microbatches=3, family="gpt2"),
    # ZeRO.
    Layout(dp=2, stage=0, microbatches=2, recompute="full"),
    Layout(dp=2, stage=1, microbatches=2, recompute="selective"),
    Layout(dp=2, stage=2, microbatches=2, recompute="full"),
    Layout(dp=2, tile=1, microbatches=2, stage=3, recompute="full"),
    # Several of these at a time.
    Layout(dp=2, tp=2, overlap=5, microbatches=2, stage=3, recompute="selective", kv_heads=1),
    Layout(pp=2, tp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, kv_heads=1),
    Layout(
        pp=2, dp=2, stage=3, microbatches=4, schedule="interleaved_1f1b", virtual_stages=2, recompute="full"
    ),
    Layout(
        2, 2, 2, microbatches=2, stage=3, schedule="interleaved_1f1b", virtual_stages=2, recompute="selective"
    ),
    # Sequences of 12 tokens in parts that are contiguous, zigzag, padded.
    Layout(cp=2, family="gpt2", microbatches=3),
    Layout(cp=2, tile=5),
    Layout(cp=3, context="ring", kv_heads=1, stage=2, microbatches=3),
    Layout(cp=2, tp=2, context="ring", sequence=False, recompute="full"),
    Layout(cp=2, pp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, recompute="full"),
    # Heads that do not divide: 2, 2, 1 and 1 of 6, whose key heads some ranks share.
    Layout(cp=4, context="ulysses", heads=6, kv_heads=2, stage=3, recompute="selective"),
    Layout(cp=2, dp=2, replicate=2, stage=3, microbatches=2, context="planned"),
    # Stages in a V, with ties between the first and the last, and backward passes in two parts.
    Layout(pp=2, microbatches=1, schedule="dualpipe_v", family="gpt2"),
    Layout(pp=2, microbatches=3, schedule="zb_v"),
    Layout(pp=2, dp=2, stage=3, microbatches=3, schedule="zb_h1", reshard_after_forward=False),
]
"""Every value of every axis, and each technique beside the one that it shares the most with."""
PAIRS = [
    *(Layout(family=family, kv_heads=kv_heads) for family, kv_heads in FAMILIES),
    *(
        Layout(tp=2, sequence=sequence, family=family, kv_heads=kv_heads)
        for sequence in (True, False)
        for family, kv_heads in FAMILIES
    ),
    Layout(tp=3, heads=6, kv_heads=1, sequence=False),
    Layout(tp=3, heads=6, kv_heads=6, sequence=False, family="gpt2"),
    Layout(tp=4, kv_heads=1, recompute="full"),
    *(
        scheduled(pp, SCHEDULES[(pp + place) % 3], microbatches)
        for pp in (2, 3, 4)
        for place, microbatches in enumerate(MICROBATCHES)
        if pp < 4 or microbatches in (2, 5)
    ),
    Layout(pp=2, microbatches=5),
    *(
        Layout(dp=2, stage=stage, microbatches=2, recompute=how)
        for stage, how in ((0, "full"), (1, "selective"), (2, "full"), (3, "full"), (3, "selective"))
    ),
    *(Layout(pp=2, dp=2, stage=stage, microbatches=3) for stage in (0, 3)),
    *(Layout(dp=2, tp=2, stage=stage, microbatches=2) for stage in (2, 3)),
    *(Layout(pp=2, tp=2, microbatches=3, sequence=sequence) for sequence in (True, False)),
    Layout(
        pp=2, dp=2, stage=3, microbatches=4, schedule="interleaved_1f1b", virtual_stages=2, recompute="full"
    ),
    Layout(pp=2, tp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, kv_heads=1),
    Layout(pp=2, tp=2, microbatches=3, transport="torch", family="gpt2"),
    Layout(pp=2, microbatches=3, recompute="selective", family="gpt2", partition="parameters"),
    Layout(
        pp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, family="gpt2", recompute="full"
    ),
    Layout(
        2, 2, 2, microbatches=2, stage=3, schedule="interleaved_1f1b", virtual_stages=2, recompute="selective"
    ),
    Layout(tile=7, family="gpt2"),
    *(
        Layout(tp=2, tile=7, family=family, sequence=sequence)
        for family, sequence in (("llama", True), ("gpt2", False))
    ),
    Layout(dp=2, tile=1, microbatches=2, stage=3, recompute="full"),
    *(
        Layout(pp=2, tile=5, microbatches=3, schedule=schedule, family="gpt2")
        for schedule in ("gpipe", "1f1b")
    ),
    # Pieces of samples, of tokens that they do not divide, and of a whole sequence.
    Layout(tp=2, overlap=7, microbatches=2, recompute="full", family="gpt2"),
    Layout(tp=2, overlap=4, microbatches=3, sequence=False, transport="torch"),
    Layout(dp=2, tp=2, overlap=5, microbatches=2, stage=3, recompute="selective", kv_heads=1),
    # Sequences of 12 tokens in parts that are contiguous, zigzag, padded.
    Layout(cp=2),
    Layout(cp=2, family="gpt2", microbatches=3),
    Layout(cp=3, kv_heads=2, stage=2),
    Layout(cp=4, kv_heads=1, stage=3, recompute="full"),
    *(Layout(cp=2, tp=2, sequence=sequence, stage=1, kv_heads=2) for sequence in (True, False)),
    Layout(cp=2, pp=2, microbatches=3, schedule="interleaved_1f1b", virtual_stages=2, recompute="full"),
    Layout(cp=2, tp=2, pp=2, microbatches=3, stage=1),
    Layout(cp=2, tile=5),
    Layout(cp=3, context="ring", kv_heads=1, stage=2, microbatches=3),
    Layout(cp=2, tp=2, context="ring", sequence=False, recompute="full"),
    # Heads that do not divide: 2, 2, 1 and 1 of 6, whose key heads some ranks share.
    Layout(cp=4, context="ulysses", heads=6, kv_heads=2, stage=3, recompute="selective"),
    Layout(cp=2, pp=2, context="ulysses", microbatches=3, stage=1),
    Layout(cp=4, context="ring", ulysses=2, heads=6, kv_heads=2),
    *(Layout(cp=2, dp=2, replicate=2, stage=3, microbatches=2, context=method) for method in METHODS),
    # Stages in a V, with ties between the first and the last, and backward passes in two parts.
    Layout(pp=2, microbatches=1, schedule="dualpipe_v", family="gpt2"),
    Layout(pp=2, microbatches=3, schedule="zb_v"),
    Layout(pp=4, microbatches=8, schedule="zb_v", layers=8),
    Layout(pp=2, dp=2, stage=3, microbatches=3, schedule="dualpipe_v", recompute="full"),
    Layout(pp=2, tp=2, microbatches=3, schedule="zb_v", family="gpt2"),
    Layout(pp=2, dp=2, stage=3, microbatches=3, schedule="zb_h1", reshard_after_forward=False),
]
"""Every value of every axis, and every two values that meet: number of stages × schedule × microbatches as a Latin
square, each ZeRO stage beside stages and beside slices, each family and sequence mode on each number of slices."""
PRODUCTS = [
    Layout(pp=2, tp=2, microbatches=3, family="gpt2", recompute="full"),
    Layout(pp=2, dp=2, stage=3, microbatches=3, reshard_after_forward=False, recompute="full"),
    Layout(pp=2, dp=2, stage=2, microbatches=3, schedule="gpipe", family="gpt2"),
    Layout(dp=2, tp=2, stage=3, microbatches=2, recompute="selective", kv_heads=1),
    Layout(pp=3, microbatches=4, family="gpt2"),
    Layout(pp=2, dp=2, tp=2, microbatches=2, stage=2, recompute="full", family="gpt2"),
    Layout(pp=2, dp=2, tp=2, tile=5, microbatches=2, stage=2, recompute="full"),
    Layout(tp=2, overlap=3),
    Layout(cp=2, dp=2, stage=3, microbatches=2, recompute="selective"),
    Layout(cp=2, pp=2, microbatches=2, schedule="gpipe", family="gpt2", stage=2),
    Layout(cp=4, context="planned", ulysses=2, microbatches=2, stage=1),
    Layout(pp=3, microbatches=5, schedule="zb_h1", family="gpt2"),
    Layout(pp=2, dp=2, stage=2, microbatches=3),
    Layout(dp=2, tp=2, stage=0, microbatches=2),
    *(
        Layout(tp=4, sequence=sequence, family=family, kv_heads=kv_heads)
        for sequence in (True, False)
        for family, kv_heads in FAMILIES
    ),
    *(
        Layout(tp=3, sequence=sequence, heads=heads, kv_heads=kv_heads, family=family)
        for sequence in (True, False)
        for family, heads, kv_heads in (("llama", 6, 3), ("llama", 6, 1), ("gpt2", 6, 6))
    ),
    *(
        scheduled(pp, schedule, microbatches)
        for pp in (2, 3, 4)
        for schedule in (*SCHEDULES, *SPLIT)
        for microbatches in MICROBATCHES
    ),
    *(
        Layout(pp=2, dp=2, stage=stage, microbatches=3, schedule=schedule, recompute=how)
        for schedule in SPLIT
        for stage in range(4)
        for how in ("none", "full", "selective")
    ),
    *(
        Layout(pp=2, tp=2, microbatches=microbatches, schedule=schedule, sequence=sequence, family=family)
        for schedule in SPLIT
        for microbatches, sequence, family in ((2, True, "llama"), (3, False, "gpt2"), (5, True, "gpt2"))
    ),
    *(
        Layout(pp=2, cp=2, microbatches=3, schedule=schedule, stage=stage)
        for schedule in SPLIT
        for stage in (0, 3)
    ),
    *(
        Layout(pp=2, dp=2, stage=3, microbatches=3, schedule=schedule, reshard_after_forward=False)
        for schedule in SPLIT
    ),
    *(
        Layout(dp=2, stage=stage, microbatches=2, recompute=how)
        for stage in range(4)
        for how in ("full", "selective")
    ),
    *(Layout(dp=2, tile=7, microbatches=2, stage=stage, family="gpt2") for stage in range(4)),
    Layout(pp=2, dp=2, stage=1, microbatches=3),
    Layout(dp=2, tp=2, stage=1, microbatches=2),
    Layout(pp=2, tp=2, microbatches=3, family="gpt2", recompute="selective"),
    Layout(pp=2, dp=2, stage=3, microbatches=3, reshard_after_forward=False),
    Layout(dp=2, tp=2, stage=2, microbatches=2, recompute="full", family="gpt2"),
    Layout(tp=4, kv_heads=1, transport="torch"),
    *(Layout(pp=2, dp=2, tp=2, microbatches=3, stage=stage, kv_heads=2) for stage in range(4)),
    *(
        Layout(cp=cp, context=method, ulysses=ulysses, stage=cp - 1, microbatches=3, heads=heads, kv_heads=kv)
        for cp, method, ulysses in WAYS
        for heads, kv in ((4, 4), (4, 1), (6, 2))
    ),
    *(
        Layout(cp=2, tp=2, context=method, sequence=sequence, kv_heads=2, recompute="full")
        for method in METHODS
        for sequence in (True, False)
    ),
    *(
        Layout(
            cp=2,
            pp=2,
            context=method,
            microbatches=3,
            schedule=schedule,
            virtual_stages=1 + (schedule == SCHEDULES[2]),
        )
        for method in METHODS
        for schedule in SCHEDULES
    ),
    *(
        Layout(cp=2, dp=2, context=method, microbatches=2, stage=stage, recompute="selective", tile=5)
        for method in METHODS
        for stage in range(4)
    ),
]
EVERY = [each for each in dict.fromkeys([*PAIRS, *PRODUCTS]) if each not in LAYOUTS]
"""The rest of the pairs and of the products, in the soak."""


@pytest.fixture(scope="module")
def measured(ranks: Any, request: pytest.FixtureRequest) -> Any:
    """Figures of the layouts of this run, worst over the ranks; one call per number of ranks."""
    layouts = [layout for (layout,) in chosen(request, "test_equals_one_process", "layout")]

    @cache
    def get(size: int) -> dict[Layout, Figures]:
        table = [layout for layout in layouts if layout.size == size]
        by_rank = ranks(size).run(measure_all, table, timeout_s=250.0)
        return {
            layout: Figures(*(max(column) for column in zip(*rows, strict=True)))
            for layout, *rows in zip(table, *by_rank, strict=True)
        }

    return get


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_one_process(measured: Any, layout: Layout) -> None:
    figures = measured(layout.size)[layout]
    assert max(figures) <= 1e-10, figures


@pytest.mark.soak
@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_every_layout_equals_one_process(ranks: Any, layout: Layout) -> None:
    for figures in ranks(layout.size).run(measure, layout, "auto", 3):
        assert max(figures) <= 1e-10, figures
