"""Rows go to their experts and come back: the sums and gradients of one process, with any routing."""

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.flights import PendingCollective
from shardwise.comm.world import World
from shardwise.parallel.expert.cost import expected_rows, row_bytes
from shardwise.parallel.expert.dispatch import Dispatcher
from tests.parallel.expert.layer import (
    WIDTH,
    Given,
    Result,
    compute_with,
    direction,
    given,
    groups,
    levels,
    stacks,
    whole,
)

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


def dispatched(
    world: World,
    layer: Given,
    ep: Group,
    etp: Group,
    rows: int | None = None,
    recompute: bool = False,
    levels: tuple[Group, ...] = (),
    in_blocks: bool = False,
) -> Result:
    """This rank's part of the layer: forward and backward. No expert takes more than ``rows``."""
    own = layer.of(world.rank)
    leaves = [x.clone().requires_grad_() for x in (own.hidden, own.weights, *stacks(layer, ep, etp))]
    hidden, weights, gate_up, down = leaves
    experts = compute_with(gate_up, down)

    def compute(rows_here: Tensor, counts: list[int]) -> Tensor:
        assert rows is None or rows_here.shape[0] <= rows
        return experts(rows_here, counts)

    dispatcher = Dispatcher(ep, etp, layer.gate_up.shape[0], rows, levels=levels)
    # Where in blocks, in the smallest that do.
    room = int(torch.bincount(own.index[own.index >= 0], minlength=1).max()) if in_blocks else None
    routes = dispatcher.routes(own.index, room) if recompute or in_blocks else None

    def forward(hidden: Tensor, weights: Tensor) -> Tensor:
        return dispatcher(hidden, own.index, weights, compute, routes)

    out = checkpoint(forward, hidden, weights, use_reentrant=False) if recompute else forward(hidden, weights)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, direction(out)))


def distance(world: World, layer: Given, found: Result, ep: Group, etp: Group) -> float:
    """How far this rank's part is from the whole layer's, at most."""
    one = whole(layer)
    own = Given(one.hidden, layer.index, one.weights, one.gate_up, one.down, layer.sizes)
    expected = [one.out.split(layer.sizes)[world.rank], *own.of(world.rank)[:3:2], *stacks(own, ep, etp)]
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, expected, strict=True))


def distances(
    world: World,
    ep: int,
    etp: int,
    delay_s: float = 0.0,
    rows: int | None = None,
    recompute: bool = False,
    hosts: tuple[int, ...] = (),
    in_blocks: bool = False,
) -> dict[str, float]:
    here = groups(world, ep, etp, delay_s)
    hops = levels(world, here[0], hosts)
    return {
        name: distance(world, layer, dispatched(world, layer, *here, rows, recompute, hops, in_blocks), *here)
        for name, layer in cases(ep * etp).items()
        if rows is None or name in ("ragged", "one rank", "one token")
    }


@pytest.mark.parametrize("rows", [None, 3])
def test_one_process(rows: int | None) -> None:
    assert max(distances(World(0, 1), 1, 1, rows=rows).values()) <= TOLERANCE


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_exact_with_any_routing(ranks: Any, ep: int, etp: int) -> None:
    for found in ranks(ep * etp).run(distances, ep, etp):
        assert max(found.values()) <= TOLERANCE, found


def test_exact_where_messages_are_late(ranks: Any) -> None:
    for found in ranks(2).run(distances, 2, 1, 0.003):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(("ep", "etp", "rows"), [(2, 1, 5), (4, 1, 9), (2, 2, 9)])
def test_exact_in_rounds(ranks: Any, ep: int, etp: int, rows: int) -> None:
    for found in ranks(ep * etp).run(distances, ep, etp, 0.0, rows):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("rows", [None, 5])
def test_exact_where_all_of_it_runs_again(ranks: Any, rows: int | None) -> None:
    """A rank without rows ends its recomputation where the others do."""
    for found in ranks(2).run(distances, 2, 1, 0.0, rows, True):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(("rows", "recompute"), [(None, False), (None, True), (9, False)])
def test_exact_in_two_levels(ranks: Any, rows: int | None, recompute: bool) -> None:
    for found in ranks(4).run(distances, 4, 1, 0.001, rows, recompute, (0, 0, 1, 1)):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("ep", "etp", "recompute", "hosts"),
    [(2, 1, False, ()), (2, 1, True, ()), (1, 2, False, ()), (2, 2, False, ()), (4, 1, False, (0, 0, 1, 1))],
)
def test_exact_in_blocks(ranks: Any, ep: int, etp: int, recompute: bool, hosts: tuple[int, ...]) -> None:
    for found in ranks(ep * etp).run(distances, ep, etp, 0.0, None, recompute, hosts, True):
        assert max(found.values()) <= TOLERANCE, found


def test_exact_in_blocks_on_one_rank() -> None:
    assert max(distances(World(0, 1), 1, 1, in_blocks=True).values()) <= TOLERANCE


def beyond_blocks(world: World) -> str:
    """A pass with more tokens than the first."""
    dispatcher = Dispatcher(*groups(world, 2, 1), EXPERTS, name="blocks.3.mlp")
    dispatcher.routes(drawn(6, 2), 6)
    dispatcher.routes(drawn(5, 2), 5)
    with pytest.raises(UsageError) as caught:
        dispatcher.routes(drawn(7 + world.rank, 2), 6)
    return str(caught.value)


def test_rows_that_exceed_the_blocks_are_refused(ranks: Any) -> None:
    said = ranks(2).run(beyond_blocks)[1]
    assert said.startswith("blocks.3.mlp: a microbatch of 8 tokens here") and "made for 6 and 6" in said


def at_two_layers(world: World, tags: tuple[int, int]) -> list[bool]:
    """Which tokens' results are NaN where each rank is at the layer of its tag; NCCL looks at no names."""
    ep, etp = groups(world, 2, 1)
    layer = cases(2)["drawn"]
    own, dispatcher = layer.of(world.rank), Dispatcher(ep, etp, EXPERTS)
    compute = compute_with(*stacks(layer, ep, etp))
    with patch.object(Dispatcher, "_tag", tags[world.rank]):
        out = dispatcher(own.hidden, own.index, own.weights, compute, dispatcher.routes(own.index, 6))
    return out.isnan().any(1).tolist()


def test_blocks_of_another_layer_are_no_numbers(ranks: Any) -> None:
    """No host reads who sent what, so that the device sees it."""
    assert ranks(2).run(at_two_layers, (7, 7)) == [[False] * 6] * 2
    assert ranks(2).run(at_two_layers, (7, 65535)) == [[True] * 6] * 2


class Sent(NamedTuple):
    """Over all ranks, once summed."""

    bytes: int
    """That all_to_all sent."""
    rows: int
    crossed: int
    expected: int
    """Rows, by each token's experts."""
    expected_crossed: int


def sent(world: World, width: int, top_k: int, tokens: int, hosts: tuple[int, ...]) -> Sent:
    ep, etp = groups(world, world.size, 1)
    hops = levels(world, ep, hosts)
    layer = given(drawn(tokens * world.size, top_k), [tokens] * world.size, EXPERTS, width)
    dispatched(world, layer, ep, etp, levels=hops)
    counts = ep.traffic.counts
    sent_bytes = sum(count.bytes for (operation, *_), count in counts.items() if operation == "all_to_all")
    own = layer.of(world.rank).index
    routes = Dispatcher(ep, etp, EXPERTS, levels=hops).routes(own)
    goes_to = [{int(e) * world.size // EXPERTS for e in token} for token in own]
    if not hops:
        rows = sum(len(each - {world.rank}) for each in goes_to)
        return Sent(sent_bytes, routes.rows_sent, routes.rows_crossed, rows, 0)
    here, place = divmod(world.rank, world.size // 2)
    crossed = sum(len({rank // 2 for rank in each} - {here}) for each in goes_to)
    passed_on = sum(rank % 2 != place for each in goes_to for rank in each)
    return Sent(sent_bytes, routes.rows_sent, routes.rows_crossed, crossed + passed_on, crossed)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0, 0), (0, 0, 1, 1)])
def test_a_row_goes_once_to_each_rank_of_its_experts(ranks: Any, hosts: tuple[int, ...]) -> None:
    """In two levels once to each host."""
    width, top_k, tokens, size = 64, 3, 400, len(hosts)
    found = ranks(size).run(sent, width, top_k, tokens, hosts)
    all_of = Sent(*map(sum, zip(*found, strict=True)))
    if len({*hosts}) == 1:
        assert all(each.rows == each.expected for each in found)
    assert all_of.rows == all_of.expected
    assert [each.crossed for each in found] == [each.expected_crossed for each in found]
    assert all_of.bytes == all_of.rows * row_bytes(width, top_k, 8)
    assert 1 <= all_of.bytes / (8 * 4 * width * all_of.rows) <= 1.05
    wanted = expected_rows(tokens, top_k, EXPERTS, size, len({*hosts}))
    assert all_of.rows / size == pytest.approx(wanted, rel=0.02)
    if all_of.crossed:
        assert all_of.crossed / size == pytest.approx(expected_rows(tokens, top_k, EXPERTS, 2), rel=0.02)


def kept(world: World, width: int, layers: list[Given], rows: int | None) -> list[tuple[int, int]]:
    """How many tensors each layer keeps for its backward pass, and their elements, those of the stacks left out."""
    ep, etp = groups(world, world.size, 1)
    found = []
    for layer in layers:
        tensors: list[Tensor] = []

        def pack(tensor: Tensor, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            dispatched(world, layer, ep, etp, rows)
        activations = {t.untyped_storage().data_ptr(): t.numel() for t in tensors if t.dim() < 3}
        found.append((len(tensors), sum(activations.values())))
    return found


def test_a_rank_without_rows_keeps_as_many_tensors(ranks: Any) -> None:
    found = ranks(2).run(kept, WIDTH, list(cases(2).values()), None)
    assert len({number for each in found for number, _ in each}) == 1


def test_one_rank_that_takes_all_keeps_no_more_than_all_ranks_alike(ranks: Any) -> None:
    """And ``dispatched`` sees that it never takes more than ``rows`` at once."""
    size, tokens, width = 4, 64, 64
    evenly = drawn(size * tokens, 2)
    layers = [given(index, [tokens] * size, EXPERTS, width) for index in (evenly, drawn(size * tokens, 2, 2))]
    rows = int(1.3 * 2 * tokens)
    for (_, alike), (_, all_to_one) in ranks(size).run(kept, width, layers, rows):
        assert all_to_one <= alike


def with_nan(world: World) -> list[bool]:
    ep, etp = groups(world, world.size, 1)
    layer = cases(world.size)["drawn"]
    layer.weights[2] = torch.nan  # a token of rank 0
    found = dispatched(world, layer, ep, etp)
    return found.out.isnan().any(1).tolist()


def test_nan_in_weights_stays_with_its_token(ranks: Any) -> None:
    first, second = ranks(2).run(with_nan)
    assert first == [token == 2 for token in range(6)]
    assert not any(second)


def order_of_calls(world: World, hosts: tuple[int, ...]) -> list[str]:
    """What a pass does, in order: starts and waits of the all-to-alls of ep, and what runs beside them."""
    ep, etp = groups(world, world.size, 1)
    hops = levels(world, ep, hosts)
    layer = cases(world.size)["drawn"]
    own, said = layer.of(world.rank), []

    def watched(group: Group, output: Tensor, *args: Any, **keys: Any) -> PendingCollective:
        pending = start(group, output, *args, **keys)
        said.append("start")

        def wait() -> None:
            said.append("wait")
            pending.wait()

        return PendingCollective(wait)

    def beside() -> None:
        said.append("beside")
        shared.append(hidden * 2)
        shared[0].register_hook(lambda grad: said.append("beside, backward"))

    start, shared = Group.all_to_all, []
    hidden = own.hidden.clone().requires_grad_()
    dispatcher = Dispatcher(ep, etp, EXPERTS, levels=hops)
    with patch.object(Group, "all_to_all", watched):
        out = dispatcher(hidden, own.index, own.weights, compute_with(*stacks(layer, ep, etp)), None, beside)
        (out + shared[0]).sum().backward()
    return said


def test_shared_experts_run_beside_the_exchange(ranks: Any) -> None:
    """Rows, weights and numbers travel in one all-to-all a hop; a pass has four, of which two wait for nothing."""
    one = ["start", "wait"]
    beside = [["start", each, "wait"] for each in ("beside", "beside, backward")]
    for said in ranks(2).run(order_of_calls, (0, 0)):
        assert said == [*beside[0], *one, *one, *beside[1]]
    for said in ranks(4).run(order_of_calls, (0, 0, 1, 1)):
        assert said == [*beside[0], *one, *one * 2, *one * 2, *one, *beside[1]]


@pytest.mark.parametrize("rows", [None, 3])
def test_what_runs_beside_runs_once(rows: int | None) -> None:
    layer = cases(1)["drawn"]
    calls: list[str] = []
    alone = Dispatcher(Group.alone("ep"), Group.alone("etp"), EXPERTS, rows)
    hidden = layer.hidden.clone().requires_grad_()
    compute = compute_with(layer.gate_up, layer.down)
    alone(hidden, layer.index, layer.weights, compute, None, lambda: calls.append("beside")).sum().backward()
    assert calls == ["beside"]
