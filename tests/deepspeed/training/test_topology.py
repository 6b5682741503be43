"""Coordinates of ranks on named axes."""

import pytest

from shardwise.base.errors import UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.training.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _balanced,
    _prime_factors,
)

TOPOLOGY = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
"""Axes pipe 2, data 3, model 2."""


def test_the_last_axis_varies_fastest() -> None:
    assert TOPOLOGY.get_rank(pipe=1, data=2, model=0) == 1 * 6 + 2 * 2 + 0
    for rank in range(12):
        assert TOPOLOGY.get_rank(**TOPOLOGY.get_coord(rank)._asdict()) == rank
    assert TOPOLOGY.world_size() == 12 and TOPOLOGY.get_axis_names() == ["pipe", "data", "model"]
    assert (TOPOLOGY.get_dim("data"), TOPOLOGY.get_dim("expert")) == (3, 0)
    assert str(PipeDataParallelTopology(1, 2)).count("ProcessCoord") == 2


def test_lists_differ_on_one_axis_alone() -> None:
    assert TOPOLOGY.get_axis_comm_lists("data") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert TOPOLOGY.get_axis_comm_lists("pipe")[0] == [0, 6] and TOPOLOGY.get_axis_comm_lists("expert") == []
    assert TOPOLOGY.filter_match(pipe=1, model=0) == [6, 8, 10] and TOPOLOGY.get_axis_list("data", 1) == [
        2,
        3,
        8,
        9,
    ]


def test_names_for_files_leave_axes_out() -> None:
    assert TOPOLOGY.get_rank_repr(9) == "model_01"
    assert TOPOLOGY.get_rank_repr(9, omit_axes=("model",), inner_sep="", outer_sep=".") == "pipe01.data01"


def test_wrong_coordinates() -> None:
    for call, text in (
        (lambda: TOPOLOGY.get_rank(pipe=0, data=0), "expected one coordinate for each of"),
        (lambda: TOPOLOGY.get_rank(pipe=2, data=0, model=0), "lies outside of"),
        (lambda: TOPOLOGY.get_coord(12), "rank 12 is not among the 12"),
        (lambda: TOPOLOGY.get_coord(-1), "rank -1 is not among"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_prime_factors_alternate_between_stages_and_replicas() -> None:
    assert _prime_factors(60) == [2, 2, 3, 5] and _prime_factors(1) == []
    assert _balanced(60).dims == [6, 10] and _balanced(7).dims == [7, 1]
    with pytest.raises(UsageError, match="expected at least 1"):
        _prime_factors(0)


@pytest.fixture
def rank_4_of_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_group, "rank", lambda: 4)
    monkeypatch.setattr(default_group, "size", lambda: 6)
    monkeypatch.setattr(
        default_group, "own_group", lambda lists: next(("group", ranks) for ranks in lists if 4 in ranks)
    )


@pytest.mark.usefixtures("rank_4_of_6")
def test_a_rank_in_the_grid() -> None:
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=3, num_dp=2))
    assert (grid.stage_id, grid.data_parallel_id, grid.model_parallel_size) == (2, 0, 1)
    assert grid.is_last_stage and not grid.is_first_stage and grid._is_grid_valid()
    assert grid.dp_group == [4, 5] and grid.pp_group == [0, 2, 4]
    assert grid.stage_to_global(0) == 0 and grid.stage_to_global(1, data=1) == 3
    assert (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()) == (3, 2)
    assert grid.get_data_parallel_group() == grid.get_pipe_parallel_group() == "group"
    assert PipelineParallelGrid().topology().dims == [2, 3]


@pytest.mark.usefixtures("rank_4_of_6")
def test_axes_of_a_topology_may_have_other_names() -> None:
    grid = PipelineParallelGrid(ProcessTopology(["pipe"], [6]))
    assert grid.stage_id == 4 and grid.pp_group == [0, 1, 2, 3, 4, 5] and grid.dp_group == [4]
    with pytest.raises(ValueError, match="are 4 ranks, and the job has 6"):
        PipelineParallelGrid(ProcessTopology(["data"], [4]))
