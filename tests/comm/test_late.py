"""What a late transport is for: faults that gloo and shared memory hide, each planted once."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.peers import PointToPoint
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from tests.comm import late

KINDS = ("shared_memory", "torch")
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def results(world: World, group: Group) -> list[Tensor]:
    """Every collective in every dtype, waited for as one should, several in flight."""
    found, waiting = [], []
    ranks, me = group.size, group.index
    for dtype in DTYPES:
        mine = (torch.arange(6 * ranks) % 5 + me).to(dtype)
        full, parts = torch.zeros(6 * ranks, dtype=dtype), mine[:6].clone()
        full[6 * me : 6 * me + 6] = parts
        inside = full[6 * me : 6 * me + 6]
        waiting += [
            group.all_gather(full, inside, "a"),
            group.all_gather(other := mine.new_empty(12), parts, "b"),
        ]
        total, grown, whole = mine.clone(), mine[:6].clone(), mine.clone()
        waiting += [group.all_reduce(total, "c"), group.reduce_scatter(grown, mine, "d", accumulate=True)]
        waiting += [group.reduce_scatter(whole[6 * me : 6 * me + 6], whole, "e")]
        said, came = mine.clone(), torch.empty(9 - 3 * me, dtype=dtype)
        counts = [[4, 2], [5, 1]]
        came = torch.empty(sum(row[me] for row in counts), dtype=dtype)
        waiting += [
            group.broadcast(said, 1, "f"),
            group.all_to_all(came, mine[: sum(counts[me])], counts, "g"),
        ]
        found += [full, other, total, grown, whole[6 * me : 6 * me + 6], said, came]
    for pending in waiting:
        pending.wait()
    return found


def missing_wait(group: Group, peers: PointToPoint) -> None:
    mine = torch.ones(4)
    group.all_reduce(mine, "weights")
    assert not mine.isnan().any(), "poison"


def read_too_early(group: Group, peers: PointToPoint) -> None:
    whole = torch.zeros(4, dtype=torch.int64)
    pending = group.all_gather(whole, whole[2 * group.index :][:2], "keys")
    largest = int(whole.max())
    pending.wait()
    assert largest < 10, "poison"


def input_used_again(group: Group, peers: PointToPoint) -> None:
    shard, whole = torch.ones(2), torch.zeros(4)
    pending = group.all_gather(whole, shard, "weights")
    shard.mul_(2)
    pending.wait()


def slot_used_again(group: Group, peers: PointToPoint) -> None:
    slot, sums = torch.ones(4), torch.zeros(2)
    first = group.reduce_scatter(sums, slot, "Unit 1")
    slot.fill_(3)  # the gradient of the next Unit
    group.reduce_scatter(torch.zeros(2), slot, "Unit 2").wait()
    first.wait()


def output_written(group: Group, peers: PointToPoint) -> None:
    sums = torch.ones(4)
    pending = group.all_reduce(sums, "gradients")
    sums.zero_()
    pending.wait()


def sent_and_changed(group: Group, peers: PointToPoint) -> None:
    x = torch.ones(3)
    peers.send("", [x], 1 - group.index, "activation", "activations")
    x.add_(1)
    peers.receive(1 - group.index, "activation")
    peers.flush()


def _receive_with(
    group: Group, peers: PointToPoint, between: Callable[[PendingCollective, Tensor], Any]
) -> Tensor:
    """The tensor of a message; ``between`` is called with the receive in flight, and returns what is waited for."""
    followed, empty = peers._followed, peers._empty
    made: list[Tensor] = []

    def make(*kind: Any) -> Tensor:
        made.append(empty(*kind))
        return made[-1]

    def follow(pending: PendingCollective, operation: str, *more: Any) -> PendingCollective:
        found: PendingCollective = between(pending, made[-1]) if operation == "receive" else pending
        return followed(found, operation, *more)

    peers.send("", [torch.ones(3)], 1 - group.index, "activation", "activations")
    with patch.object(peers, "_empty", make), patch.object(peers, "_followed", follow):
        peers.receive(1 - group.index, "activation")
    peers.flush()
    return made[-1]


def received_and_not_waited_for(group: Group, peers: PointToPoint) -> None:
    dropped: list[PendingCollective] = []

    def drop(pending: PendingCollective, _: Tensor) -> PendingCollective:
        dropped.append(pending)
        return DONE

    x = _receive_with(group, peers, drop)
    read = x.sum()
    dropped[0].wait()
    assert not read.isnan(), "poison"


def received_into_and_written(group: Group, peers: PointToPoint) -> None:
    """Memory that a message is still to fill is used for something else."""

    def use(pending: PendingCollective, x: Tensor) -> PendingCollective:
        x.zero_()
        return pending

    _receive_with(group, peers, use)


FAULTS: dict[Callable[[Group, PointToPoint], None], str] = {
    missing_wait: "poison",
    read_too_early: "poison",
    input_used_again: "its shard of 2 torch.float32 changed",
    slot_used_again: "its input of 4 torch.float32 changed",
    output_written: "all_reduce of gradients: its tensor",
    sent_and_changed: "send of activation: its tensor 0",
    received_and_not_waited_for: "poison",
    received_into_and_written: "receive of activation: its tensor 0",
}


def judged(world: World, kind: str) -> tuple[bool, dict[str, tuple[str, str]]]:
    """Whether results are equal to the bit; of each fault, what is said without and with late collectives."""
    said: dict[str, tuple[str, str]] = {}

    def links() -> tuple[Group, PointToPoint, World]:
        part = world.among(range(world.size))
        policy = CommPolicy(transport=kind)  # type: ignore[arg-type]
        group = part.group_among((0, 1), "dp", policy, StepClock(20.0), Traffic())
        return group, part.peers(group, policy), part

    def attempt(fault: Callable[[Group, PointToPoint], None], group: Group, peers: PointToPoint) -> str:
        try:
            fault(group, peers)
        except (CommError, AssertionError) as error:
            return str(error)
        finally:
            group.barrier()
        return ""

    plain, plain_peers, first = links()
    with late.installed():
        delayed, delayed_peers, second = links()
    pairs = zip(results(world, plain), results(world, delayed), strict=True)
    equal = all(torch.equal(a, b) and a.isfinite().all() for a, b in pairs)
    for fault in FAULTS:
        said[fault.__name__] = attempt(fault, plain, plain_peers), attempt(fault, delayed, delayed_peers)
    first.release()
    second.release()
    return equal, said


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_hide_is_seen(ranks: Any, kind: str) -> None:
    for equal, said in ranks(2).run(judged, kind):
        assert equal
        for fault, words in FAULTS.items():
            without, with_it = said[fault.__name__]
            assert words in with_it, (fault.__name__, without, with_it)
        assert sum(not without for without, _ in said.values()) >= 4, said
