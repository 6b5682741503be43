"""Snapshots of a cache: every row as it was when the snapshot began, whatever changes, leaves and comes meanwhile."""

import threading

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import DamagedStateError
from shardwise.tiers.cache_snapshot import CacheSnapshot
from shardwise.tiers.row_cache import RowCache
from tests.tiers.shelf import Lines, Shelf
from tests.tiers.test_row_cache import cache_of, drawn


def read(snapshot: CacheSnapshot, rows: Tensor) -> Tensor:
    """First number of each row's line."""
    memory = Lines(rows.numel())
    snapshot.read(rows, memory)
    return memory.memory[:, 0]


class Life:
    """A cache whose rows change at random, beside a plain tensor."""

    def __init__(self, seed: int, places: int = 12, rows: int = 60) -> None:
        self.shelf = Shelf()
        self.cache: RowCache[Lines] = cache_of(places, self.shelf)
        self.truth = torch.arange(rows)
        self._generator = torch.Generator().manual_seed(seed)
        self._turn = 0

    def drawn(self, most: int) -> Tensor:
        return drawn(self._generator, len(self.truth), most)

    def change(self) -> None:
        """Change, begin, remove, overwrite, read and read ahead some rows."""
        self._turn += 1
        cache, truth = self.cache, self.truth
        rows = self.drawn(1 + self._turn % cache.places).unique()
        kind = int(drawn(self._generator, 6, 1))
        if kind < 3:
            at = cache.lend(rows, changes=kind > 0, learns=kind == 2)
            assert torch.equal(cache.lines.memory[at, 0], truth[rows])
            if kind:
                truth[rows] += 100
                cache.lines.memory[at, 0] = truth[rows]
        elif kind == 3:
            truth[rows] = 10_000 + self._turn
            cache.lines.memory[cache.begin(rows)] = 10_000 + self._turn
        elif kind == 4:
            cache.remove(rows)
            truth[rows] = rows
        else:
            truth[rows] += 7
            cache.window.memory[: rows.numel()] = truth[rows, None]
            cache.overwrite(rows, cache.window, torch.arange(rows.numel()))
        cache.read_ahead(self.drawn(4).unique())
        if self._turn % 3 == 0:
            cache.end_step()


def one_life(seed: int, **sizes: int) -> int:
    """Read snapshots of a cache whose rows change, and return the number of rows that were copied for them."""
    life, copied = Life(seed, **sizes), 0
    for _ in range(6):
        for _ in range(10):
            life.change()
        before, snapshot = life.truth.clone(), life.cache.snapshot()
        left = torch.randperm(len(before), generator=torch.Generator().manual_seed(seed))
        for part in left.split(7):
            for _ in range(3):
                life.change()
            assert torch.equal(read(snapshot, part), before[part])
        assert torch.equal(read(snapshot, left), before[left]), "a row may be read again"
        assert snapshot._copies._count <= life.cache.places
        copied += snapshot._copies._count
        snapshot.close()
        assert not life.shelf.snapshots
    return copied


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_beginning(seed: int) -> None:
    assert one_life(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 60))
def test_many_lives(seed: int) -> None:
    one_life(seed, places=3 + seed % 12)
    beside(seed, 400)


def beside(seed: int, changes: int) -> None:
    """A thread reads while rows change: no row is of another moment."""
    life = Life(seed, places=16, rows=300)
    for _ in range(20):
        life.change()
    before, snapshot = life.truth.clone(), life.cache.snapshot()
    wrong: list[object] = []
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.is_set():
                for part in torch.randperm(300).split(20):
                    found = read(snapshot, part)
                    wrong.extend(part[found != before[part]].tolist())
        except BaseException as error:
            wrong.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(changes):
        life.change()
    is_over.set()
    reader.join()
    assert not wrong
    snapshot.close()


def test_a_thread_reads_beside_steps() -> None:
    beside(0, 60)


def test_only_rows_that_memory_alone_has_are_copied() -> None:
    """A row that was written is read from its record, and one that was never changed is drawn."""
    shelf = Shelf()
    cache = cache_of(4, shelf)
    cache.lines.memory[cache.lend(torch.tensor([1, 2]), changes=True)] = 50
    cache.lend(torch.tensor([3, 4, 5, 6]))  # 1 and 2 leave and are written
    cache.end_step()
    cache.lines.memory[cache.lend(torch.tensor([7]), changes=True)] = 60
    snapshot = cache.snapshot()
    for _ in range(3):
        cache.lines.memory[cache.lend(torch.tensor([1, 3, 7]), changes=True, learns=True)] += 1
        cache.end_step()
    assert snapshot._copies._count == 1, "7 alone had changed and was not written"
    assert read(snapshot, torch.tensor([7, 1, 2, 3, 8])).tolist() == [60, 50, 50, 3, 8]
    snapshot.close()
    cache.lines.memory[cache.lend(torch.tensor([2]), changes=True)] = 1
    assert snapshot._copies._count == 1, "nothing is kept after the end"


def test_a_row_that_is_being_read_ahead_is_read_below() -> None:
    shelf = Shelf()
    cache = cache_of(4, shelf)
    cache.lines.memory[cache.lend(torch.tensor([1, 2]), changes=True)] = 50
    cache.lend(torch.arange(10, 14))
    cache.end_step()
    started, go = threading.Event(), threading.Event()

    def wait(rows: Tensor) -> None:
        started.set()
        assert go.wait(20)

    shelf.before_read = wait
    reader = threading.Thread(target=cache.read_ahead, args=(torch.tensor([1]),))
    reader.start()
    assert started.wait(20)
    shelf.before_read = lambda rows: None
    snapshot = cache.snapshot()
    assert read(snapshot, torch.tensor([1, 2])).tolist() == [50, 50], "it does not wait for the other reader"
    go.set()
    reader.join()
    snapshot.close()


def test_a_dynamic_row_that_no_tier_holds_is_damage() -> None:
    cache = cache_of(2, draws=False)
    cache.begin(torch.tensor([1]))
    snapshot = cache.snapshot()
    cache.begin(torch.tensor([5]))
    assert not snapshot._notes.take(), "a row that did not exist needs no note"
    with pytest.raises(DamagedStateError, match="1 rows, the first of them 9"):
        snapshot.read(torch.tensor([1, 9]), Lines(2))
    snapshot.close()
