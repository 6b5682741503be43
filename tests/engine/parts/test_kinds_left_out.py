"""The list commands and the trace tells: no Kind may be left out of a list, and no handler may do nothing, in silence.

Each change is made behind the validator's back (tests/plan/test_mutations.py shows that it refuses the list), alike on
both ranks. The step must fail, come to other numbers, or report a divergence.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardwise
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from tests.engine import tables_net
from tests.ranks import RankPool

SHORT = {"comm": {"timeout_s": 5.0}, "check_first_step": "off"}
LAMB = {"optimizer": {"type": "lamb", "lr": 0.01}}
MUON = {"optimizer": {"type": "muon", "lr": 0.01}}
TWO: dict[str, Any] = {"batch": {"accumulation": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}, **TWO},
    "zero2": {"zero": {"stage": 2}, **TWO},
    "zero3": {"zero": {"stage": 3, "prefetch_bytes": 2000}},
    "zero3, weights on a disk": {
        "zero": {"stage": 3, "prefetch_bytes": 2000},
        "offload": {"optimizer": "disk", "parameters": "disk"},
    },
    "disk, at the end": {"zero": {"stage": 3}, "offload": {"optimizer": "disk", "step": "at_end"}},
    "delayed": {"zero": {"stage": 1}, "offload": {"optimizer": "disk", "step": "delayed"}},
    "lamb": {"zero": {"stage": 1}, **LAMB},
    "muon": {"zero": {"stage": 1}, **MUON},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, **TWO},
    "experts": {"mesh": {"ep": 2}},
    "tables": {"zero": {"stage": 1}},
}


class Outcome(NamedTuple):
    """What a short run came to: its numbers, what it reported, and the Kinds of its list."""

    digest: str
    divergences: int
    kinds: list[Kind]


def made(world: World, layout: str, folder: str) -> Any:
    given = {**SHORT, **LAYOUTS[layout]}
    if "offload" in given:
        given["offload"] = {**given["offload"], "disk_path": folder}
    if layout == "tables":
        return tables_net.build(world, **given)
    return shardwise.initialize(gpt(layout == "experts"), {"precision": "fp64", **given}, world=world)


def gpt(has_experts: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    experts = {"count": 4, "router": {"top_k": 2, "balance": "bias"}} if has_experts else None
    return Gpt(
        GptPolicy.model_validate(
            dict(layers=3, width=16, heads=2, context=8, vocab=16, dropout=0.0, experts=experts)
        )
    )


def run(job: World, layout: str, folder: str, change: Callable[[Any], None] | None = None) -> Outcome:
    """Train with groups of the run's own, which a step that breaks on one rank leaves closed."""
    world = job.among(range(job.size))
    engine = made(world, layout, folder)
    try:
        kinds = list(dict.fromkeys(each.kind for each in engine.plan.own.actions))
        if change is not None:
            change(engine)
        told, numbers = 0, []
        for step in range(
            3 if layout == "delayed" else 2
        ):  # the second update is the first that SWAP_WEIGHT installs
            result = engine.train_step(
                [piece(engine, step, i) for i in range(engine.config.batch.accumulation or 1)]
            )
            told += len(engine.trace.divergences)
            numbers += [result.loss, result.grad_norm]
        weights = [each.double().sum().item() for each in engine.state_dict().values()]
        told += len(engine._parts.walker.last_aside.divergences)
        if layout == "tables":
            weights += [tables_net.row_of(engine)]
        return Outcome(repr((numbers, weights)), told, kinds)
    finally:
        with suppress(Exception):
            engine.close()
        with suppress(Exception):
            world.close()
        job.barrier()  # one rank may have waited for the other until the deadline


def piece(engine: Any, step: int, number: int) -> Any:
    """A microbatch of this rank."""
    if engine.plan.own.tables:
        half, rank = tables_net.SAMPLES // 2, engine.world.rank
        return tables_net.batch(step, rank * half, (rank + 1) * half)
    draws = torch.Generator().manual_seed(10 * step + number)
    tokens = torch.randint(16, (4, 9), generator=draws)
    mesh = engine.plan.mesh
    dp = mesh.size("dp")
    mine = tokens.chunk(dp)[mesh.index("dp", engine.world.rank)]
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def without(kind: Kind) -> Callable[[Any], None]:
    """The list of every step lacks a Kind from now on."""

    def change(engine: Any) -> None:
        program = engine._parts.program
        right = program.step
        program.step = lambda: tuple(each for each in right() if each.kind is not kind)
        program.begin(program.microbatches)

    return change


def emptied(kind: Kind) -> Callable[[Any], None]:
    """The handler of a Kind does nothing from now on."""

    def change(engine: Any) -> None:
        engine._parts.walker.handlers[kind] = lambda action: None

    return change


def silent(world: World, layout: str, folder: str) -> list[str]:
    """The changes of a layout that nothing shows."""
    right = run(world, layout, folder)
    assert right.divergences == 0, layout
    found = []
    for kind in right.kinds:
        for change in (without, emptied):
            if change is emptied and kind in (Kind.F, Kind.B, Kind.FETCH) and layout != "pp":
                continue  # the user's model does these; their handlers note the ones that it skipped
            if kind in (Kind.SEND, Kind.RECV):
                continue  # the other rank waits for the message until the deadline
            try:
                outcome = run(world, layout, folder, change(kind))
            except Exception:  # alike on both ranks, which have the same list
                continue
            if outcome.digest == right.digest and not outcome.divergences:
                found.append(f"{kind.name} {change.__name__}")
    assert run(world, layout, folder) == right, "the runs before this one have not broken the ranks"
    return found


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Two ranks of one test: a broken step may leave them with threads and groups that no other test should meet."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_kind_is_left_out_in_silence(own_ranks: RankPool, tmp_path: Path, layout: str) -> None:
    assert own_ranks.run(silent, layout, str(tmp_path)) == [[], []]
