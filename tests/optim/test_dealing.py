"""Matrices are dealt evenly, to whoever holds most of them, and travel in rounds."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.dealing import owners, rounds

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=30)


def cost(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


@given(SHAPES, st.integers(1, 6))
def test_no_rank_has_more_than_the_mean_and_one_matrix(shapes: list[tuple[int, int]], ranks: int) -> None:
    owner = owners(shapes, [[0] * ranks for _ in shapes])
    load = [sum(cost(s) for s, to in zip(shapes, owner, strict=True) if to == rank) for rank in range(ranks)]
    largest = max(map(cost, shapes), default=0)
    assert max(load) <= sum(load) / ranks + largest


def test_of_several_the_one_that_holds_most() -> None:
    assert owners([(4, 4), (4, 4)], [[4, 12], [12, 4]]) == [1, 0]
    assert owners([(4, 4), (8, 8)], [[16, 0], [64, 0]]) == [1, 0], "evenness comes first"


@given(SHAPES, st.integers(1, 4), st.integers(1, 2000))
def test_rounds_hold_every_matrix_once_and_few_elements(
    shapes: list[tuple[int, int]], ranks: int, limit: int
) -> None:
    owner = owners(shapes, [[0] * ranks for _ in shapes])
    found = rounds(shapes, owner, limit)
    assert sorted(place for each in found for place in each) == list(range(len(shapes)))
    for each in found:
        for rank in range(ranks):
            held = [shapes[place][0] * shapes[place][1] for place in each if owner[place] == rank]
            assert sum(held) <= limit or len(held) == 1
