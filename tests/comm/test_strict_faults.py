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
from shardwise.comm.collectives import DONE, TorchTransport, _gather_call, _scatter_call
from shardwise.comm.groups import make_group
from shardwise.comm.world import World
from shardwise.parallel.zero.weight import Weight
from tests.accelerator import pretend
from tests.comm import strict
from tests.comm.test_strict import DEVICE, trained
from tests.ranks import RankPool

BACKEND = DEVICE.split(":")[0] + ":strict"


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, backend="strict", device=DEVICE)
    yield pool
    pool.close()


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


FAULTS: dict[Callable[[Seat], None], tuple[str, ...]] = {
    host_tensor: ("No backend type associated with device type cpu",),
    host_and_device: ("No backend type associated",),
    part_of_a_matrix: ("must be contiguous",),
    other_order: ("'operation': 'all_reduce'", "'operation': 'broadcast'"),
    one_call_less: ("not all have come",),
    other_shape: ("rank 0 is at", "'shape': [2]", "rank 1 at", "'shape': [3]"),
    other_dtype: ("'dtype': 'float16'", "'dtype': 'bfloat16'"),
    other_root: ("'root': 0", "'root': 1"),
    other_counts: ("rank 0 sends 2 elements to rank 1, which expects 3",),
    misnamed_group: ("makes 'misnamed_group of",),
    groups_in_another_order: ("at the same turn",),
    missing_wait: ("poison",),
    buffer_used_again: ("its input of 4 torch.float32 changed",),
    sent_and_changed: ("its tensor of 2 torch.float32 changed",),
    send_without_receiver: ('"send"', "not all have come"),
    receive_without_sender: ('"recv"', "not all have come"),
    both_send_first: ('"operation": "send"', "not all have come"),
    both_ways_in_one_group: ("messages of both directions",),
    message_of_another_size: ("'shape': [2]", "'shape': [3]"),
}


def planted(world: World) -> dict[str, str]:
    """What is said of each fault."""
    said = {}
    for fault in FAULTS:
        seat = Seat(world, fault.__name__)
        dist.all_reduce(ones(1), group=seat.group)
        try:
            # What never comes is waited for in vain; what comes otherwise may take its time on a busy host.
            is_absent = any("not all have come" in each for each in FAULTS[fault])
            with patch.object(strict, "PATIENCE_S", 0.5 if is_absent else 20.0):
                fault(seat)
            said[fault.__name__] = ""
        except (strict.Refused, AssertionError) as error:
            said[fault.__name__] = str(error)
        world.barrier()
    return said


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


@pytest.mark.skipif(not pretend.IS_POSSIBLE, reason="torch before 2.13 knows no devices in Python")
@pytest.mark.parametrize("name", OURS)
def test_a_fault_of_ours_is_seen(pair: RankPool, name: str) -> None:
    for said, blocks in pair.run(train_with, name):
        assert OURS[name][3] in said and bool(said) == bool(OURS[name][3]), said
        assert (blocks > 0) == (name == "blocking wait")
