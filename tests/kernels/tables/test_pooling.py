"""Pooling and merging against the references by the bit, against nn.EmbeddingBag by value."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.tables.pooling import Pooling, gather, merge, plain_merge, plain_pool, pool

ROWS, WIDTH = 40, 19
KINDS: list[tuple[Pooling, bool]] = [("sum", False), ("mean", False), ("max", False), ("sum", True)]


def bags(places: int, count: int) -> Tensor:
    """Offsets of ``count`` bags, some of them empty, over all places."""
    inner = torch.randint(0, places + 1, (count - 1,)).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([places])])


def case(dtype: torch.dtype, weighted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    source = torch.randn(ROWS, WIDTH, dtype=dtype)
    weights = torch.randn(200, dtype=dtype) if weighted else None
    return source, torch.randint(0, ROWS, (200,)), bags(200, 90), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_the_references_bits(pooling: Pooling, weighted: bool, dtype: torch.dtype) -> None:
    source, index, offsets, weights = case(dtype, weighted)
    ours, plain = (form(source, index, offsets, pooling, weights) for form in (pool, plain_pool))
    assert torch.equal(ours.values, plain.values)
    assert (ours.places is None) == (plain.places is None) == (pooling != "max")
    if ours.places is not None and plain.places is not None:
        assert torch.equal(ours.places, plain.places)
    grad = torch.randn(90, WIDTH, dtype=dtype)
    one = merge(grad, index, offsets, ROWS, pooling, weights, ours.places)
    assert torch.equal(one, plain_merge(grad, index, offsets, ROWS, pooling, weights, ours.places))


@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_values_and_gradients_are_those_of_embedding_bag(pooling: Pooling, weighted: bool) -> None:
    source, index, offsets, weights = case(torch.float64, weighted)
    source.requires_grad_()
    expected = functional.embedding_bag(
        index, source, offsets, mode=pooling, per_sample_weights=weights, include_last_offset=True
    )
    pooled = pool(source, index, offsets, pooling, weights)
    torch.testing.assert_close(pooled.values, expected.detach(), rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    merged = merge(grad, index, offsets, ROWS, pooling, weights, pooled.places)
    torch.testing.assert_close(merged, source.grad, rtol=1e-13, atol=1e-13)


def test_state_beside_the_weights_is_passed_over() -> None:
    slab = torch.randn(ROWS, WIDTH + 3)
    index, offsets = torch.randint(0, ROWS, (30,)), bags(30, 11)
    whole = pool(slab[:, :WIDTH].contiguous(), index, offsets).values
    assert torch.equal(pool(slab, index, offsets, width=WIDTH).values, whole)
    assert torch.equal(gather(slab, index, WIDTH), slab[index, :WIDTH])
    assert torch.equal(gather(slab[:, 2:], index), slab[index, 2:]), "rows with a stride"
    with pytest.raises(ValueError, match="expected 1 to 22"):
        gather(slab, index, WIDTH + 4)


def test_empty_bags_are_zero_in_dirty_memory() -> None:
    offsets = torch.tensor([0, 0, 2, 2])
    index = torch.tensor([1, 0])
    for pooling in ("sum", "mean", "max"):
        for _ in range(20):
            torch.full((3, WIDTH), float("nan"))
            pooled = pool(torch.ones(2, WIDTH), index, offsets, pooling)
            assert pooled.values[0].tolist() == pooled.values[2].tolist() == [0.0] * WIDTH
    assert pooled.places is not None
    assert pooled.places[:, 0].tolist() == [-1, 0, -1], "of equal values the first"


def test_some_of_the_places() -> None:
    source, index, offsets, _ = case(torch.float64, False)
    first, last = int(offsets[20]), int(offsets[50])
    part = pool(source, index, offsets[20:51]).values
    assert torch.equal(part, pool(source, index, offsets).values[20:50])
    grad = torch.randn(30, WIDTH, dtype=torch.float64)
    for form in (merge, plain_merge):
        whole = form(grad, index[first:last], offsets[20:51] - first, ROWS)
        assert torch.equal(form(grad, index, offsets[20:51], ROWS), whole)


@pytest.mark.parametrize("form", [merge, plain_merge])
def test_gradients_are_added_in_the_order_of_the_places(form: Any) -> None:
    large = 2.0**60
    ranks = [
        torch.tensor([[large], [1.0]]),
        torch.tensor([[1.0], [large]]),
        torch.tensor([[-large], [-large]]),
    ]
    merged = form(torch.cat(ranks), torch.tensor([0, 1, 0, 1, 0, 1]), None, 2)
    assert merged[:, 0].tolist() == [0.0, 0.0], "(large + 1) - large"
    merged = form(torch.cat([ranks[0], ranks[2], ranks[1]]), torch.tensor([0, 1, 0, 1, 0, 1]), None, 2)
    assert merged[:, 0].tolist() == [1.0, 0.0]


def test_many_gradients_of_one_row_are_those_of_a_loop() -> None:
    grad = torch.randn(3000, 5)
    expected = torch.zeros(5)
    for row in grad:
        expected += row
    for form in (merge, plain_merge):
        assert torch.equal(form(grad, torch.zeros(3000, dtype=torch.int64), None, 1)[0], expected)


def test_memory_for_the_result() -> None:
    grad, index = torch.randn(6, 4), torch.tensor([0, 2, 1, 1, 0, 2])
    memory = torch.full((3, 4), float("nan"))
    assert merge(grad, index, None, 3, out=memory) is memory
    assert torch.equal(memory, merge(grad, index, None, 3))
    with pytest.raises(ValueError, match=r"expected torch.float32 \[3, 4\]"):
        merge(grad, index, None, 3, out=torch.zeros(4, 4))


@pytest.mark.parametrize("form", [pool, plain_pool])
@pytest.mark.parametrize(
    ("index", "offsets", "message"),
    [
        ([0, 40], [0, 1, 2], "row 40; expected 0 to 39"),
        ([0, -1], [0, 1, 2], "row -1; expected 0 to 39"),
        ([0, 1], [0, 2, 1], "offsets run from 0 to 1 over 2 places"),
        ([0, 1], [0, 1, 3], "offsets run from 0 to 3 over 2 places"),
        ([0, 1], [-1, 1, 2], "offsets run from -1 to 2 over 2 places"),
    ],
)
@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_nothing_is_read_outside(
    form: Any, index: list[int], offsets: list[int], message: str, pooling: Pooling, weighted: bool
) -> None:
    weights = torch.ones(2) if weighted else None
    with pytest.raises(IndexError, match=message):
        form(torch.zeros(ROWS, WIDTH), torch.tensor(index), torch.tensor(offsets), pooling, weights)


@pytest.mark.parametrize("form", [merge, plain_merge])
def test_nothing_is_written_outside(form: Any) -> None:
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=f"row {bad}; expected 0 to 2"):
            form(torch.zeros(2, WIDTH), torch.tensor([0, bad]), None, 3)
        with pytest.raises(IndexError, match=f"row {bad}; expected 0 to 2"):
            form(torch.zeros(1, WIDTH), torch.tensor([0, bad]), torch.tensor([0, 2]), 3)
    with pytest.raises(IndexError):
        gather(torch.zeros(3, WIDTH), torch.tensor([3]))


def test_what_does_not_go_together() -> None:
    source, index, offsets = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="weights with pooling 'mean'"):
        pool(source, index, offsets, "mean", torch.ones(2))
    with pytest.raises(ValueError, match="1 weights for 2 places"):
        pool(source, index, offsets, "sum", torch.ones(1))
    with pytest.raises(ValueError, match="gradients of 2 bags for 1 bags"):
        merge(torch.zeros(2, 3), index, offsets, 2)
    with pytest.raises(ValueError, match='belong to "max"'):
        merge(torch.zeros(1, 3), index, offsets, 2, "max")


def test_no_bags() -> None:
    pooled = pool(torch.zeros(2, 3), torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    assert pooled.values.shape == (0, 3)
    assert merge(torch.zeros(0, 3), torch.empty(0, dtype=torch.int64), torch.tensor([0]), 2).sum() == 0


@pytest.mark.parametrize("width", [3, 16, 24])
@pytest.mark.parametrize("kind", ["rows", "sum", "mean", "weighted", "nothing"])
def test_rows_in_any_order_begin_at_zero_whatever_the_memory_contains(kind: str, width: int) -> None:
    """More rows than are set to 0 at once, of which some come late, some early and some not at all."""
    index = torch.tensor([] if kind == "nothing" else [3, 250, 2, 3, 251, 120, 250], dtype=torch.int64)
    offsets = None if kind in ("rows", "nothing") else torch.tensor([0, 3, 3, 7])
    grad = torch.randn(len(index) if offsets is None else 3, width)
    pooling = "mean" if kind == "mean" else "sum"
    weights = torch.randn(7) if kind == "weighted" else None
    memory = torch.full((1000, width), torch.nan)
    ours = merge(grad, index, offsets, 1000, pooling, weights, out=memory)
    assert ours is memory
    assert torch.equal(ours, plain_merge(grad, index, offsets, 1000, pooling, weights))
