"""Blocks of host memory that state passes through on its way from and to a disk."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.world import join
from shardwise.memory.direct_io import DirectFile, mapped_empty
from shardwise.observe.memory import apart_from_the_heap, give_back_free, resident_bytes
from shardwise.tiers.tier import StagingMemory
from tests.engine.nets import Language, seeded

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


class SlowWrite(Future[None]):
    """A write that is done when somebody waits for it."""

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.set_result(None)


def test_blocks_that_are_being_written_do_not_pile_up() -> None:
    """Each state that was opened between two steps took a block more, while those before were being written."""
    staging = StagingMemory(2)
    for _ in range(20):
        block = staging.take(4096)
        assert staging.nbytes <= 2 * block.nbytes
        staging.give(block, [SlowWrite()])


def test_freed_blocks_return_to_the_system() -> None:
    """The heaps of threads that had ended kept up to 16 % of a process after 100 engines with state on a disk."""
    block_bytes = 16 << 20

    def use() -> None:
        staging = StagingMemory(1)
        block = staging.take(block_bytes)
        block.fill_(1)
        staging.give(block)

    def resident() -> int:
        give_back_free(torch.device("cpu"))
        return resident_bytes() or 0

    with apart_from_the_heap():
        pass  # from here on, as beside an engine with state on a disk, glibc takes blocks of 16 MiB from its heaps
    before = resident()
    for _ in range(8):  # a thread takes over the heap of one that has ended
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert resident() - before < block_bytes // 2


def test_a_block_may_be_empty() -> None:
    """A rank may have no element of a bucket."""
    assert mapped_empty(0).nbytes == 0 and mapped_empty(5).tolist() == [0] * 5


def test_a_load_stages_no_more_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load on a slow disk took a block for each bucket, more than the memory that the run had trained in."""
    taken: list[int] = []
    take = StagingMemory.take

    def noted(self: StagingMemory, *arguments: Any) -> torch.Tensor:
        block = take(self, *arguments)
        taken.append(self.nbytes)
        return block

    def engine() -> Any:
        config = {
            "zero": {"stage": 3},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "offload": {"optimizer": "disk", "parameters": "disk", "disk_path": str(tmp_path), "buffers": 1},
        }
        return shardwise.initialize(seeded(Language), config, world=join(quiet=True))

    monkeypatch.setattr(StagingMemory, "take", noted)
    first = engine()
    for _ in range(2):
        first.train_step([(TOKENS, TOKENS)])
    first.save(tmp_path / "steps")
    in_steps = max(taken)
    wanted = first.train_step([(TOKENS, TOKENS)])
    first.close(whole=False)
    second = engine()
    taken.clear()
    write = DirectFile.write

    def slow(self: DirectFile, *arguments: Any) -> None:
        time.sleep(0.02)
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", slow)
        second.load(tmp_path / "steps")
    assert taken and max(taken) <= in_steps
    found = second.train_step([(TOKENS, TOKENS)])
    assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
    second.close(whole=False)
