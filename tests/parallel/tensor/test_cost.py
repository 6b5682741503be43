"""The closed forms against what is really sent and kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.world import World
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import StyleTable
from shardwise.parallel.tensor.overlap import ForwardOverlap
from shardwise.parallel.tensor.region import ParallelRegion
from tests.models.shapes import tokens
from tests.parallel.tensor.closed_forms import (
    block_calls,
    elements_sent_per_pass,
    kept_activation_elements,
    rest_calls,
)
from tests.parallel.tensor.whole import tensor_group
from tests.passes.closed_forms import BlockShape

SHAPES: dict[str, Any] = dict(width=64, heads=4, head_size=16, context=128, hidden=192, vocab=101)
LLAMA = GptPolicy(**SHAPES, kv_heads=2)
GPT2 = GptPolicy(family="gpt2", **SHAPES)


class Kept:
    """Bytes of the storages that autograd keeps, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, Any] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def one_pass(
    world: World, policy: GptPolicy, layers: int, sequence: bool, pieces: int = 1
) -> tuple[int, dict[Any, Any]]:
    group = tensor_group(world)
    model = Gpt(policy.model_copy(update={"layers": layers}))
    region = ParallelRegion(group, sequence, overlap=ForwardOverlap(pieces))
    make_parallel(model, table_of(model), group, sequence, region)
    given = tokens(2, 128, 101)
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss = model(given, given)
    loss.backward()
    return kept.bytes, dict(group.traffic.counts)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("policy", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("size", [2, 4])
def test_activations_kept_by_a_block(ranks: Any, size: int, policy: GptPolicy, sequence: bool) -> None:
    """Two models that differ by two blocks: what they keep differs by what two blocks keep."""
    few, many = (ranks(size).run(one_pass, policy, layers, sequence)[0][0] for layers in (1, 3))
    p = policy.resolved()
    shape = BlockShape(
        2, 128, p.width, p.heads, p.kv_heads or 0, p.head_size or 0, p.hidden or 0, p.family == "llama"
    )
    expected = 4 * kept_activation_elements(shape, size, sequence)
    assert (many - few) / 2 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("size", "pieces"), [(2, 1), (2, 3), (4, 1)])
def test_collectives_of_a_pass(ranks: Any, size: int, pieces: int, sequence: bool) -> None:
    """In pieces, which do not divide the 128 tokens, there are more calls, and not one element more."""
    counts = ranks(size).run(one_pass, LLAMA, 3, sequence, pieces)[0][1]
    assert {purpose for _, purpose, _ in counts} == {"activations"}
    calls = block_calls(sequence, pieces).times(3) + rest_calls(sequence, pieces)
    found = {operation: count.calls for (operation, *_), count in counts.items()}
    assert found.pop("all_gather", 0) == calls.all_gather + 1
    assert found.pop("all_reduce", 0) == calls.all_reduce
    assert found.pop("reduce_scatter", 0) == calls.reduce_scatter
    assert not found
    sent = sum(count.elements for count in counts.values())
    assert sent == elements_sent_per_pass(3, 2, 128, 64, size, sequence)


class Pair(nn.Module):
    """w2(gelu(w1(x))), and ``behind`` of it."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: Callable[[Tensor], Tensor] = lambda y: y
        generator = torch.Generator().manual_seed(0)
        self.w1, self.w2 = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(nn.functional.gelu(self.w1(x)))
        return self.behind(y)


def pair(world: World, columns_first: bool) -> list[int]:
    """Collectives forward and backward of a pair whose output is the whole pair's."""
    group, model, whole = tensor_group(world), Pair(), Pair()
    words = ("column", "row") if columns_first else ("row", "column")
    make_parallel(model, StyleTable(dict(zip(("w1", "w2"), words, strict=True))), group, sequence=False)
    x = torch.randn(1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    given = ours if columns_first else duals.cut(ours, ExchangeSite(group, "input"), dim=2)
    if not columns_first:
        model.behind = lambda y: duals.join(y, ExchangeSite(group, "output"), dim=2)
    y = model(given)
    forward = sum(count.calls for count in group.traffic.counts.values())
    expected = whole(theirs)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(y, expected) and torch.allclose(ours.grad, theirs.grad)
    return [forward, sum(count.calls for count in group.traffic.counts.values()) - forward]


def test_columns_then_rows_needs_half_the_collectives_of_rows_then_columns(ranks: Any) -> None:
    """GELU acts on features that one rank holds whole; the other order must sum before it and join after it."""
    assert ranks(2).run(pair, True)[0] == [1, 1]
    assert ranks(2).run(pair, False)[0] == [2, 2]
