"""Blocks are dealt so that no cut has a smaller largest stage; what cannot be dealt is told with what can."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.partition import partition


def names(count: int) -> list[str]:
    return [f"blocks.{i}" for i in range(count)]


def loads(starts: tuple[str, ...], weights: list[int], front: int = 0, back: int = 0) -> list[int]:
    bounds = [0, *(int(name.split(".")[1]) for name in starts), len(weights)]
    found = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    found[0] += front
    found[-1] += back
    return found


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_no_cut_has_a_smaller_largest_stage(weights: list[int], stages: int, front: int, back: int) -> None:
    stages = min(stages, len(weights))
    blocks = names(len(weights))
    got = loads(partition("parameters", blocks, weights, stages, front, back), weights, front, back)
    every = [
        loads(tuple(blocks[i] for i in places), weights, front, back)
        for places in itertools.combinations(range(1, len(weights)), stages - 1)
    ]
    assert max(got) == min(map(max, every))
    assert sum(load**2 for load in got) == min(sum(v**2 for v in c) for c in every if max(c) == max(got))


@given(st.integers(1, 20), st.integers(1, 20))
def test_uniform_stages_differ_by_one_block_at_most(count: int, stages: int) -> None:
    stages = min(stages, count)
    got = loads(partition("uniform", names(count), [1] * count, stages), [1] * count)
    assert len(got) == stages and max(got) - min(got) <= 1


def test_the_ends_hold_fewer_blocks_where_they_do_not_divide() -> None:
    assert partition("uniform", names(6), [1] * 6, 4) == ("blocks.1", "blocks.3", "blocks.5")
    assert partition("parameters", names(4), [10] * 4, 2, front=1, back=25) == ("blocks.3",)


def test_blocks_by_name() -> None:
    assert partition(("blocks.1", "blocks.4"), names(5), [1] * 5, 3) == ("blocks.1", "blocks.4")
    assert partition("parameters", names(5), [1] * 5, 1) == ()


def test_blocks_of_a_class() -> None:
    classes = ["Embedding", "drop", "TransformerBlock", "Block", "Block", "drop", "MyBLOCK", "LayerNorm"]
    cut = partition("type:block", names(8), [9, 0, 1, 1, 1, 0, 1, 2], 2, 50, 0, classes)
    assert cut == ("blocks.4",), "two blocks each, whatever the rest holds"
    assert partition("type:^block$|Embed", names(8), [1] * 8, 3, classes=classes) == ("blocks.3", "blocks.4")
    with pytest.raises(
        PlanError, match="in the classes of 1 blocks, but there are 2 stages.*Embedding, drop"
    ):
        partition("type:norm", names(8), [1] * 8, 2, classes=classes)


def test_many_blocks_are_quick() -> None:
    got = loads(partition("parameters", names(600), [7] * 600, 16), [7] * 600)
    assert max(got) == 7 * 38


@pytest.mark.parametrize(
    ("how", "stages", "weights", "text"),
    [
        (
            "uniform",
            8,
            [1] * 6,
            "6 blocks cannot make 8 stages.*pp 6, pp 3 with virtual_stages 2, pp 2 with virtual_stages 3",
        ),
        (("blocks.9",), 2, [1] * 6, "no block is called 'blocks.9'; did you mean 'blocks"),
        (("blocks.1",), 3, [1] * 6, "names 1 blocks.*3 stages need 2.*there are 2 stages"),
        (("blocks.3", "blocks.1"), 3, [1] * 6, "in the order of the blocks, each once: blocks.1, blocks.3"),
        (("blocks.0",), 2, [1] * 6, "stage 0 would have none.*'blocks.1'"),
        (("blocks.1", "blocks.2"), 3, [1, 0, 1], r"stage 1 \(blocks.1\) has no parameters"),
        ("halves", 2, [1] * 6, "'halves' is no way to cut.*parameters, uniform"),
    ],
)
def test_what_cannot_be_dealt_is_told(how: object, stages: int, weights: list[int], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        partition(how, names(len(weights)), weights, stages)  # type: ignore[arg-type]
