"""Exchanges as operators: found by number, one graph for sites of several names, and no site held by its number."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import CommError
from shardwise.comm import duals
from shardwise.comm.collectives import Group
from shardwise.comm.operators import ExchangeSite, site_of
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import NoTransport


def site(what: str, traffic: Traffic | None = None) -> ExchangeSite:
    """A site of two ranks between which nothing moves."""
    return ExchangeSite(Group("tp", (0, 1), 0, NoTransport(), StepClock(20.0), traffic or Traffic()), what)


class Block(nn.Module):
    def __init__(self, what: str, traffic: Traffic) -> None:
        super().__init__()
        self.site = site(what, traffic)

    def forward(self, x: Tensor) -> Tensor:
        inner = duals.copy(x.tanh(), self.site)
        return x + duals.reduce(inner.sin(), self.site)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_of_two_engines_share_a_graph_and_no_group(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traffics = [Traffic(), Traffic()]
    blocks = [Block(f"engine {i}", traffics[i]) for i in (0, 1)]
    x = torch.randn(2, 4, 3, requires_grad=True)
    for calls, block in zip((1, 2), blocks, strict=True):
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        for _ in range(calls):
            compiled(x).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    counted = [sum(count.calls for count in traffic.counts.values()) for traffic in traffics]
    assert counted == [2, 4], (
        "a sum in each forward pass and one in each backward pass, counted in its own engine"
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shapes_that_the_compiler_is_told_are_those_of_the_bodies(dim: int) -> None:
    place = site("a test")
    for shape in ((1, 4, 6), (2, 4, 6)):
        x = torch.randn(shape)
        if dim == 0 and shape[0] % 2:
            continue
        for name in ("gathered", "scattered"):
            operator = getattr(torch.ops.shardwise, name).default
            with torch._subclasses.FakeTensorMode() as mode:
                told = operator(mode.from_tensor(place.tag), 2, mode.from_tensor(x), dim)
            found = operator(place.tag, 2, x, dim)
            assert told.shape == found.shape, (name, shape)
            assert told.is_contiguous() and found.is_contiguous(), (name, shape)


def test_a_site_ends_with_its_layer() -> None:
    place = site("a layer")
    tag, watched = place.tag, weakref.ref(place)
    assert site_of(tag, "summed") is place
    assert copy.deepcopy(place) is place
    del place
    gc.collect()
    assert watched() is None
    with pytest.raises(
        CommError, match="summed: compiled code runs an exchange of a model that no longer exists"
    ):
        torch.ops.shardwise.summed(tag, 2, torch.ones(2))
