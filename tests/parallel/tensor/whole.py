"""A cut model beside the whole one: gradients put together as the engine does, by their places."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.parallel.tensor.apply import make_parallel, table_of
from shardwise.parallel.tensor.layout import ParameterPlacement
from shardwise.parallel.tensor.overlap import ForwardOverlap
from shardwise.parallel.tensor.region import ParallelRegion
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Shard, pieces

TOLERANCE = 1e-10


def tensor_group(world: World) -> Group:
    clock = StepClock(20.0)
    clock.steps_done = 1
    return world.group(Mesh(tp=world.size), "tp", CommPolicy(), clock, Traffic())


def put_together(local: Tensor, place: ParameterPlacement, group: Group) -> Tensor:
    """The whole gradient: addends summed, pieces set side by side, those of replicas summed."""
    local = local.contiguous()
    if isinstance(place.gradient, Partial):
        total = local.clone()
    elif isinstance(place.placement, Shard):
        total, start, dim = torch.zeros(place.shape, dtype=local.dtype), 0, place.placement.dim
        for piece in pieces(place.placement, place.shape[dim], group.index, group.size):
            length = piece.stop - piece.start
            total.narrow(dim, piece.start, length).copy_(local.narrow(dim, start, length))
            start += length
        rest = local.narrow(dim, start, local.shape[dim] - start)
        assert not rest.any(), "padding has no gradient"
    else:
        return local
    group.all_reduce(total.view(-1), "a test").wait()
    return total


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def differences(
    world: World,
    model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    sequence: bool,
    rows: Mapping[str, str] | None = None,
    pieces: int = 1,
) -> dict[str, float]:
    """Relative distance of the loss and of every gradient from the whole model's; 0 gradients by absolute size."""
    whole, cut, group = model(), model(), tensor_group(world)
    expected = loss_of(whole)
    expected.backward()
    table = table_of(cut, rows)
    region = ParallelRegion(group, sequence and table.sequence, overlap=ForwardOverlap(pieces))
    placed = make_parallel(cut, table, group, sequence, region)
    loss = loss_of(cut)
    loss.backward()
    found = {"loss": distance(loss.detach(), expected.detach())}
    cut_parameters = dict(cut.named_parameters())
    assert cut_parameters.keys() == dict(whole.named_parameters()).keys()
    scale = max(float(p.grad.norm()) for p in whole.parameters() if p.grad is not None)
    for name, parameter in whole.named_parameters():
        local = cut_parameters[name].grad
        if parameter.grad is None or local is None:
            assert parameter.grad is None and local is None, name
            continue
        total = put_together(local, placed[name], group)
        size = max(float(parameter.grad.norm()), 1e-6 * scale)
        found[name] = float((total - parameter.grad).norm()) / size
    return found


def worst(results: list[dict[str, float]]) -> Any:
    """The largest distance on any rank, with its name."""
    return max((value, name) for result in results for name, value in result.items())
