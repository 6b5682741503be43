"""Groups on a backend that refuses what NCCL refuses: real processes, pipelines of 3 and 4 stages, tied weights, tp.

torch names a group that only its members make by how many groups each of them has made before, so every pipeline of
three or more stages waited for ever in ``initialize`` off gloo.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CommError
from shardwise.comm.groups import backend_for
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from tests.accelerator import pretend
from tests.comm import strict
from tests.engine import (
    tables_net,
    test_experts,
    test_model_parallel,
    test_parity,
    test_tables_model_parallel,
)
from tests.engine.nets import PREFETCH_BYTES, Language, seeded
from tests.engine.step.test_keys_ahead import COPIES, MIXED
from tests.engine.test_experts import Layout as Experts
from tests.engine.test_model_parallel import Layout as Model
from tests.engine.test_parity import OPTIMIZERS, SEQUENCES, Case
from tests.engine.test_tables_model_parallel import Layout as Tables
from tests.ranks import RankPool


class Tied(nn.Module):
    """Embedding and head are one weight, in the first and the last stage."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def tokens(seed: int) -> Tensor:
    return torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(seed))


def trained(world: World, config: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    engine = shardwise.initialize(Tied().double(), {"precision": "fp64", **config}, loss=loss_of, world=world)
    seeds = [2 * engine.dp_index + i for i in range(2)]
    count = engine.config.batch.accumulation or 1
    losses = [engine.train_step([tokens(seed) for seed in seeds[:count]]).grad_norm for _ in range(3)]
    engine.close()
    return losses


DEVICE = "pretend:0" if pretend.IS_POSSIBLE else "cpu"


@pytest.fixture(scope="module")
def strict_ranks() -> Iterator[RankPool]:
    """Four processes of their own: a device and a backend are made known to a process once."""
    pool = RankPool(4, backend="strict", device=DEVICE)
    yield pool
    pool.close()


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 4, tied": (4, {"mesh": {"pp": 4}, "batch": {"accumulation": 2}}),
    "pp 3, tied, on three of the ranks": (3, {"mesh": {"pp": 3}, "batch": {"accumulation": 2}}),
    "pp 2 x dp 2, stage 3, tied": (
        4,
        {"mesh": {"pp": 2}, "zero": {"stage": 3}, "batch": {"accumulation": 2}},
    ),
    "dp 3, stage 2": (3, {"zero": {"stage": 2}}),
    "dp 4, stage 1": (4, {"zero": {"stage": 1}}),
}
AT_ONCE = list(CONFIGS)[:2]


def on_first(world: World, size: int, config: dict[str, Any]) -> list[float] | None:
    """An engine on the first ranks of the job."""
    if world.rank >= size:
        return None
    return trained(world if size == world.size else world.among(range(size)), config)


@pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.soak) for name in CONFIGS]
)
def test_engines_start_and_train(strict_ranks: RankPool, name: str) -> None:
    """One after the other in one job, on all and on some of its ranks, which so make different numbers of groups."""
    size, config = CONFIGS[name]
    found = [norms for norms in strict_ranks.run(on_first, size, config) if norms is not None]
    assert len(found) == size and all(norms == found[0] for norms in found)
    count = config.get("batch", {}).get("accumulation", 1)
    seeds = [2 * dp + i for dp in range(size // config.get("mesh", {}).get("pp", 1)) for i in range(count)]
    torch.manual_seed(0)
    settings = {"precision": "fp64", "batch": {"accumulation": len(seeds)}}
    alone = shardwise.initialize(Tied().double(), settings, loss=loss_of, world=World(0, 1))
    expected = [alone.train_step([tokens(seed) for seed in seeds]).grad_norm for _ in range(3)]
    assert found[0] == pytest.approx(expected, rel=1e-9)


# Every kind of layout, beside gloo ----------------------------------------------------------------------------------


def dense(world: World, layout: Model) -> list[tuple[float, float]]:
    config = test_model_parallel.config_of(layout, "off")
    engine = shardwise.initialize(test_model_parallel.model_of(layout), config, world=world)
    return _steps(engine, partial(test_model_parallel.pieces, layout))


def zero(world: World, case: Case) -> list[tuple[float, float]]:
    config = {
        "zero": {
            "stage": case.stage,
            "prefetch_bytes": PREFETCH_BYTES[case.ahead],
            "reductions_under_way": case.ahead,
        },
        "mesh": {"dp": {"replicate": case.replicate, "shard": world.size // case.replicate}},
        "batch": {"accumulation": 1},
        "optimizer": OPTIMIZERS[case.optimizer],
        "max_grad_norm": 0.5,
        "check_first_step": "off",
    }
    engine = shardwise.initialize(seeded(Language), config, world=world)
    share = SEQUENCES // world.size
    mine = slice(engine.dp_index * share, (engine.dp_index + 1) * share)

    def pieces(_: int, step: int) -> Any:
        tokens, targets = test_parity.data(step)
        weight = float((targets[mine] != -100).sum())
        cut = mine if weight else slice(1)  # the mean of no target is not a number
        return [(tokens[cut], targets[cut])], [weight]

    return _steps(engine, pieces)


def experts(world: World, layout: Experts) -> list[tuple[float, float]]:
    config = {**test_experts.config_of(layout), "check_first_step": "off"}
    engine = shardwise.initialize(seeded(test_experts.Mixture), config, world=world)
    return _steps(engine, partial(test_experts.pieces, layout))


def tables(world: World, layout: Tables) -> list[tuple[float, float]]:
    engine = test_tables_model_parallel.build(world, layout, check_first_step="off")
    losses, norms = test_tables_model_parallel.train(engine, 3)
    engine.close()
    return list(zip(losses, norms, strict=True))


def ahead(world: World, placements: dict[str, str]) -> list[tuple[float, float]]:
    """Keys two steps ahead; on the host's ranks none, for comparison."""
    depth = 0 if world.device.type == "cpu" else 2
    engine = tables_net.build(world, placements)
    share = tables_net.SAMPLES // world.size
    span = share * world.rank, share * (world.rank + 1)
    found = []
    with engine.prefetch(([tables_net.batch(step, *span)] for step in range(5)), depth) as steps:
        for batches in steps:
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
            assert len(engine.trace.ahead) == (depth > 0)
    engine.close()
    return found


def _steps(
    engine: Any, pieces: Callable[[int, int], tuple[list[Any], list[float]]]
) -> list[tuple[float, float]]:
    results = [engine.train_step(*pieces(engine.dp_index, step)) for step in range(3)]
    engine.close()
    return [(result.loss, result.grad_norm) for result in results]


Row = tuple[Callable[[World, Any], list[tuple[float, float]]], Any, int]
QUICK: list[Row] = [
    (zero, Case(3, 2, 1, "adamw", "fp64", ahead=1), 4),
    (dense, Model(tp=2, overlap=3, recompute="full"), 2),
    (tables, Tables(2, {"pp": 2}, "row", stacked=True), 2),
]
REST: list[Row] = [
    (ahead, MIXED, 2),
    (dense, Model(pp=2, tp=2, microbatches=3), 4),
    (dense, Model(tp=2, overlap=7, microbatches=2, family="gpt2"), 2),
    (dense, Model(tp=2, overlap=3, sequence=False), 2),
    (experts, Experts(dp=2, ep=2, stage=3), 2),
    *((dense, Model(pp=pp, microbatches=5), pp) for pp in (2, 3, 4)),
    *(
        (
            dense,
            Model(pp=pp, microbatches=4, schedule="interleaved_1f1b", virtual_stages=2, layers=2 * pp),
            pp,
        )
        for pp in (2, 3, 4)
    ),
    *((dense, Model(tp=2, dp=2, stage=stage, sequence=stage > 1, recompute="full"), 4) for stage in range(4)),
    *((zero, Case(stage, replicate, 1, "adamw", "fp64"), 4) for stage in range(4) for replicate in (1, 2)),
    *((zero, Case(stage, 1, 1, "sgd", "fp64", ahead=2), 3) for stage in range(4)),
    (experts, Experts(tp=2, etp=2, microbatches=2), 2),
    (experts, Experts(dp=2, ep=2, stage=3, recompute="full", exchange="blocks"), 2),
    (experts, Experts(pp=2, dp=2, ep=2, stage=3, microbatches=3), 4),
    (experts, Experts(replicate=2, dp=2, ep=2, stage=2, microbatches=2), 4),
    *((tables, Tables(4, {"dp": 4}, place), 4) for place in ("row", "table", "column", "data_parallel")),
    *((tables, each, each.ranks) for each in test_tables_model_parallel.LAYOUTS),
    (tables, Tables(2, {"dp": 2}, "row"), 2),
    *((ahead, placements, 4) for placements in (MIXED, COPIES)),
]


class Found(NamedTuple):
    """What a rank found out."""

    steps: list[tuple[float, float]]
    blocks: dict[str, int]
    misplaced: list[str]
    races: list[str]
    """Uses of memory that nothing orders, by this process's streams and communicators."""


def train(world: World, row: Row) -> Found | None:
    function, layout, size = row
    if world.rank >= size:
        return None
    strict.blocks.clear()
    bench = pretend.Bench.current
    steps = function(world if size == world.size else world.among(range(size)), layout)
    return Found(steps, dict(strict.blocks), *((bench.misplaced, bench.races) if bench else ([], [])))


@pytest.mark.parametrize(
    "row",
    [*QUICK, *(pytest.param(row, marks=pytest.mark.soak) for row in REST)],
    ids=lambda row: f"{row[0].__name__}-{row[1]}",
)
@pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python")
def test_trains_as_over_gloo(strict_ranks: RankPool, ranks: Any, row: Row) -> None:
    wanted = [found for found in ranks(4).run(train, row) if found is not None]
    found = [found for found in strict_ranks.run(train, row) if found is not None]
    assert len(found) == row[2]
    for mine, theirs in zip(found, wanted, strict=True):
        for each, other in zip(mine.steps, theirs.steps, strict=True):
            assert each == pytest.approx(other, rel=1e-12)
        assert not mine.misplaced and not mine.races
        assert not mine.blocks, "waits that stop the host"


# The host of an accelerator job ------------------------------------------------------------------------------------


def adopted(world: World) -> list[float]:
    """What ``init_process_group("nccl")`` leaves in a user's script: a default group that carries no host tensors."""
    dist.destroy_process_group()
    store = world.board.store
    assert store is not None
    kind = torch.device(DEVICE).type if DEVICE != "cpu" else "meta"
    dist.init_process_group(
        f"{kind}:deviceonly", store=dist.PrefixStore("theirs", store), rank=world.rank, world_size=world.size
    )
    with pytest.raises(strict.Refused, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    whole = join(policy=CommPolicy(device="cpu"))
    assert whole.backend == "gloo"
    whole.barrier()
    config = {"mesh": {"pp": 4}, "batch": {"accumulation": 2}}
    norms = [trained(whole, {**config, "comm": {"transport": kind}}) for kind in ("torch", "auto")]
    whole.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-12) and dist.is_initialized()
    return norms[0]


def test_a_default_group_without_a_host_backend_is_adopted(strict_ranks: RankPool) -> None:
    expected = strict_ranks.run(on_first, 4, CONFIGS["pp 4, tied"][1])
    for norms in strict_ranks.run(adopted):
        assert norms == pytest.approx(expected[0], rel=1e-12)


def on_demand(world: World) -> tuple[dict[str, int], float, str]:
    """The groups with gloo after steps and after collectives of host tensors, a sum, and the error without one rank."""
    part = world.among(range(world.size))  # without the groups of the tests before
    torch.manual_seed(0)
    config = {"precision": "fp64", "mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": 3}}
    engine = shardwise.initialize(Tied().double(), config, loss=loss_of, world=part)
    for step in range(2):
        engine.train_step([tokens(4 * step + world.rank)])
    found = {"steps": with_gloo(part)}
    mesh = engine.plan.mesh
    soon = StepClock(2.0)
    soon.steps_done = 1  # the first step has ten times the deadline
    shards, replicas = (
        part.group(mesh, axis, CommPolicy(), clock, Traffic())
        for axis, clock in (("dp_shard", StepClock(2.0)), ("dp_replicate", soon))
    )
    number = torch.tensor([float(world.rank)])
    shards.all_reduce(number, "a number").wait()
    found["a sum"] = with_gloo(part)
    shards.all_reduce(torch.ones(1), "a number").wait()
    found["two sums"] = with_gloo(part)
    said = ""
    try:
        if world.rank > 1:
            replicas.all_reduce(torch.ones(1), "a number").wait()
    except CommError as error:
        said = str(error)
    engine.close()
    part.release()
    return found, float(number), said


def with_gloo(world: World) -> int:
    return sum(backend_for("cpu", group) == "gloo" for group in world.links._groups)


@pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python")
def test_groups_of_host_tensors_are_made_on_demand(strict_ranks: RankPool) -> None:
    """gloo connects all ranks of a group at once: 511 sockets a rank and group on 512 ranks that need none."""
    for rank, (found, total, said) in enumerate(strict_ranks.run(on_demand)):
        assert found == {"steps": 0, "a sum": 1, "two sums": 1}
        assert total == (1.0 if rank < 2 else 5.0)
        assert ("rank 0" in said or "rank 1" in said) if rank > 1 else not said, said


def by_count(world: World) -> str:
    """As torch names groups: a rank in the middle has made one more when it comes to the last."""
    strict.PATIENCE_S = 1.0  # the ranks wait in vain, and this is their last test
    state = dist.distributed_c10d
    try:
        for ranks in ((0, 1), (1, 2), (0, 2)):
            if world.rank in ranks:
                state._world.group_count += 1
                dist.new_group(list(ranks), use_local_synchronization=True)
    except strict.Refused as error:
        return str(error)
    return ""


def test_groups_that_are_named_by_count_are_refused(strict_ranks: RankPool) -> None:
    """Else a test that passes would say nothing. The last of this pool: half of its groups stay unfinished."""
    assert any("makes" in text for text in strict_ranks.run(by_count))
