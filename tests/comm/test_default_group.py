"""torch's default group in one process, and without any."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import default_group


@pytest.fixture
def begun() -> Iterator[None]:
    default_group.begin()
    yield
    default_group.end()


def test_without_a_group_there_is_one_process() -> None:
    assert not default_group.is_begun()
    assert (default_group.rank(), default_group.size()) == (0, 1)
    default_group.barrier()
    default_group.end()


@pytest.mark.usefixtures("begun")
def test_a_group_of_one_process_answers_torchs_calls() -> None:
    default_group.begin()
    assert default_group.is_begun() and default_group.ranks_of() == [0]
    x = torch.ones(2)
    default_group.all_reduce(x)
    assert x.tolist() == [1, 1] and default_group.all_reduce is dist.all_reduce
    group, ranks = default_group.own_group([[0]])
    assert ranks == [0] and default_group.size(group) == 1 and default_group.own_group([]) == (None, [])
    assert default_group.device_mesh("cpu", [1], ["dp"]).mesh_dim_names == ("dp",)
    default_group.end()
    assert not default_group.is_begun()


def test_a_script_for_cuda_gets_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: asked.append((backend, more)))
    monkeypatch.setattr(dist.distributed_c10d, "init_process_group", dist.init_process_group)
    default_group.accept_nccl_on_cpu()
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=0, rank=1)
    dist.distributed_c10d.init_process_group("mpi", device_id=0)
    assert asked == [("gloo", {"rank": 1}), ("mpi", {"device_id": 0})]
