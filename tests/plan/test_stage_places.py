"""Where stages lie: round robin and in a V."""

from shardwise.plan.mesh import Mesh
from shardwise.plan.stage_places import StagePlaces


def test_round_robin_and_folded() -> None:
    assert [StagePlaces(4).place(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [StagePlaces(4, folded=True).place(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert StagePlaces(4, folded=True).stages_of(1, 8) == (1, 6)


def test_each_rank_has_its_stages() -> None:
    for ranks in range(1, 9):
        for folded in (False, True):
            places = StagePlaces(ranks, folded)
            own = [places.stages_of(place, 2 * ranks) for place in range(ranks)]
            assert sorted(stage for stages in own for stage in stages) == list(range(2 * ranks))
            assert {len(stages) for stages in own} == {2}
            assert all(places.place(stage) == place for place, stages in enumerate(own) for stage in stages)
            assert places.last_place(2 * ranks) == (0 if folded else ranks - 1)


def test_a_tied_head_is_on_one_rank_of_a_folded_mesh() -> None:
    assert Mesh(pp=4, tp=2, folded=True).stage_ranks(1, (0, 7)) == (1,)
    assert Mesh(pp=4, tp=2).stage_ranks(1, (0, 7)) == (1, 7)
