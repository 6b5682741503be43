"""Engines whose tables have only some rows in memory: the numbers of tables that fit, with rows read ahead and without,
through saves, loads by other engines, evaluations, and steps that are given up."""

import threading
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.plan.action import Kind
from shardwise.tiers.cache_snapshot import CacheSnapshot, LineMemory
from shardwise.tiers.row_tiers import RowTiersPolicy
from tests.engine import tiers_net
from tests.engine.step.test_keys_ahead import COPIES, MIXED, loader_of
from tests.engine.tables_net import Net, batch, row_of

FEW = 120
"""Rows in memory of each table; a step of all ranks has about 90 of the large ones."""


def engine_of(
    world: World, placements: dict[str, str], folder: str | None, accumulation: int, **more: Any
) -> Any:
    net = Net(placements)
    if folder is not None:
        tiers = RowTiersPolicy(host_rows=FEW, disk=Path(folder))
        net.tables.tables = tuple(each.model_copy(update={"tiers": tiers}) for each in net.tables.tables)
    config = {
        "precision": "fp64",
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "max_grad_norm": 0.5,
        "comm": {"timeout_s": 60},
        "batch": {"global_size": 12, "micro_size": 12 // world.size // accumulation},
        **more,
    }
    return shardwise.initialize(net, config, world=world)


def life(
    world: World,
    placements: dict[str, str],
    folder: str | None,
    depth: int,
    accumulation: int = 1,
    steps: int = 24,
    saves: str | None = None,
) -> dict[str, Any]:
    """Losses, norms, evaluations and rows of a run; ``saves``: a folder for a checkpoint in the middle."""
    engine = engine_of(world, placements, folder, accumulation)
    loader, found, ahead = loader_of(world, False, 12 // world.size // accumulation), [], []
    with engine.prefetch(loader, depth) as batches_of_steps:
        for batches in batches_of_steps:
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
            ahead.append([done.action.kind for done in engine.trace.ahead])
            if result.step % 10 == 5:
                engine(**batch(500 + world.rank))
                engine.discard()
                found.append(engine.evaluate([(batch(2000 + world.rank), 1.0)]))
            if saves is not None and result.step == steps // 2:
                engine.save(saves)
            if result.step == steps:
                break
    figures = engine.take_tier_figures()
    held, planned = engine.held_bytes(), engine.plan.bytes_per_rank()
    found_rows = row_of(engine)
    engine.close()
    reads = {kind for kinds in ahead[2:] for kind in kinds}
    return {
        "found": found,
        "rows": found_rows,
        "reads": Kind.READ in reads,
        "figures": None if figures is None else vars(figures),
        "cache": (held.get("table cache"), planned.get("table cache")),
        "left": [] if folder is None else [each.name for each in Path(folder).glob(f"*rank{world.rank}*")],
    }


def compare(ranks: Any, size: int, placements: dict[str, str], folder: Path, depth: int, *rest: Any) -> None:
    plain = ranks(size).run(life, placements, None, 0, *rest)
    tiered = ranks(size).run(life, placements, str(folder), depth, *rest)
    for here, there in zip(tiered, plain, strict=True):
        assert here["found"] == there["found"]
        assert here["rows"] == there["rows"]
        assert here["reads"] == (depth > 0) and not there["reads"]
        assert here["figures"]["hits"] and here["figures"]["written"]
        assert bool(here["figures"]["read_ahead"]) == (depth > 0)
        assert here["cache"][0] == here["cache"][1], "the Plan counts the rows in memory"
    assert not [name for each in tiered for name in each["left"]], "each rank removes its files"


def test_no_bit_changes(ranks: Any, tmp_path: Path) -> None:
    compare(ranks, 2, MIXED, tmp_path, 2, 2)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("placements", [MIXED, COPIES, {}], ids=["mixed", "copies", "auto"])
def test_no_bit_changes_at_any_depth(
    ranks: Any, tmp_path: Path, placements: dict[str, str], size: int, depth: int
) -> None:
    compare(ranks, size, placements, tmp_path, depth, 1, 60)


def go_on(world: World, placements: dict[str, str], folder: str | None, saved: str) -> Any:
    engine = engine_of(world, placements, folder, 1)
    engine.load(saved)
    found = [engine.train_step([batch(3000 + step + world.rank)]).loss for step in range(4)]
    rows = row_of(engine)
    engine.close()
    return found, rows


def test_a_checkpoint_holds_all_rows(ranks: Any, tmp_path: Path) -> None:
    """It is written with tiers and read without, on another number of ranks, and the other way round."""
    saved, disk = str(tmp_path / "saved"), tmp_path / "disk"
    disk.mkdir()
    ranks(1).run(life, MIXED, str(disk), 1, 1, 12, saved)
    assert ranks(2).run(go_on, COPIES, None, saved) == ranks(2).run(go_on, COPIES, str(disk), saved)


PARTS = 12
"""Steps in which each row of the tables comes once."""


def part_of(step: int, world: World) -> dict[str, Any]:
    """This rank's samples of a step, which have a PARTS-th of all keys."""
    keys = torch.arange(tiers_net.ROWS).view(PARTS, -1)[step % PARTS][world.rank :: world.size, None]
    sparse = {
        name: Ragged.of_lists((keys + each).remainder(tiers_net.ROWS).tolist())
        for each, name in enumerate(NAMES)
    }
    return {"sparse": sparse, "labels": (keys[:, 0] % 3 == 0).float()}


NAMES = ("large", "grows", "exact")


def trained_parts(engine: Any, world: World, first: int, stop: int) -> list[float]:
    return [float(engine.train_step([part_of(step, world)]).loss) for step in range(first, stop)]


def saved_beside_steps(world: World, placement: str, home: str) -> None:
    """The thread that writes a step may read a window of rows only when another step is over."""
    may_read, read = threading.Semaphore(0), CacheSnapshot.read
    windows = 0

    def wait_and_read(snapshot: CacheSnapshot, rows: Tensor, memory: LineMemory) -> None:
        nonlocal windows
        assert may_read.acquire(timeout=60)
        windows += 1
        read(snapshot, rows, memory)

    with tiers_net.small_segments(), patch.object(CacheSnapshot, "read", wait_and_read):
        few = tiers_net.FEW * max(world.size // 2, 1)  # rows of a step lie unevenly over four ranks
        engine = tiers_net.build(world, placement, Path(home) / "disk", few)
        losses = trained_parts(engine, world, 0, PARTS)
        engine.save(f"{home}/saved", asynchronous=True)
        for step in range(PARTS, 2 * PARTS):
            losses += trained_parts(engine, world, step, step + 1)
            assert "shardwise-save" in [each.name for each in threading.enumerate()]
            may_read.release()
        assert windows > PARTS // 2, "rows are read beside the steps"
        may_read.release(10_000)
        engine.wait_for_save()
        losses += trained_parts(engine, world, 2 * PARTS, 2 * PARTS + 3)
        after = tiers_net.state_of(engine)
        engine.close()
    plain = tiers_net.build(world, placement, None)
    assert losses[:PARTS] == trained_parts(plain, world, 0, PARTS)
    expected = tiers_net.state_of(plain)
    assert losses[PARTS:] == trained_parts(plain, world, PARTS, 2 * PARTS + 3)
    assert tiers_net.is_same(after, tiers_net.state_of(plain)), "a save changes no later step"
    plain.close()
    loaded = tiers_net.build(world, placement, None)
    loaded.load(f"{home}/saved")
    assert tiers_net.is_same(tiers_net.state_of(loaded), expected), "the save holds its own step"
    loaded.close()


@pytest.mark.parametrize(
    ("size", "placement"),
    [
        (2, "row"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, "auto"), (2, "table"), (4, "row"))),
    ],
)
def test_every_row_changes_while_it_is_saved(ranks: Any, tmp_path: Path, size: int, placement: str) -> None:
    (tmp_path / "disk").mkdir()
    ranks(size).run(saved_beside_steps, placement, str(tmp_path))


class Layout(NamedTuple):
    """Ranks, a mesh, a placement of all tables, and what else differs."""

    ranks: int
    mesh: dict[str, int]
    placement: str = "auto"
    ratio: int = 10
    """Rows of a table over those in memory."""
    model: dict[str, Any] = {}
    config: dict[str, Any] = {}

    def __str__(self) -> str:
        axes = "-".join(f"{axis}{size}" for axis, size in self.mesh.items())
        return f"{self.ranks}-{axes}-{self.placement}-{self.ratio}-{'-'.join(self.model)}"


BF16 = {"dtype": "bf16", "state_dtype": "bf16"}
BLOCKS, EXPERTS = {"blocks": 2}, {"blocks": 2, "experts": 4}
MESHES = [
    Layout(2, {"tp": 2}, model=BLOCKS, config={"tensor": {"sequence_parallel": False}}),
    Layout(2, {"pp": 2}, model=BLOCKS, config={"batch": {"accumulation": 2}}),
    Layout(2, {"ep": 2}, "row", model=EXPERTS),
    Layout(4, {"dp": 2, "tp": 2}, "row", model=BLOCKS, config={"tensor": {"sequence_parallel": False}}),
    Layout(4, {"dp": 2, "pp": 2}, "row", model=BLOCKS, config={"batch": {"accumulation": 2}}),
    Layout(4, {"ep": 2}, "table", model=EXPERTS),
]
MATRIX = [
    *(mesh._replace(ratio=ratio) for mesh in MESHES for ratio in (4, 20)),
    *(
        Layout(ranks, {}, placement, ratio, model)
        for ranks in (1, 2, 4)
        for placement in ("row", "data_parallel", "column", "table")
        for ratio in (4, 20)
        for model in ({}, BF16, {"dtype": "bf16"})
        if ranks > 1 or placement == "row"
    ),
]
DRAWN = [MESHES[1]._replace(model=BLOCKS | BF16)]


def trained(world: World, layout: Layout, home: str, is_tiered: bool, steps: int = 4) -> list[Any]:
    """Losses, evaluations and rows of a run, and of one that goes on from its checkpoint in another engine."""
    few, found = tiers_net.ROWS // layout.ratio, []
    with tiers_net.small_segments(), pytest.MonkeyPatch.context() as patch:
        samples = 24 if layout.ratio > 10 else 48 if layout.ratio == 10 else 192
        patch.setattr(tiers_net, "SAMPLES", samples)  # a step fits the memory, and four do not
        for first in (0, steps):
            disk = Path(home) / "disk" if is_tiered else None
            config = {"mesh": layout.mesh, "max_grad_norm": 0.5, **layout.config}
            engine = tiers_net.build(world, layout.placement, disk, few, layout.model, **config)
            if first:
                engine.load(f"{home}/saved {is_tiered}")
            for step in range(first, first + steps):
                found.append(tiers_net.train(engine, step))
                dp = engine._parts.groups["dp"]
                held_out = tiers_net.batch(100 + step, dp.index, dp.size)
                found.append(engine.evaluate([(held_out, 1.0)]))
            found.append({name: rows.tolist() for name, rows in tiers_net.state_of(engine).items()})
            engine.save(f"{home}/saved {is_tiered}")
            if is_tiered and engine.tables:
                figures = engine.take_tier_figures()
                if layout.placement != "table" or figures is not None:  # a rank may have none of the tables
                    assert figures.written and figures.misses, "rows have left the memory and come back"
            engine.close()
    return found


def compare_layout(ranks: Any, layout: Layout, home: Path) -> None:
    (home / "disk").mkdir()
    tiered, fits = (
        ranks(layout.ranks).run(trained, layout, str(home), is_tiered) for is_tiered in (True, False)
    )
    for here, there in zip(tiered, fits, strict=True):
        assert here == there


@pytest.mark.parametrize("layout", DRAWN, ids=str)
def test_no_bit_changes_beside_other_axes(ranks: Any, tmp_path: Path, layout: Layout) -> None:
    compare_layout(ranks, layout, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("layout", MATRIX, ids=str)
def test_no_bit_changes_in_any_layout(ranks: Any, tmp_path: Path, layout: Layout) -> None:
    compare_layout(ranks, layout, tmp_path)
