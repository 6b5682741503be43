"""The scales of weights that are gathered in fp8: of shards, of padding, of changed weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.parallel.zero.scales import WeightScales
from shardwise.plan.mesh import Mesh
from shardwise.precision.fp8 import Float8Products, largest_over
from shardwise.precision.policy import PrecisionPolicy

E4M3 = 448.0


class Held:
    """A weight of which this rank has some pieces."""

    changes = 0

    def __init__(self, *pieces: Tensor | None) -> None:
        self.pieces = list(pieces)

    def shard_pieces(self) -> list[Tensor | None]:
        return self.pieces

    def numbers_of(self, place: int) -> tuple[Tensor, Tensor]:
        raise UsageError("released")


def scales_of(*groups: Group) -> WeightScales:
    products = Float8Products(PrecisionPolicy(linear="fp8", fp8_emulate=True))
    return WeightScales(groups, products, torch.device("cpu"))


def test_scales_follow_the_largest_number_of_each_weight() -> None:
    scales = scales_of(Group.alone("dp_shard"))
    first = scales.add(Held(torch.tensor([1.0, -4.0]), None), 2)
    second = scales.add(Held(torch.tensor([0.5], dtype=torch.bfloat16)), 1)
    assert first.agree()[0].item() == E4M3 / 4
    assert second.agree().tolist() == [E4M3 / 0.5]
    numbers = first.numbers(torch.tensor([1.0, -4.0, 0.3]), first.agree()[0])
    assert numbers.dtype == torch.float8_e4m3fn
    assert numbers.float().tolist() == [112.0, -448.0, 32.0], "33.6 lies between 32 and 36"


def test_scales_are_agreed_once_for_each_change() -> None:
    held = Held(torch.tensor([2.0]))
    scales = scales_of(Group.alone("dp_shard"))
    own = scales.add(held, 1)
    before = own.agree()
    held.pieces = [torch.tensor([8.0])]
    assert torch.equal(own.agree(), before), "nothing said that the weight has changed"
    own.forget()
    assert (own.agree().item(), own.changes) == (E4M3 / 8, 1)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_weights_without_a_finite_maximum(value: float) -> None:
    """A weight of zeros has a finite scale; one of NaN makes the products NaN, which the step reports."""
    own = scales_of(Group.alone("dp_shard")).add(Held(torch.tensor([value, value])), 1)
    scale = own.agree()[0]
    numbers = own.numbers(torch.tensor([value]), scale).float()
    assert bool((numbers / scale).isnan()) == (value != 0)


def of_two_ranks(world: Any) -> list[float]:
    group = world.group(Mesh(dp_shard=2), "dp_shard", CommPolicy(), StepClock(30.0), Traffic())
    values = torch.tensor([[1.0, 5.0], [3.0, 2.0]][world.rank])
    return largest_over(values, [group, Group.alone("tp")], "the test").tolist()


def test_ranks_agree_on_the_largest_of_their_pieces(ranks: Any) -> None:
    assert ranks(2).run(of_two_ranks) == [[3.0, 5.0]] * 2


def test_without_weights_nothing_is_agreed() -> None:
    assert scales_of(Group.alone("dp_shard")).agree().numel() == 0
