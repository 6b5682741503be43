"""What is noted as alike is memory that is alike as a whole, at one version, while a block runs."""

from typing import Any

import torch

from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.plan.mesh import Mesh
from shardwise.tiers.alike import AlikeStorages, key_of
from tests.accelerator.crew import Crew


def test_a_note_is_of_a_whole_storage_at_a_version() -> None:
    alike, x = AlikeStorages(Group.alone("tp")), torch.zeros(4, 6)
    part, spread = torch.zeros(4, 6)[:, :3], torch.zeros(1).expand(1)
    alike.note(x)
    assert not alike.knows(key_of(x)), "no block runs"
    with alike.listening():
        for each in (x.mT, part, spread.expand(3)):
            alike.note(each)
        assert [alike.knows(key_of(each)) for each in (x, x[1:], part, spread)] == [True, True, False, False]
        x.add_(1)
        assert not alike.knows(key_of(x))
    with alike.listening():
        assert not alike.knows((key_of(x)[0], 0)), "another pass"


def test_what_is_saved_inside_a_module_that_is_alike() -> None:
    alike, inside, outside = AlikeStorages(Group.alone("tp")), torch.zeros(3), torch.zeros(3)
    alike.enter()  # and an exception came
    with alike.listening():
        alike.saved(outside)
        alike.enter()
        alike.saved(inside)
        alike.leave()
        alike.saved(outside)
        assert [alike.knows(key_of(each)) for each in (inside, outside)] == [True, False]


def compared(world: Any) -> list[bool]:
    group = world.group(Mesh(tp=2), "tp", CommPolicy(), StepClock(10.0), Traffic())
    alike, found = AlikeStorages(group), []
    words = torch.arange(1003, dtype=torch.uint8).repeat(3)
    for place in (None, 0, 999, 3008):
        mine = words.clone()
        if place is not None:
            mine[place] += world.rank
        found.append(alike.are_alike([mine, words], "words"))
    halves = words[:3008].view(2, -1)
    found.append(alike.are_alike([(halves.flip(0) if world.rank else halves).flatten()], "halves"))
    found.append(alike.are_alike([words[:7] if world.rank else words[:8]], "a longer one"))
    return found


def test_bits_are_compared_as_one_answer() -> None:
    wanted = [True, False, False, False, False, False]
    assert Crew(2, torch.device("cpu")).run(compared) == [wanted, wanted]
