"""The cross entropy of cut logits: its values, its gradient, its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.world import World
from shardwise.kernels.cross_entropy import plain_cross_entropy
from shardwise.parallel.tensor.loss import vocabulary_cross_entropy, vocabulary_head_loss
from shardwise.plan.placement import Shard, pieces
from tests.parallel.tensor.whole import tensor_group


def given(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 30 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    logits[1, vocabulary // 2] = 600.0  # exp() alone would overflow fp32
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[0] = -100
    return logits.to(dtype), targets


def compare(
    world: World, vocabulary: int, dtype: torch.dtype, all_ignored: bool
) -> tuple[float, float, float]:
    group = tensor_group(world)
    logits, targets = given(7, vocabulary, dtype)
    if all_ignored:
        targets.fill_(-100)
    reference = logits.double().clone().requires_grad_()
    expected = plain_cross_entropy(reference, targets)
    (3 * expected).backward()
    (piece,) = pieces(Shard(0), vocabulary, group.index, group.size)
    local = logits[:, piece.start : piece.stop].clone().requires_grad_()
    loss = vocabulary_cross_entropy(local, targets, piece.start, vocabulary, ExchangeSite(group, "a loss"))
    (3 * loss).backward()
    assert local.grad is not None and reference.grad is not None
    part = reference.grad[:, piece.start : piece.stop]
    gap = float((local.grad.double() - part).abs().max()) if part.numel() else 0.0
    return float((loss.detach() - expected.detach()).abs()), gap, float(loss.detach())


@pytest.mark.parametrize("vocabulary", [3, 5, 64, 101])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str
)
def test_any_vocabulary(ranks: Any, vocabulary: int, dtype: torch.dtype, tolerance: float) -> None:
    """On 4 ranks a vocabulary of 3 or 5 leaves a rank without a column."""
    results = ranks(4).run(compare, vocabulary, dtype, False)
    assert max(loss for loss, _, _ in results) <= tolerance
    assert max(gap for _, gap, _ in results) <= tolerance
    assert len({value for _, _, value in results}) == 1, "the same bits on every rank"


def compare_head(
    world: World, vocabulary: int, dtype: torch.dtype, at_once: bool
) -> tuple[float, float, float]:
    """Largest errors of a head and a loss by tiles: of the loss, of dx (summed over the ranks), of dW."""
    group = tensor_group(world)
    x, weight = (
        torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (7, vocabulary)
    )
    targets = given(7, vocabulary, dtype)[1]
    whole_x, whole = (each.double().clone().requires_grad_() for each in (x, weight))
    expected = plain_cross_entropy(whole_x @ whole.T, targets)
    (3 * expected).backward()
    (piece,) = pieces(Shard(0), vocabulary, group.index, group.size)
    here = slice(piece.start, piece.stop)
    x, local = x.requires_grad_(), weight[here].clone().requires_grad_()
    site = ExchangeSite(group, "x")
    place = (piece.start, vocabulary, site, 2, at_once)
    loss = vocabulary_head_loss(duals.copy(x, site), local, None, targets, *place)
    (3 * loss).backward()
    wanted = (expected.detach(), whole_x.grad, whole.grad[here])  # type: ignore[index]
    errors = [
        (one - other).abs() for one, other in zip((loss.detach(), x.grad, local.grad), wanted, strict=True)
    ]
    return tuple(float(each.max()) if each.numel() else 0.0 for each in errors)  # type: ignore[return-value]


def test_head_and_loss_by_tiles(ranks: Any) -> None:
    for vocabulary, at_once in ((3, True), (11, True), (11, False)):
        results = ranks(4).run(compare_head, vocabulary, torch.float64, at_once)
        assert max(max(each) for each in results) <= 1e-14
    assert max(max(each) for each in ranks(4).run(compare_head, 11, torch.bfloat16, True)) <= 0.03


def test_no_target_is_a_loss_and_a_gradient_of_zero(ranks: Any) -> None:
    assert ranks(2).run(compare, 11, torch.float32, True) == [(0.0, 0.0, 0.0)] * 2


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(world: World, rows: int, vocabulary: int) -> int:
    group = tensor_group(world)
    columns, site = vocabulary // group.size, ExchangeSite(group, "a loss")
    local = torch.zeros(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(rows) % vocabulary
    with LargestTensor() as seen:
        loss = vocabulary_cross_entropy(local, targets, group.index * columns, vocabulary, site)
        loss.backward()
    return seen.elements


def test_memory_grows_with_the_ranks_part_of_the_vocabulary(ranks: Any) -> None:
    """No tensor of the loss is larger than the rank's logits [N, V/tp]; in fp32 only a few rows of them."""
    rows, vocabulary = 256, 8192
    for size in (2, 4):
        assert ranks(size).run(largest, rows, vocabulary)[0] == rows * vocabulary // size
