"""Fixed memory in which Units take turns."""

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.memory.slots import SlotPool

CPU = torch.device("cpu")
WIDE = torch.float64


def test_an_owner_returns_to_its_memory() -> None:
    pool = SlotPool(CPU)
    first = pool.acquire("a", 4, WIDE)
    pool.release("a")
    assert pool.acquire("b", 4, WIDE) is first
    pool.release("b")
    assert pool.acquire("a", 4, WIDE) is first
    assert pool.bytes == 4 * 8


def test_spare_slots_are_taken_in_turns() -> None:
    pool = SlotPool(CPU, ahead_bytes=1)
    seen = []
    for owner in "abcd":
        seen.append(pool.acquire(owner, 4, WIDE).data_ptr())
        pool.release(owner)
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert pool.bytes == 2 * 4 * 8


def test_as_many_are_spare_as_bytes_go_ahead() -> None:
    """Of a size that is larger than that, one."""
    pool = SlotPool(CPU, ahead_bytes=100)
    for elements, spare in ((1, 12), (6, 2), (12, 1), (13, 1)):
        before = pool.bytes
        for owner in range(20):
            pool.acquire((elements, owner), elements, WIDE)
            pool.release((elements, owner))
        assert pool.bytes - before == (1 + spare) * elements * 8


def test_the_slot_released_longest_ago_is_next() -> None:
    pool = SlotPool(CPU, ahead_bytes=1)
    a, b = pool.acquire("a", 4, WIDE), pool.acquire("b", 4, WIDE)
    pool.release("b")
    pool.release("a")
    assert pool.acquire("c", 4, WIDE) is b
    assert pool.acquire("d", 4, WIDE) is a


def test_sizes_and_dtypes_never_share() -> None:
    pool = SlotPool(CPU)
    held = [pool.acquire("a", 4, WIDE), pool.acquire("b", 5, WIDE), pool.acquire("c", 4, torch.float32)]
    assert len({memory.data_ptr() for memory in held}) == 3
    assert pool.bytes == 4 * 8 + 5 * 8 + 4 * 4


def test_two_slots_of_one_size_are_told_apart() -> None:
    """They were once compared by the tensors inside, which fails, or takes the wrong one where those are equal."""
    pool = SlotPool(CPU, ahead_bytes=16)
    held = {owner: pool.acquire(owner, 1, WIDE) for owner in "abc"}
    for owner in "cab":
        pool.release(owner)
    assert pool.acquire("d", 1, WIDE) is held["c"]


def test_a_taken_slot_is_an_error_that_says_what_to_do() -> None:
    pool = SlotPool(CPU)
    pool.acquire("a", 4, WIDE)
    pool.release("a")
    pool.acquire("b", 4, WIDE)
    assert pool.holder_in_the_way("a") == "b"
    with pytest.raises(UsageError, match="a is needed while b.*reuse_buffers: false"):
        pool.acquire("a", 4, WIDE)


def test_a_movable_owner_moves() -> None:
    pool = SlotPool(CPU)
    home = pool.acquire("a", 4, WIDE, movable=True)
    pool.release("a")
    pool.acquire("b", 4, WIDE, movable=True)
    other = pool.acquire("a", 4, WIDE, movable=True)
    assert other is not home
    pool.release("b")
    pool.release("a")
    assert pool.acquire("a", 4, WIDE, movable=True) is other


def test_ranges_that_holders_leave_zero_are_filled_again_only_if_they_change() -> None:
    pool = SlotPool(CPU)
    pool.acquire("a", 4, WIDE)
    assert pool.change_zeros("a", ((3, 4),))
    pool.release("a")
    pool.acquire("b", 4, WIDE)
    assert not pool.change_zeros("b", ((3, 4),)), "a has left them zero"
    pool.release("b")
    pool.acquire("a", 4, WIDE)
    assert pool.change_zeros("a", ((2, 4),))
    pool.release("a")
    pool.acquire("b", 4, WIDE)
    assert pool.change_zeros("b", ((3, 4),)), "a may have written where b wants zeros"


def test_poison() -> None:
    pool = SlotPool(CPU, poison=True)
    memory = pool.acquire("a", 4, WIDE)
    memory.fill_(1)
    pool.release("a")
    assert memory.isnan().all()
    pool.acquire("a", 4, WIDE)
    assert pool.change_zeros("a", ()), "the padding is not what the owner left"
