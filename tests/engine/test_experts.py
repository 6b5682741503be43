"""Experts on several ranks equal one process with a plain torch loop: alone, and with all else that cuts a model.

One global batch of 8 sequences a step is cut into data-parallel ranks × microbatches, unevenly where they do not
divide. In the last step targets are masked unevenly.
"""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import MixtureOfExperts, RouterPolicy
from shardwise.models import Gpt, GptPolicy
from tests.engine.conformance import Conformance, evaluation_departures
from tests.engine.nets import seeded
from tests.engine.plain import Truth, train, worst

SEQUENCES, CONTEXT, VOCABULARY, WIDTH, HIDDEN, EXPERTS = 8, 6, 13, 8, 4, 4
OPTIMIZER = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CLIP = 0.5


class Mixture(Gpt):
    """A small LLaMA whose feed-forward layers are mixtures of experts: with and without drops, shared experts and a
    residual branch."""

    def __init__(self) -> None:
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
            block.mlp = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, **kind)

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

    @property
    def size(self) -> int:
        return self.pp * self.replicate * self.dp * self.tp

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


@cache
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
            "tp": layout.tp,
            "ep": layout.ep,
            "etp": layout.etp,
        },
        "zero": {"stage": layout.stage},
        "tensor": {"sequence_parallel": layout.sequence},
        "pipeline": {
            "schedule": "interleaved_1f1b" if layout.virtual_stages > 1 else "1f1b",
            "virtual_stages": layout.virtual_stages,
            "partition": "uniform",
        },
        "recompute": layout.recompute,
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


def measure(world: Any, layout: Layout) -> Figures:
    """Train three steps and compare."""
    engine = shardwise.initialize(seeded(Mixture), config_of(layout), world=world)
    training, step_of = engine._training, engine._training.step
    found: dict[str, Tensor] = {}

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete:
            found.clear()
            found.update(engine.gradients())
        return step_of()

    training.step = with_gradients  # type: ignore[method-assign]
    figures, conformance = Figures(), Conformance(engine)
    for step, wanted in enumerate(truth()):
        batches, weights = pieces(layout, engine.dp_index, step)
        result = engine.train_step(batches, weights)
        state = engine.state_dict()
        now = Figures(
            worst(found, wanted.gradients, wanted.addends),
            abs(result.grad_norm / wanted.norm - 1),
            worst({name: state[name] for name in wanted.weights}, wanted.weights),
            abs(result.loss / wanted.loss - 1),
        )
        figures = Figures(*map(max, figures, now))
    departures = conformance.departures + evaluation_departures(engine, list(batches[:2]))
    engine.close()
    return figures._replace(departures=float(len(departures)))


def measure_all(world: Any, layouts: list[Layout]) -> list[Figures]:
    return [measure(world, layout) for layout in layouts]


PAIRS = [
    Layout(dp=2, ep=2, stage=3, recompute="full"),
    Layout(dp=2, ep=2, stage=1, microbatches=2),
    Layout(tp=2, ep=2, sequence=False, recompute="selective"),
    Layout(tp=2, etp=2, microbatches=2),
    Layout(pp=2, microbatches=3),
    Layout(dp=4, ep=2, stage=2, microbatches=2, recompute="selective"),
    Layout(dp=4, ep=4, stage=3, microbatches=2),
    Layout(replicate=2, dp=2, ep=2, stage=3),
    Layout(dp=2, tp=2, ep=2, stage=3, microbatches=2, recompute="full"),
    Layout(dp=2, tp=2, ep=4, stage=1, sequence=False),
    Layout(dp=2, tp=2, ep=2, etp=2, stage=2),
    Layout(pp=2, dp=2, ep=2, stage=3, microbatches=3),
    Layout(pp=2, tp=2, ep=2, microbatches=2, virtual_stages=2, recompute="full"),
]
"""Every axis with every other one, ZeRO at each stage, both sequence modes."""
EVERY = [
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
def measured(ranks: Any) -> Any:
    """Figures of all layouts, worst over the ranks; one call per number of ranks."""

    @cache
    def get(size: int) -> dict[Layout, Figures]:
        table = [layout for layout in PAIRS if layout.size == size]
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


@pytest.mark.soak
@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_every_layout_equals_one_process(ranks: Any, layout: Layout) -> None:
    for figures in ranks(layout.size).run(measure, layout):
        assert max(figures) <= 1e-10, figures
