"""Each dual's backward is the transpose of its forward: sum of <y, dy> over the ranks = sum of <x, dx>."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.world import World
from tests.parallel.tensor.whole import tensor_group

B, T, D = 2, 8, 3


def given(rank: int, seed: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(B, length, D, generator=generator, dtype=torch.float64)


def forward_of(name: str, x: list[Tensor], rank: int) -> Tensor:
    """What the dual must give rank ``rank`` where the ranks hold ``x``."""
    size = len(x)
    if name == "copy":
        return x[rank]
    if name == "reduce":
        return sum(x[1:], x[0])
    if name in ("gather", "join"):
        return torch.cat(x, 1)
    whole = x[rank] if name == "cut" else sum(x[1:], x[0])
    return whole.chunk(size, 1)[rank]


BACKWARD = {
    "copy": "reduce",
    "reduce": "copy",
    "gather": "scatter",
    "scatter": "gather",
    "cut": "join",
    "join": "cut",
}


def both_ways(world: World, name: str, strided: bool) -> list[bool]:
    group = tensor_group(world)
    lengths = {"gather": T // world.size, "join": T // world.size}
    x = [given(rank, 0, lengths.get(name, T)) for rank in range(world.size)]
    leaf = x[group.index].clone()
    if strided:
        leaf = leaf.mT.contiguous().mT
    leaf.requires_grad_()
    y = getattr(duals, name)(leaf, ExchangeSite(group, "a test"))
    grads = [given(rank, 1, y.shape[1]) for rank in range(world.size)]
    grad = grads[group.index].clone()
    y.backward(grad.mT.contiguous().mT if strided else grad)
    assert leaf.grad is not None
    return [
        torch.allclose(y, forward_of(name, x, group.index), rtol=0, atol=1e-14),
        torch.allclose(leaf.grad, forward_of(BACKWARD[name], grads, group.index), rtol=0, atol=1e-14),
        torch.equal(leaf.detach(), x[group.index]),
        torch.equal(grad, grads[group.index]),
    ]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_backward(ranks: Any, size: int, name: str, strided: bool) -> None:
    """Also that neither the input nor the incoming gradient is written into, whatever its strides."""
    for report in ranks(size).run(both_ways, name, strided):
        assert all(report), report


def counted(world: World, name: str) -> dict[Any, Any]:
    group = tensor_group(world)
    lengths = {"gather": T // world.size, "join": T // world.size}
    leaf = given(group.index, 0, lengths.get(name, T)).requires_grad_()
    getattr(duals, name)(leaf, ExchangeSite(group, "a test")).sum().backward()
    return dict(group.traffic.counts)


@pytest.mark.parametrize("name", BACKWARD)
def test_the_cut_sequence_sends_what_the_whole_one_does(ranks: Any, name: str) -> None:
    """An all-reduce counts 2 (N-1)/N, the gather and the scatter that take its place together as much."""
    sent = sum(count.elements for count in ranks(2).run(counted, name)[0].values())
    halves = {"copy": 2, "reduce": 2, "gather": 2, "scatter": 2, "cut": 1, "join": 1}
    assert sent == halves[name] * B * T * D // 2


def same_bits(world: World) -> list[Any]:
    group = tensor_group(world)
    x = given(group.index, 2, T).to(torch.float32)
    return [duals.reduce(x, ExchangeSite(group, "a test")).tolist(), int(group.traffic.sequence)]


def test_a_sum_has_the_same_bits_on_every_rank(ranks: Any) -> None:
    """And activations leave no mark in what data-parallel ranks compare: their sequences may differ in length."""
    results = ranks(4).run(same_bits)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 0
