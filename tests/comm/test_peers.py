"""Messages between ranks: any shape and dtype, in order, named; both wires alike."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError, UsageError
from shardwise.comm.peers import RING, PointToPoint, TorchWire
from shardwise.comm.policy import CommPolicy
from shardwise.comm.shared_ring import CollectiveCall
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic, TrafficCount
from shardwise.comm.world import World
from shardwise.plan.mesh import Mesh
from tests.ranks import RankPool

WIRES = pytest.mark.parametrize("transport", ["torch", "auto"])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def peers_of(world: World, transport: str, timeout_s: float = 30.0) -> PointToPoint:
    clock = StepClock(timeout_s)
    clock.steps_done = 1
    policy = CommPolicy(transport=transport, timeout_s=timeout_s)
    group = world.group(Mesh(pp=world.size), "pp", policy, clock, Traffic())
    return world.peers(group, policy)


def message(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = [(), (0, 3), (number + 1,), (2, 3 * number + 1, 5)]
    return [(torch.randn(s, generator=generator) * 9).to(d) for d in DTYPES for s in shapes]


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(got, wanted, strict=True)
    )


def round_the_ring(world: World, transport: str) -> Any:
    """Every rank sends to the next three messages, and one back, before it receives."""
    peers = peers_of(world, transport)
    here, size = peers.group.index, world.size
    after, before = (here + 1) % size, (here - 1) % size
    for number in range(3):
        peers.send(f"text {number}", message(10 * here + number), after, f"message {number}", "activations")
    peers.send("é" * 4000, message(here)[3:4], before, "back", "gradients")
    report = []
    if size == 2:  # one channel: the order is that of sending
        for number in range(3):
            text, tensors = peers.receive(before, f"message {number}")
            report.append(text == f"text {number}" and same(tensors, message(10 * before + number)))
        text, tensors = peers.receive(after, "back")
        report.append(text == "é" * 4000 and same(tensors, message(after)[3:4]))
    else:
        text, tensors = peers.receive(after, "back")
        report.append(text == "é" * 4000 and same(tensors, message(after)[3:4]))
        for number in range(3):
            text, tensors = peers.receive(before, f"message {number}")
            report.append(text == f"text {number}" and same(tensors, message(10 * before + number)))
    peers.flush()
    return report, dict(peers.group.traffic.counts), peers.group.traffic.sequence


@WIRES
@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_in_order_with_every_shape_and_dtype(ranks: Any, size: int, transport: str) -> None:
    for rank, (report, counts, sequence) in enumerate(ranks(size).run(round_the_ring, transport)):
        assert all(report), report
        sent = [t for number in range(3) for t in message(10 * rank + number)]
        assert counts["send", "activations", "pp"].bytes == sum(t.nbytes for t in sent)
        assert counts["send", "gradients", "pp"] == TrafficCount(1, 10 * 1 + 30 * rank, 8 * (10 + 30 * rank))
        assert sequence == 0, "sends are not what all ranks do alike"


def woken(world: World, backend: str) -> str:
    """The error of rank 0's wait for a header after the wire was given up; without it the ranks' patience ends."""
    group = dist.new_group([0, 1], backend=backend)
    wire = TorchWire(1 - world.rank, group, group)
    told = ""
    if world.rank == 0:
        threading.Timer(0.5, wire.give_up).start()
        with pytest.raises(RuntimeError) as caught:
            wire.receive(CollectiveCall("receive", "a header", 600.0), lambda header: [], lambda: False)
        told = str(caught.value)
    world.barrier()
    dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_wait_for_a_header_ends_with_the_verdict(backend: str) -> None:
    """A group of a device calls its backends "cpu:gloo,cuda:nccl", and its waits went on for comm.timeout_s."""
    pool = RankPool(2)
    try:
        told, _ = pool.run(woken, backend)
    finally:
        pool.close()
    assert told


def both_at_once(world: World, transport: str, rounds: int) -> bool:
    """More than the rings hold, in both directions, before anybody receives; then both read at the same time."""
    peers = peers_of(world, transport)
    other = 1 - peers.group.index
    elements = RING.slots * RING.slot_bytes // 8
    good = True
    for _ in range(rounds):
        for number in range(2):
            mine = torch.arange(elements, dtype=torch.float64) + number + 0.5 * peers.group.index
            peers.send("", [mine], other, f"large {number}", "activations")
        world.barrier()
        for number in range(2):
            (got,) = peers.receive(other, f"large {number}").tensors
            good &= torch.equal(got, torch.arange(elements, dtype=torch.float64) + number + 0.5 * other)
        peers.flush()
    return good


@WIRES
def test_two_ranks_may_send_more_than_there_is_room_for_at_the_same_time(ranks: Any, transport: str) -> None:
    """Once the rest of a message waited for room while both ranks waited for the rest of the other's."""
    assert ranks(2).run(both_at_once, transport, 4) == [True, True]


def out_of_order(world: World, transport: str) -> str:
    peers = peers_of(world, transport)
    if world.rank == 0:
        peers.send("", [torch.ones(2)], 1, "activation of stage 1, microbatch 4", "activations")
        return ""
    try:
        peers.receive(0, "activation of stage 1, microbatch 3")
    except CommError as error:
        return str(error)
    return "nothing was noticed"


@WIRES
def test_another_microbatch_than_expected_is_an_error(transport: str) -> None:
    pool = RankPool(2)
    try:
        text = pool.run(out_of_order, transport)[1]
    finally:
        pool.close()
    assert "rank 1: receive of activation of stage 1, microbatch 3 from rank 0" in text
    assert "is 'activation of stage 1, microbatch 4'" in text


def late(world: World, transport: str) -> str:
    peers = peers_of(world, transport, timeout_s=1.0)
    peers.group.clock.step = 7
    if world.rank == 1:
        time.sleep(1.6)
        return ""
    try:
        peers.receive(1, "gradient of stage 0, microbatch 2")
    except DeadlineError as error:
        return str(error)
    return "nothing was noticed"


@WIRES
def test_a_rank_that_sends_nothing_is_named(transport: str) -> None:
    pool = RankPool(2)
    try:
        text = pool.run(late, transport)[0]
    finally:
        pool.close()
    assert "rank 0: receive of gradient of stage 0, microbatch 2 from rank 1 in step 7" in text
    assert "comm.timeout_s" in text


def to_itself(world: World) -> list[str]:
    peers, texts = peers_of(world, "auto"), []
    for index in (world.rank, 9):
        try:
            peers.send("", [], index, "x", "activations")
        except UsageError as error:
            texts.append(str(error))
    return texts


def test_a_message_to_oneself_or_to_nobody_is_refused(ranks: Any) -> None:
    itself, nobody = ranks(2).run(to_itself)[0]
    assert "it is this rank itself" in itself
    assert "the axis has 2 ranks" in nobody
