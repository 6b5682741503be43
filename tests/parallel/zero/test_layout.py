"""Strategies and buffers, as pure data."""

import pytest
import torch

from shardwise.parallel.zero.layout import buffers, strategy_of
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.precision.policy import BucketDtypes

ZERO1 = strategy_of(ZeroPolicy(stage=1), Mesh(dp_shard=2))


@pytest.mark.parametrize(
    ("policy", "mesh", "cuts"),
    [
        (ZeroPolicy(stage=0), Mesh(dp_shard=4), (False, False, False)),
        (ZeroPolicy(stage=1), Mesh(dp_shard=4), (False, False, True)),
        (ZeroPolicy(stage=2), Mesh(dp_shard=4), (False, True, True)),
        (ZeroPolicy(stage=3), Mesh(dp_shard=4), (True, True, True)),
        (ZeroPolicy(stage=2, reduce="step"), Mesh(dp_shard=4), (False, False, True)),
        (ZeroPolicy(stage=3, reduce="step"), Mesh(dp_shard=4), (True, False, True)),
        (ZeroPolicy(stage=3), Mesh(dp_replicate=2, dp_shard=2), (True, True, True)),
        (ZeroPolicy(stage=3), Mesh(dp_replicate=4), (False, False, False)),
        (ZeroPolicy(stage=3), Mesh(), (False, False, False)),
    ],
    ids=str,
)
def test_table_of_stages(policy: ZeroPolicy, mesh: Mesh, cuts: tuple[bool, bool, bool]) -> None:
    strategy = strategy_of(policy, mesh)
    assert (strategy.cuts_weight, strategy.cuts_grad, strategy.cuts_master) == cuts


def test_a_caller_may_want_windows_where_nothing_is_cut() -> None:
    assert not strategy_of(ZeroPolicy(stage=3), Mesh()).has_windows
    wanted = strategy_of(ZeroPolicy(stage=3), Mesh(), windows=True)
    assert wanted.has_windows and not wanted.cuts_weight
    assert strategy_of(ZeroPolicy(stage=3), Mesh(dp_shard=2)).has_windows


def test_bytes_of_one_parameter() -> None:
    mixed = BucketDtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)
    plain = BucketDtypes(torch.float32, torch.float32, torch.float32, torch.float32)
    assert sum(row.itemsize for row in buffers(ZERO1, mixed, True, ["a", "b"])) == 2 + 4 + 4 + 8
    assert sum(row.itemsize for row in buffers(ZERO1, plain, True, ["a", "b"])) == 4 + 4 + 8
    assert [row.kind for row in buffers(ZERO1, mixed, False, ["a", "b"])] == ["weight"]
