"""Rows go to their experts and come back: the sums and gradients of one process, with any routing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.world import World
from shardwise.parallel.expert.cost import elements_sent, expected_rows
from shardwise.parallel.expert.dispatch import Dispatcher
from tests.parallel.expert.layer import Given, Result, compute_with, direction, given, groups, stacks, whole

EXPERTS = 8
TOLERANCE = 1e-12


def drawn(tokens: int, top_k: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    """Of each token ``top_k`` different experts: [tokens, k]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]


def cases(ranks: int) -> dict[str, Given]:
    """Routings of ``ranks`` ranks' tokens."""
    ragged = [3, 0, 11, 1][:ranks]
    alike = [6] * ranks
    dropped = drawn(sum(ragged), 2)
    dropped[::3, 0] = -1
    dropped[1::3] = -1
    return {
        "drawn": given(drawn(sum(alike), 2), alike, EXPERTS),
        "ragged": given(drawn(sum(ragged), 2), ragged, EXPERTS),
        "one expert": given(torch.full((sum(alike), 1), 5), alike, EXPERTS),
        "one rank": given(drawn(sum(alike), 2, experts=2), alike, EXPERTS),
        "one token": given(drawn(1, 2), [1] + [0] * (ranks - 1), EXPERTS),
        "no token": given(drawn(0, 2), [0] * ranks, EXPERTS),
        "every expert": given(drawn(sum(ragged), EXPERTS), ragged, EXPERTS),
        "dropped": given(dropped, ragged, EXPERTS),
        "all dropped": given(torch.full((sum(alike), 2), -1), alike, EXPERTS),
    }


def dispatched(world: World, layer: Given, ep: Group, etp: Group) -> tuple[Result, Dispatcher]:
    """This rank's part of the layer: forward and backward."""
    own = layer.of(world.rank)
    leaves = [x.clone().requires_grad_() for x in (own.hidden, own.weights, *stacks(layer, ep, etp))]
    hidden, weights, gate_up, down = leaves
    dispatcher = Dispatcher(ep, etp, layer.gate_up.shape[0])
    out = dispatcher(hidden, own.index, weights, compute_with(gate_up, down))
    return Result(out.detach(), *torch.autograd.grad(out, leaves, direction(out))), dispatcher


def distance(world: World, layer: Given, found: Result, ep: Group, etp: Group) -> float:
    """How far this rank's part is from the whole layer's, at most."""
    one = whole(layer)
    own = Given(one.hidden, layer.index, one.weights, one.gate_up, one.down, layer.sizes)
    expected = [one.out.split(layer.sizes)[world.rank], *own.of(world.rank)[:3:2], *stacks(own, ep, etp)]
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, expected, strict=True))


def distances(world: World, ep: int, etp: int, delay_s: float) -> dict[str, float]:
    groups_here = groups(world, ep, etp, delay_s)
    return {
        name: distance(world, layer, dispatched(world, layer, *groups_here)[0], *groups_here)
        for name, layer in cases(ep * etp).items()
    }


def test_one_process() -> None:
    assert max(distances(World(0, 1), 1, 1, 0.0).values()) <= TOLERANCE


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_exact_with_any_routing(ranks: Any, ep: int, etp: int) -> None:
    for found in ranks(ep * etp).run(distances, ep, etp, 0.0):
        assert max(found.values()) <= TOLERANCE, found


def test_exact_where_messages_are_late(ranks: Any) -> None:
    for found in ranks(2).run(distances, 2, 1, 0.003):
        assert max(found.values()) <= TOLERANCE, found


def sent(world: World, width: int, top_k: int, tokens: int) -> dict[str, Any]:
    ep, etp = groups(world, world.size, 1)
    layer = given(drawn(tokens * world.size, top_k), [tokens] * world.size, EXPERTS, width)
    dispatched(world, layer, ep, etp)
    counts = ep.traffic.counts
    elements = sum(count.elements for (operation, _), count in counts.items() if operation == "all_to_all")
    own = layer.of(world.rank).index
    others = [{int(e) * world.size // EXPERTS for e in token} - {world.rank} for token in own]
    rows_sent = Dispatcher(ep, etp, EXPERTS).routes(own).rows_sent
    return {"elements": elements, "rows": sum(map(len, others)), "rows_sent": rows_sent}


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_goes_once_to_each_rank_of_its_experts(ranks: Any, size: int) -> None:
    width, top_k, tokens = 64, 3, 400
    found = ranks(size).run(sent, width, top_k, tokens)
    for each in found:
        assert each["rows_sent"] == each["rows"]
    rows, elements = (sum(each[key] for each in found) for key in ("rows", "elements"))
    assert elements == elements_sent(rows, width, top_k)
    assert 1 <= elements / (4 * width * rows) <= 1.05
    assert rows / size == pytest.approx(expected_rows(tokens, top_k, EXPERTS, size), rel=0.02)


def kept_tensors(world: World) -> list[int]:
    """How many tensors each routing keeps for its backward pass."""
    ep, etp = groups(world, world.size, 1)
    numbers = []
    for layer in cases(world.size).values():
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            dispatched(world, layer, ep, etp)
        numbers.append(len(kept))
    return numbers


def test_a_rank_without_rows_keeps_as_many_tensors(ranks: Any) -> None:
    assert len({number for found in ranks(2).run(kept_tensors) for number in found}) == 1


def with_nan(world: World) -> list[bool]:
    ep, etp = groups(world, world.size, 1)
    layer = cases(world.size)["drawn"]
    layer.weights[2] = torch.nan  # a token of rank 0
    found, _ = dispatched(world, layer, ep, etp)
    return found.out.isnan().any(1).tolist()


def test_nan_in_weights_stays_with_its_token(ranks: Any) -> None:
    first, second = ranks(2).run(with_nan)
    assert first == [token == 2 for token in range(6)]
    assert not any(second)
