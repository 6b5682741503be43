"""What the strict backend is for: faults that gloo lets pass, or hangs on, each planted once and each seen."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import ShardwiseError
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.groups import make_group
from shardwise.comm.transports import TorchTransport, _gather_call, _scatter_call
from shardwise.comm.world import World
from shardwise.parallel.zero.weight import Weight
from tests.accelerator import pretend
from tests.comm import strict
from tests.comm.test_strict import DEVICE, trained
from tests.ranks import RankPool

BACKEND = DEVICE.split(":")[0] + ":strict"


@pytest.fixture(scope="module")
def pools() -> Iterator[list[RankPool]]:
    made: list[RankPool] = []
    yield made
    for pool in made:
        pool.close()


@pytest.fixture
def pair(pools: list[RankPool]) -> RankPool:
    """Two ranks; new ones after a call that has failed."""
    if not pools or not pools[-1].is_alive:
        pools.append(RankPool(2, backend="strict", device=DEVICE))
    return pools[-1]


def ones(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype).to(DEVICE)


class Seat:
    """This rank, its group with the other, and a second group for the way back."""

    def __init__(self, world: World, name: str):
        self.me, self.other = world.rank, 1 - world.rank
        self.name = name
        self.group: Any = make_group(f"{name}/up", (0, 1), BACKEND, 60)
        self.back: Any = make_group(f"{name}/down", (0, 1), BACKEND, 60)


def host_tensor(seat: Seat) -> None:
    group = make_group(
        "of devices alone", (0, 1), DEVICE.split(":")[0].replace("cpu", "meta") + ":deviceonly", 60
    )
    dist.all_reduce(torch.ones(2), group=group)


def host_and_device(seat: Seat) -> None:
    kinds = (ones(4), torch.ones(2)) if DEVICE != "cpu" else (ones(4), torch.ones(2, device="meta"))
    _gather_call()(*kinds, group=seat.group)


def part_of_a_matrix(seat: Seat) -> None:
    dist.all_reduce(ones(6).view(2, 3)[:, :2], group=seat.group)


def other_order(seat: Seat) -> None:
    calls = [lambda: dist.all_reduce(ones(2), group=seat.group, async_op=True)]
    calls.append(lambda: dist.broadcast(ones(2), 0, group=seat.group, async_op=True))
    works: list[Any] = [call() for call in (calls if seat.me else calls[::-1])]
    for work in works:
        work.wait()


def one_call_less(seat: Seat) -> None:
    dist.all_reduce(ones(2), group=seat.group)
    if seat.me == 0:
        dist.all_reduce(ones(3), group=seat.group)


def other_shape(seat: Seat) -> None:
    dist.all_reduce(ones(2 + seat.me), group=seat.group)


def other_dtype(seat: Seat) -> None:
    dist.all_reduce(ones(2, torch.bfloat16 if seat.me else torch.float16), group=seat.group)


def other_root(seat: Seat) -> None:
    dist.broadcast(ones(2), seat.me, group=seat.group)


def other_counts(seat: Seat) -> None:
    goes, comes = (([1, 2], [1, 1]), ([1, 1], [3, 1]))[seat.me]
    dist.all_to_all_single(ones(sum(comes)), ones(sum(goes)), comes, goes, group=seat.group)


def misnamed_group(seat: Seat) -> None:
    make_group(f"{seat.name} of {seat.me}", (0, 1), BACKEND, 60)


def groups_in_another_order(seat: Seat) -> None:
    for way in ("there", "back")[:: 1 - 2 * seat.me]:
        make_group(f"{seat.name}/{way}", (0, 1), BACKEND, 60)


def missing_wait(seat: Seat) -> None:
    total = ones(2)
    work = dist.all_reduce(total, group=seat.group, async_op=True)
    read = total.sum().item()
    assert work is not None
    work.wait()
    assert read == 4, f"poison: {read}"


def buffer_used_again(seat: Seat) -> None:
    slot, part = ones(4), ones(2)
    work: Any = _scatter_call()(part, slot, group=seat.group, async_op=True)
    slot.zero_()
    work.wait()


def sent_and_changed(seat: Seat) -> None:
    if seat.me == 0:
        sent = ones(2)
        work: Any = dist.isend(sent, 1, group=seat.group)
        sent.add_(1)
        work.wait()
    else:
        dist.recv(ones(2), 0, group=seat.group)


def send_without_receiver(seat: Seat) -> None:
    if seat.me == 0:
        work: Any = dist.isend(ones(2), 1, group=seat.group)
        work.wait()


def receive_without_sender(seat: Seat) -> None:
    if seat.me == 0:
        dist.recv(ones(2), 1, group=seat.group)


def both_send_first(seat: Seat) -> None:
    """gloo, which buffers, lets it pass."""
    ways = (seat.group, seat.back)[:: 1 - 2 * seat.me]
    dist.send(ones(2), seat.other, group=ways[0])
    dist.recv(ones(2), seat.other, group=ways[1])


def both_ways_in_one_group(seat: Seat) -> None:
    if seat.me == 0:
        dist.send(ones(2), 1, group=seat.group)
        dist.recv(ones(2), 1, group=seat.group)
    else:
        dist.recv(ones(2), 0, group=seat.group)
        dist.send(ones(2), 0, group=seat.group)


def message_of_another_size(seat: Seat) -> None:
    if seat.me == 0:
        dist.send(ones(2), 1, group=seat.group)
    else:
        dist.recv(ones(3), 0, group=seat.group)


def first_uses_in_another_order(seat: Seat) -> None:
    """The host waits in each for the other, whatever it waits for later."""
    groups: list[Any] = [make_group(f"{seat.name}/{way}", (0, 1), BACKEND, 60) for way in ("there", "back")]
    works: list[Any] = [
        dist.all_reduce(ones(2), group=group, async_op=True) for group in groups[:: 1 - 2 * seat.me]
    ]
    for work in works:
        work.wait()


def swapped_communicators(seat: Seat) -> None:
    """Both are connected, and both operations are alike: each rank would get the other one's sum."""
    dist.all_reduce(ones(2), group=seat.back)
    works: list[Any] = [
        dist.all_reduce(ones(2), group=group, async_op=True)
        for group in (seat.group, seat.back)[:: 1 - 2 * seat.me]
    ]
    for work in works:
        work.wait()


def one_waits_for_the_other(seat: Seat) -> None:
    """On a device each operation begins behind what its stream waits for: the host goes on, and the streams do not."""
    third: Any = make_group(f"{seat.name}/between", (0, 1), BACKEND, 60)
    for group in (seat.back, third):
        dist.all_reduce(ones(1), group=group)
    torch.accelerator.synchronize()
    calls: list[Callable[[], Any]] = [
        lambda: (dist.isend if seat.me == 0 else dist.irecv)(ones(2), seat.other, group=third),
        lambda: dist.all_reduce(ones(3), group=seat.back, async_op=True),
    ]
    for call in calls[:: 1 - 2 * seat.me]:
        call().wait()


def receive_read_too_early(seat: Seat) -> None:
    if seat.me == 0:
        dist.send(ones(2), 1, group=seat.group)
    else:
        came = ones(2)
        work: Any = dist.irecv(came, 0, group=seat.group)
        read = came.sum().item()
        work.wait()
        assert read == 2, f"poison: {read}"


def read_by_a_host_that_is_ahead(seat: Seat) -> None:
    """What has no part in the device's order reads the memory: ``wait`` has made the stream wait, not the host."""
    total = ones(2)
    work: Any = dist.all_reduce(total, group=seat.group, async_op=True)
    work.wait()
    memory = pretend.on_host(total) if pretend.is_on_device(total) else total
    read = float(memory.numpy()[0])
    assert total.sum().item() == 4
    assert read == 2, f"poison: {read}"


def other_inner_shape(seat: Seat) -> None:
    """As many elements for each rank, in rows of another width."""
    shape = (4, 3) if seat.me else (6, 2)
    given = ones(12).view(shape)
    dist.all_to_all_single(ones(12).view(shape), given, group=seat.group)


def tags_mixed_up(seat: Seat) -> None:
    """gloo finds each message by its tag; NCCL has none, and hands them over in their order."""
    for tag in (1, 2)[:: 1 - 2 * seat.me]:
        if seat.me == 0:
            dist.send(ones(2), 1, group=seat.group, tag=tag)
        else:
            dist.recv(ones(2), 0, group=seat.group, tag=tag)


def _batch(seat: Seat, *sizes: int) -> None:
    operations = [
        dist.P2POp(dist.isend, ones(sizes[0]), seat.other, group=seat.group),
        dist.P2POp(dist.irecv, ones(sizes[1]), seat.other, group=seat.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def batch_of_another_size(seat: Seat) -> None:
    _batch(seat, *((3, 2) if seat.me else (2, 4)))


def batch_of_one_rank(seat: Seat) -> None:
    if seat.me == 0:
        _batch(seat, 2, 2)


def narrow_sum(seat: Seat) -> None:
    """256 + 1 is 256 in bf16: a sum that is promised in fp32 may not be left to the backend."""
    part = torch.full((2,), (1.0, 256.0)[seat.me], dtype=torch.bfloat16).to(DEVICE)
    dist.all_reduce(part, group=seat.group)
    found = part.float().sum().item()
    assert found == 514, f"rounded to {found}"


FAULTS: dict[Callable[[Seat], None], tuple[str, ...]] = {
    host_tensor: ("No backend type associated with device type cpu",),
    host_and_device: ("No backend type associated",),
    part_of_a_matrix: ("must be contiguous",),
    other_order: ("'operation': 'all_reduce'", "'operation': 'broadcast'"),
    one_call_less: ("not all have come",),
    other_shape: ("rank 0 is at", "'shape': [2]", "rank 1 at", "'shape': [3]"),
    other_dtype: ("'dtype': 'float16'", "'dtype': 'bfloat16'"),
    other_root: ("'root': 0", "'root': 1"),
    other_counts: ("rank 0 sends 2 rows to rank 1, which expects 3",),
    misnamed_group: ("makes 'misnamed_group of",),
    groups_in_another_order: ("at the same turn",),
    missing_wait: ("poison",),
    buffer_used_again: ("its input of 4 torch.float32 changed",),
    sent_and_changed: ("its tensor of 2 torch.float32 changed",),
    send_without_receiver: ('"send"', "not all have come"),
    receive_without_sender: ('"recv"', "not all have come"),
    both_send_first: ('"send"', "not all have come"),
    both_ways_in_one_group: ("messages of both directions",),
    message_of_another_size: ("'shape': [2]", "'shape': [3]"),
    first_uses_in_another_order: ('"first use"', "not all have come"),
    swapped_communicators: ("'turn': 3", "'turn': 4"),
    one_waits_for_the_other: ("not all have come",),
    receive_read_too_early: ("poison",),
    read_by_a_host_that_is_ahead: ("poison",),
    other_inner_shape: ("'inner': [2]", "'inner': [3]"),
    tags_mixed_up: ("'tag': 1", "'tag': 2"),
    batch_of_another_size: ("'shape': [2]", "'shape': [4]"),
    batch_of_one_rank: ("batch of messages", "not all have come"),
    narrow_sum: ("rounded to 512",),
}


def planted(world: World) -> dict[str, str]:
    """What is said of each fault."""
    said = {}
    for fault in FAULTS:
        seat = Seat(world, fault.__name__)
        dist.all_reduce(ones(1), group=seat.group)
        said[fault.__name__] = ""
        try:
            # What never comes is waited for in vain; what comes otherwise may take its time on a busy host.
            is_absent = any("not all have come" in each for each in FAULTS[fault])
            with patch.object(strict, "patience_s", lambda s=0.5 if is_absent else 60.0: s):
                try:
                    fault(seat)
                finally:
                    settle()
        except (strict.Refused, AssertionError) as error:
            said[fault.__name__] = str(error)
        world.barrier()
    return said


def settle() -> None:
    """Wait for the device, as often as an operation on it has failed; the first failure is raised."""
    first = None
    while True:
        try:
            torch.accelerator.synchronize() if DEVICE != "cpu" else None
            break
        except strict.Refused as error:
            first = first or error
    if first is not None:
        raise first


def right(world: World) -> list[float]:
    """What is right: batches in both directions, tags that agree, 16-bit sums as a ring's, rows of one width."""
    seat, found = Seat(world, "right"), []
    came = ones(3)
    operations = [
        dist.P2POp(dist.irecv, came, seat.other, group=seat.group, tag=7),
        dist.P2POp(dist.isend, ones(3) * (2 + seat.me), seat.other, group=seat.group, tag=7),
    ]
    dist.all_reduce(ones(1), group=seat.group)
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found.append(came.sum().item())
    rows = torch.arange(12.0).view(6, 2).to(DEVICE)
    exchanged = ones(12).view(6, 2)
    dist.all_to_all_single(exchanged, rows, group=seat.group)
    found.append(exchanged.sum().item())
    return found


def test_what_is_right_passes(pair: RankPool) -> None:
    assert pair.run(right) == [[9.0, 2 * (0.0 + 1 + 2 + 3 + 4 + 5)], [6.0, 2 * (6.0 + 7 + 8 + 9 + 10 + 11)]]


def test_a_ring_rounds_at_every_hop() -> None:
    addends = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 256.0, 1.0, 1.0)]
    assert strict.ring_sum(addends, 0).item() == 256 and strict.ring_sum(addends, 3).item() == 256
    assert strict.ring_sum(addends, 1).item() == 260, "1 + 1 + 1, then 256, rounded once"
    assert sum(each.float() for each in addends).item() == 259  # type: ignore[union-attr]


def test_every_fault_is_seen(pair: RankPool) -> None:
    by_rank = pair.run(planted)
    for fault, words in FAULTS.items():
        said = [each[fault.__name__] for each in by_rank]
        assert any(all(word in text for word in words) for text in said), (fault.__name__, said)


# The same in the package itself -------------------------------------------------------------------------------------

_finish_unshard, _all_gather = Weight.finish_unshard, TorchTransport.all_gather


def weight_not_waited_for(weight: Weight) -> None:
    weight._gathering = DONE
    _finish_unshard(weight)


def shard_changed_in_flight(transport: TorchTransport, output: Tensor, shard: Tensor, *args: Any) -> Any:
    pending = _all_gather(transport, output, shard, *args)
    shard.add_(1)
    return pending


def waits_with_a_deadline(
    transport: TorchTransport, works: list[Any], timeout_s: float, tensor: Tensor
) -> None:
    for work in works:
        work.wait(timedelta(seconds=timeout_s))


OURS: dict[str, tuple[Any, str, Any, str]] = {
    "missing wait": (Weight, "finish_unshard", weight_not_waited_for, "not finite"),
    "early reuse": (
        TorchTransport,
        "all_gather",
        shard_changed_in_flight,
        "changed between start and wait",
    ),
    "blocking wait": (TorchTransport, "_wait", waits_with_a_deadline, ""),
}


def train_with(world: World, name: str) -> tuple[str, int]:
    """What an engine says of the fault, and how many waits stopped the host."""
    strict.blocks.clear()
    place, method, wrong, _ = OURS[name]
    said = ""
    with patch.object(place, method, wrong):
        try:
            trained(world.among((0, 1)), {"zero": {"stage": 3}, "check_first_step": "off"})
        except ShardwiseError as error:
            said = str(error)
    return said, sum(strict.blocks.values())


def sum_in_the_wire_dtype(
    transport: TorchTransport, shard_out: Tensor, full: Tensor, timeout_s: float, accumulate: bool
) -> PendingCollective:
    """The backend's own reduce-scatter, in bf16, where the sum is promised in fp32."""
    received = torch.empty_like(shard_out, dtype=full.dtype)
    work: Any = _scatter_call()(received, full, group=transport._open_group, async_op=True)

    def compute() -> None:
        shard_out.add_(received) if accumulate else shard_out.copy_(received)

    return transport._waiting([work], timeout_s, full, compute)


def norms_in_bf16(world: World) -> tuple[list[float], list[float]]:
    """Norms of gradients with the right sum and with the narrow one."""
    config = {"zero": {"stage": 2}, "precision": "bf16"}
    right = trained(world.among((0, 1)), config)
    with patch.object(TorchTransport, "_exchange_then_sum", sum_in_the_wire_dtype):
        return right, trained(world.among((0, 1)), config)


@pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python")
def test_a_sum_in_bf16_is_not_one_in_fp32(pair: RankPool) -> None:
    for right, narrow in pair.run(norms_in_bf16):
        assert right != narrow and right == pytest.approx(narrow, rel=2e-2)


@pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python")
@pytest.mark.parametrize("name", OURS)
def test_a_fault_of_ours_is_seen(pair: RankPool, name: str) -> None:
    for said, blocks in pair.run(train_with, name):
        assert OURS[name][3] in said and bool(said) == bool(OURS[name][3]), said
        assert (blocks > 0) == (name == "blocking wait")
