"""A layer of experts beside the same layer in one process."""

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.kernels.grouped import gated_experts

WIDTH, HIDDEN = 6, 4


class Given(NamedTuple):
    """What all ranks' tokens and a layer of experts are; ``sizes[r]`` tokens are rank r's."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    sizes: list[int]

    def of(self, rank: int) -> "Given":
        """Rank's own tokens, and all experts."""
        cut = [x.split(self.sizes)[rank] for x in (self.hidden, self.index, self.weights)]
        return Given(*cut, self.gate_up, self.down, self.sizes)


class Result(NamedTuple):
    """A layer's output and its gradients."""

    out: Tensor
    hidden: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def given(index: Tensor, sizes: list[int], experts: int, width: int = WIDTH) -> Given:
    """Tokens with the experts ``index`` [tokens, k], of which ``sizes[r]`` are rank r's."""
    generator = torch.Generator().manual_seed(3)
    tokens, k = index.shape
    shapes = [(tokens, width), (tokens, k), (experts, 2 * HIDDEN, width), (experts, width, HIDDEN)]
    hidden, weights, gate_up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return Given(hidden, index, weights, gate_up, down, sizes)


def whole(layer: Given) -> Result:
    """One process, expert by expert, every token through every expert."""
    hidden, weights, gate_up, down = leaves = [
        x.clone().requires_grad_() for x in (layer.hidden, layer.weights, layer.gate_up, layer.down)
    ]
    out = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        gate, up = (hidden @ gate_up[expert].T).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out + torch.where(layer.index == expert, weights, 0).sum(1, keepdim=True) * result
    return Result(out.detach(), *torch.autograd.grad(out, leaves, direction(out)))


def direction(out: Tensor) -> Tensor:
    """A gradient of the output: of every element of a token another."""
    return out.detach().cos() + torch.arange(out.shape[1]) / 7


def stacks(layer: Given, ep: Group, etp: Group) -> tuple[Tensor, Tensor]:
    """This rank's pieces of the stacks; gate and up are cut each by itself."""
    gate, up = layer.gate_up.chunk(ep.size)[ep.index].chunk(2, 1)
    cut = [x.chunk(etp.size, 1)[etp.index] for x in (gate, up)]
    return torch.cat(cut, 1), layer.down.chunk(ep.size)[ep.index].chunk(etp.size, 2)[etp.index]


def compute_with(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, list[int]], Tensor]:
    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return gated_experts(rows, gate_up, down, counts)

    return compute


def groups(world: World, ep: int, etp: int, delay_s: float = 0.0) -> tuple[Group, Group]:
    """Of this rank along ep and etp; etp's ranks are neighbours."""
    clock, traffic = StepClock(20.0, delay_s), Traffic()
    clock.steps_done = 1
    policy = CommPolicy()
    rows = torch.arange(ep * etp).view(ep, etp)
    place = world.rank // etp, world.rank % etp
    kinds = [[tuple(map(int, each)) for each in kind] for kind in (rows.T, rows)]
    along_ep = world.group_among(kinds[0][place[1]], "ep", policy, clock, traffic, kin=kinds[0])
    along_etp = world.group_among(kinds[1][place[0]], "etp", policy, clock, traffic, kin=kinds[1])
    return along_ep, along_etp


def levels(world: World, ep: Group, hosts: tuple[int, ...]) -> tuple[Group, ...]:
    """Those of ``ep``, all ranks of the World, where they pretend to be on ``hosts``; none: on one."""
    with patch.object(world, "hosts", hosts or world.hosts):
        return world.levels([ep.ranks], "ep", CommPolicy(), ep.clock, ep.traffic)
