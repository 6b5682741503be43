"""Blocks are dealt so that no cut has a smaller largest stage; what cannot be dealt is told with what can."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, PlanError
from shardwise.parallel.pipeline.block_seconds import BlockSeconds, content_of, read_seconds, write_seconds
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


def pairs(starts: tuple[str, ...], weights: list[int], front: int = 0, back: int = 0) -> list[int]:
    """What each rank of a V holds."""
    held = loads(starts, weights, front, back)
    return [held[rank] + held[-1 - rank] for rank in range(len(held) // 2)]


@given(st.lists(st.integers(1, 30), min_size=4, max_size=9), st.integers(2, 3), st.integers(0, 60))
def test_no_cut_in_a_v_has_a_heavier_largest_pair(weights: list[int], ranks: int, around: int) -> None:
    ranks = min(ranks, len(weights) // 2)
    blocks, front, back = names(len(weights)), around // 3, around - around // 3
    got = partition("parameters", blocks, weights, 2 * ranks, front, back, folded=True)
    every = [
        pairs(tuple(blocks[i] for i in places), weights, front, back)
        for places in itertools.combinations(range(1, len(weights)), 2 * ranks - 1)
    ]
    assert max(pairs(got, weights, front, back)) == min(map(max, every))


def test_the_ends_of_a_v_share_a_rank() -> None:
    assert partition("parameters", names(8), [7] * 8, 4, folded=True) == ("blocks.2", "blocks.4", "blocks.6")
    around = partition("parameters", names(12), [7] * 12, 4, 20, 20, folded=True)
    assert pairs(around, [7] * 12, 20, 20) == [61, 63], "the embedding and the head count for rank 0's pair"
    alone = partition("parameters", names(12), [7] * 12, 4, 20, 20)
    assert max(pairs(alone, [7] * 12, 20, 20)) >= 63
    assert partition("uniform", names(8), [7] * 8, 4, 99, 0, folded=True) == (
        "blocks.2",
        "blocks.4",
        "blocks.6",
    )


def test_measured_seconds_cut_where_parameters_would_not() -> None:
    blocks = names(8)
    seconds = BlockSeconds({name: 4e-3 if name == "blocks.1" else 1e-3 for name in blocks}, 0.0, 1e-3)
    own, front, back = seconds.loads(blocks)
    for folded, of in ((False, loads), (True, pairs)):
        by_seconds = partition("measured", blocks, [5] * 8, 4, 5, 5, seconds=seconds, folded=folded)
        by_parameters = partition("parameters", blocks, [5] * 8, 4, 5, 5, folded=folded)
        assert max(of(by_seconds, own, front, back)) < max(of(by_parameters, own, front, back))
        unknown = partition("measured", blocks, [5] * 8, 4, 5, 5, folded=folded)
        assert unknown == by_parameters, "a first run cuts by parameters"


@given(st.lists(st.integers(1, 40), min_size=8, max_size=12), st.integers(0, 50), st.booleans())
def test_the_worst_rank_takes_no_longer_than_by_parameters(own: list[int], back: int, folded: bool) -> None:
    blocks, of = names(len(own)), pairs if folded else loads
    seconds = BlockSeconds(dict(zip(blocks, (each * 1e-9 for each in own), strict=True)), 0.0, back * 1e-9)
    cuts = [
        partition(how, blocks, [3] * len(own), 4, 1, 2, seconds=seconds, folded=folded)
        for how in ("measured", "parameters")
    ]
    worst = [max(of(cut, own, 0, back)) for cut in cuts]
    assert worst[0] <= worst[1]


def test_one_heavy_block_among_many_is_quick_in_a_v() -> None:
    weights = [7] * 128
    weights[42] = 210
    assert max(pairs(partition("parameters", names(128), weights, 32, folded=True), weights)) == 217


def test_the_file_of_seconds_comes_back_and_names_its_blocks(tmp_path: Path) -> None:
    path, blocks = str(tmp_path / "runs" / "blocks.json"), names(3)
    assert read_seconds(path, blocks) is None and content_of(path) == "no file"
    measured = BlockSeconds(dict.fromkeys(blocks, 0.25), 0.5, 0.0)
    write_seconds(path, measured)
    assert read_seconds(path, blocks) == measured and content_of(path) != "no file"
    with pytest.raises(
        PlanError, match=r"3 blocks, blocks.0 to blocks.2, but the model has 4 blocks.*remove"
    ):
        read_seconds(path, names(4))
    Path(path).write_text('{"blocks": {"blocks.0": -1}, "front": 0, "back": 0}')
    with pytest.raises(ConfigError, match=r"pipeline.seconds: .*blocks.0: .*greater than or equal to 0"):
        read_seconds(path, blocks)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_seconds(str(tmp_path), blocks)


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
        ("halves", 2, [1] * 6, "'halves' is no way to cut.*parameters"),
    ],
)
def test_what_cannot_be_dealt_is_told(how: object, stages: int, weights: list[int], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        partition(how, names(len(weights)), weights, stages)  # type: ignore[arg-type]
