"""Groups on a backend that refuses what NCCL refuses: real processes, pipelines of 3 and 4 stages, tied weights, tp.

torch names a group that only its members make by how many groups each of them has made before, so every pipeline of
three or more stages waited for ever in ``initialize`` off gloo.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from tests.comm import strict
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


@pytest.fixture(scope="module")
def strict_ranks() -> Iterator[RankPool]:
    """Four processes of their own: a backend is made known to a process once."""
    pool = RankPool(4, backend="strict")
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


def on_first(world: World, size: int, config: dict[str, Any]) -> list[float] | None:
    """An engine on the first ranks of the job."""
    if world.rank >= size:
        return None
    return trained(world if size == world.size else world.among(range(size)), config)


@pytest.mark.parametrize("name", CONFIGS)
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


def adopted(world: World) -> list[float]:
    """What ``init_process_group("nccl")`` leaves in a user's script: a default group that carries no host tensors."""
    dist.destroy_process_group()
    store = world.board.store
    assert store is not None
    dist.init_process_group(
        "meta:deviceonly", store=dist.PrefixStore("theirs", store), rank=world.rank, world_size=world.size
    )
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    whole = join(device="cpu")
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


def by_count(world: World) -> str:
    """As torch names groups: a rank in the middle has made one more when it comes to the last."""
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
