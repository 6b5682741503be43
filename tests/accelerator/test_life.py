"""A run's life on the pretended device: it trains, saves, loads, resumes to the bit, evaluates and generates.

Ranks are a crew, so their numbers are real: a resumed run equals one that went on. No operation may find tensors on
both sides, and what a load puts into an optimizer lies where, and in the dtype, that the optimizer itself keeps it.
"""

import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.models import Gpt, GptPolicy
from shardwise.models.generate import generate
from shardwise.models.gpt import GptExperts
from shardwise.optim.policy import READS
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.ranks import RankPool

CONTEXT, VOCABULARY = 6, 11


class Life(NamedTuple):
    """One row."""

    ranks: int = 1
    optimizer: str = "adamw"
    precision: str = "fp32"
    stage: int = 0
    mesh: tuple[tuple[str, int], ...] = ()
    family: str = "llama"
    tied: bool = False
    dropout: float = 0.0
    recompute: str = "none"
    experts: int = 0
    layers: int = 2

    def __str__(self) -> str:
        default = Life()._asdict()
        said = [f"{key} {value}" for key, value in self._asdict().items() if value != default[key]]
        return ", ".join(said) or "one"


OPTIMIZERS = [Life(optimizer=name, precision="bf16", layers=1) for name in ("sgd", "nadam", "asgd", "muon")]
"""Of each kind that keeps its step count or other numbers in its own way."""
LAYOUTS = [
    Life(2, "lamb", "fp16", stage=2, layers=1),
    Life(2, stage=3, precision="bf16", layers=1, recompute="full"),
    Life(2, mesh=(("pp", 2),), tied=True, family="gpt2"),
]
EVERY = [
    *(Life(optimizer=name, precision="bf16", layers=1) for name in READS),
    *(
        Life(ranks, name, precision, stage, mesh)
        for name in READS
        for ranks, stage, mesh, precision in (
            (2, 3, (), "bf16"),
            (2, 1, (), "fp32"),
            (2, 0, (("tp", 2),), "bf16"),
            (2, 0, (("pp", 2),), "fp32"),
            (4, 3, (("tp", 2), ("dp", 2)), "bf16"),
        )
    ),
    *(Life(2, stage=stage, precision=each) for stage in range(4) for each in ("fp32", "bf16", "fp16")),
    *(Life(4, stage=stage, mesh=(("pp", 2), ("dp", 2)), recompute="full") for stage in range(4)),
    *(Life(2, stage=stage, mesh=(("ep", 2),), experts=2, recompute="full") for stage in range(4)),
    Life(2, mesh=(("tp", 2),), family="gpt2", dropout=0.1),
    Life(2, mesh=(("pp", 2),), tied=True, family="gpt2", dropout=0.1, recompute="selective"),
]


def engine_of(world: Any, life: Life) -> Any:
    experts = GptExperts(count=life.experts) if life.experts else None
    policy = GptPolicy(
        family=life.family,  # type: ignore[arg-type]
        layers=life.layers,
        width=8,
        heads=2,
        hidden=8,
        context=CONTEXT,
        vocab=VOCABULARY,
        tied_head=life.tied,
        dropout=life.dropout,
        experts=experts,
    )
    config = {
        "mesh": dict(life.mesh),
        "zero": {"stage": life.stage},
        "precision": life.precision,
        "optimizer": {"type": life.optimizer, "lr": 0.01},
        "recompute": life.recompute,
        "batch": {"accumulation": 2},
        "max_grad_norm": 0.5,
    }
    return shardwise.initialize(Gpt(policy), config, world=world)


def batches(step: int, dp_index: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(97 * step + dp_index)
    found = torch.randint(0, VOCABULARY, (2, 2, 2, CONTEXT), generator=generator)
    return [(tokens, targets) for tokens, targets in found]


def places(engine: Any) -> list[tuple[str, torch.dtype, str, int]]:
    """Of what the optimizers keep: name, dtype, device, dims."""
    return [
        (name, each.dtype, each.device.type, each.dim())
        for _, optimizer in engine._parts.trained
        for state in optimizer.state.optimizer.state.values()
        for name, each in sorted(state.items())
        if isinstance(each, Tensor)
    ]


def live(world: Any, life: Life, folder: str) -> None:
    """The whole life, on one rank."""
    first = engine_of(world, life)
    losses = [first.train_step(batches(step, first.dp_index)).loss for step in range(2)]
    first.save(folder)
    world.barrier()  # else a rank of the crew waits here with the baton
    first.wait_for_save()
    second = engine_of(world, life)
    second.load(folder)
    assert places(second) == places(first)
    on = batches(2, first.dp_index)
    assert second.train_step(on) == first.train_step(on), "a resumed run differs"
    assert places(second) == places(first)
    kept, again = first.state_dict(), second.state_dict()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert all(loss == loss for loss in losses)
    first.evaluate([(batch, None) for batch in on])
    first.close()
    tokens = on[0][0][:, :3]
    if not any(axis == "pp" for axis, _ in life.mesh):
        with second.full_parameters():
            generate(second.module, tokens.to(second.device), CONTEXT, seed=1, top_k=5)
    second.close()


def live_all(_world: Any, lives: Sequence[Life]) -> list[str]:
    """What went wrong, in a process with the device."""
    device, wrong = register(), []
    for life in lives:
        with Bench() as bench, tempfile.TemporaryDirectory() as folder:
            try:
                Crew(life.ranks, device).run(live, life, folder)
            except Exception as error:
                wrong.append(f"{life}: {type(error).__name__}: {error}")
            wrong += [f"{life}: {line}" for line in bench.misplaced]
    return wrong


@pytest.mark.parametrize("life", [*OPTIMIZERS, *LAYOUTS], ids=str)
def test_a_run_lives_on_a_device(device_process: RankPool, life: Life) -> None:
    assert device_process.run(live_all, [life]) == [[]]


@pytest.mark.soak
def test_every_optimizer_lives_with_every_layout(device_process: RankPool) -> None:
    [wrong] = device_process.run(live_all, list(dict.fromkeys(EVERY)), timeout_s=3000.0)
    assert not wrong, "\n".join(wrong)
