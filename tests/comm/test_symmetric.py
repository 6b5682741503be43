"""Products over symmetric memory, with stand-ins for torch's operators: plain collectives of gloo around a product.

The operators themselves need devices whose memory the ranks can map.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm import symmetric
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.transports import NoTransport
from shardwise.comm.world import World
from shardwise.parallel.tensor.overlap import (
    OFF,
    ForwardOverlap,
    ProductSite,
    gathered_product,
    product_over_ranks,
)
from shardwise.plan.mesh import Mesh
from tests.engine import test_model_parallel as dense

Call = tuple[str, list[int], list[int], int, str]


class StandIns:
    """torch's operators on the CPU inside the ``with`` block, which write down their calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []
        """Groups whose memory was made."""

    def __enter__(self) -> "StandIns":
        import torch.distributed._symmetric_memory as operators

        def gathers(
            x: Tensor, weights: list[Tensor], dim: int, group: Any, *, return_A: bool = True
        ) -> tuple[Tensor | None, list[Tensor]]:
            assert len(weights) == 1 and not return_A
            self.calls.append(("gather", list(x.shape), list(weights[0].shape), dim, str(group)))
            return operators._fused_all_gather_matmul_fallback(x, weights, dim, group, return_A=return_A)

        def scatters(x: Tensor, weight: Tensor, reduces: str, dim: int, group: Any) -> Tensor:
            assert reduces == "sum"
            self.calls.append(("scatter", list(x.shape), list(weight.shape), dim, str(group)))
            return operators._fused_matmul_reduce_scatter_fallback(x, weight, reduces, dim, group)

        self._library = torch.library.Library("symm_mem", "IMPL")
        self._library.impl("fused_all_gather_matmul", gathers, "CPU")
        self._library.impl("fused_matmul_reduce_scatter", scatters, "CPU")
        self._patches = [
            patch.object(symmetric, "lacking", lambda group: ""),
            patch.object(symmetric, "_make_memory", self.names.append),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for each in self._patches:
            each.stop()
        self._library._destroy()


def group_of(world: World, transport: str) -> Group:
    clock = StepClock(20.0)
    clock.steps_done = 1
    return world.group(Mesh(tp=world.size), "tp", CommPolicy(transport=transport), clock, Traffic())


def fused(world: World) -> list[Any]:
    """Distances and traffic of both products, with and without; and the calls of the operators."""
    generator = torch.Generator().manual_seed(world.rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = drawn(2, 3, 10), drawn(6, 10), drawn(6), drawn(2, 6, 5), drawn(7, 5)
    found: list[Any] = []
    with StandIns() as stand_ins:
        for overlap in (OFF, ForwardOverlap("symmetric_memory")):
            group = group_of(world, "torch")
            if overlap is not OFF:
                symmetric.begin(group)
            site, (x, up, bias, hidden, down) = ProductSite(group, "a product", overlap), inputs
            results = [
                gathered_product(site, x, up, bias),
                gathered_product(site, x, up, None),
                product_over_ranks(site, hidden, down, True),
                product_over_ranks(site, hidden, down, False),  # torch has no operator for this one
            ]
            found.append((results, dict(group.traffic.counts)))
    (plain, sent), (joint, sent_too) = found
    distances = [float((one - other).norm() / one.norm()) for one, other in zip(plain, joint, strict=True)]
    assert all(
        one.shape == other.shape and other.is_contiguous() for one, other in zip(plain, joint, strict=True)
    )
    return [distances, sent == sent_too, stand_ins.calls, stand_ins.names]


def test_products_and_traffic_are_those_of_plain_collectives(ranks: Any) -> None:
    for distances, is_sent_alike, calls, names in ranks(2).run(fused):
        assert max(distances) <= 1e-14 and is_sent_alike
        (name,) = names
        gather = ("gather", [2, 3, 10], [10, 6], 1, name)
        assert calls == [gather, gather, ("scatter", [2, 6, 5], [5, 7], 1, name)]


def trained(world: World) -> tuple[float, int]:
    """The worst figure of a layout, and the number of calls."""
    layout = dense.Layout(tp=2, transport="torch")
    right = dense.config_of

    def config_of(*args: Any) -> dict[str, Any]:
        config = right(*args)
        config["tensor"]["overlap"] = "symmetric_memory"
        return config

    with StandIns() as stand_ins, patch.object(dense, "config_of", config_of):
        figures = dense.measure(world, layout, "off")
    return max(figures), len(stand_ins.calls)


def test_an_engine_trains_with_them(ranks: Any) -> None:
    for worst, calls in ranks(2).run(trained):
        assert worst <= 1e-10
        # Two gathers and two scatters a block, and the gather of the head, in each of two steps.
        assert calls == 2 * (4 * 4 + 1)


def refused(world: World) -> list[str]:
    found = []
    for transport in ("auto", "torch"):
        config = {
            "mesh": {"tp": 2},
            "tensor": {"overlap": "symmetric_memory"},
            "comm": {"transport": transport},
        }
        with pytest.raises(ConfigError) as caught:
            shardwise.initialize(dense.model_of(dense.Layout()), config, world=world)
        found.append(str(caught.value))
    return found


def test_ranks_without_devices_are_refused_before_any_work(ranks: Any) -> None:
    for texts in ranks(2).run(refused):
        for text in texts:
            assert (
                "tensor.overlap: symmetric_memory needs ranks on CUDA devices; the 2 ranks of axis 'tp'"
                in text
            )


def test_one_rank_and_ranks_that_do_not_exist_need_no_memory() -> None:
    symmetric.begin(Group.alone("tp"))
    symmetric.begin(Group("tp", (0, 1), 0, NoTransport(), StepClock(20.0), Traffic()))
