"""The cache of rows: what it lends is what was last written, whatever leaves, fails, or is read ahead."""

import threading

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import DamagedStateError, TierError
from shardwise.tiers.row_cache import CacheFigures, LineMemory, RowCache
from tests.tiers.shelf import Lines, Shelf


def draw(memory: LineMemory, places: Tensor, rows: Tensor) -> None:
    """A start line is its row, twice."""
    memory.from_bytes(places, rows[:, None].expand(-1, 2).contiguous().view(torch.uint8))


def cache_of(places: int, shelf: Shelf | None = None, draws: bool = True) -> RowCache[Lines]:
    return RowCache(Lines(places), Lines(places), places, shelf or Shelf(), draw if draws else None)


def drawn(generator: torch.Generator, rows: int, count: int) -> Tensor:
    return torch.randint(0, rows, (count,), generator=generator)


def numbers(cache: RowCache[Lines], rows: Tensor) -> Tensor:
    """First number of each row's line, read through the cache without bringing rows in."""
    cache.copy(rows, cache.window)
    return cache.window.memory[: rows.numel(), 0].clone()


def one_life(seed: int, places: int = 12, rows: int = 60, steps: int = 150) -> CacheFigures:
    """Lend, change, begin, remove, overwrite and read ahead at random, against a plain tensor."""
    generator = torch.Generator().manual_seed(seed)
    cache, truth = cache_of(places), torch.arange(rows)
    for step in range(steps):
        asked = drawn(generator, rows, 1 + step % places)
        kind = int(drawn(generator, 6, 1))
        distinct = asked.unique()
        if kind < 3:
            at = cache.lend(asked, changes=kind > 0, learns=kind == 2)
            assert torch.equal(cache.lines.memory[at, 0], truth[asked])
            if kind:
                truth[asked] += 100
                cache.lines.memory[at, 0] = truth[asked]
        elif kind == 3:
            truth[distinct] = step
            cache.lines.memory[cache.begin(distinct)] = step
        elif kind == 4:
            cache.remove(distinct)
            truth[distinct] = distinct
        else:
            truth[distinct] += 7
            cache.window.memory[: distinct.numel()] = truth[distinct, None]
            cache.overwrite(distinct, cache.window, torch.arange(distinct.numel()))
        if step % 2:
            cache.read_ahead(drawn(generator, rows, 5).unique())
        if step % 5 == 0:
            cache.end_step()
        assert len(cache) <= places
    for part in torch.arange(rows).split(places):
        assert torch.equal(numbers(cache, part), truth[part])
    return cache.take_figures()


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_what_was_last_written(seed: int) -> None:
    figures = one_life(seed)
    assert figures.hits and figures.misses and figures.read_ahead and figures.written


def test_the_tier_below_gets_only_what_has_changed() -> None:
    shelf = Shelf()
    cache = cache_of(4, shelf)
    cache.lend(torch.tensor([1, 2]))
    cache.lend(torch.tensor([3, 4]), changes=True)
    cache.end_step()
    cache.lend(torch.tensor([5, 6, 7, 8]))
    assert shelf.lines.keys() == {3, 4}
    cache.end_step()
    assert shelf.compacted == 2 * 2 * 16, "twice the bytes that were written since"


def test_rows_of_the_running_step_stay() -> None:
    cache = cache_of(4)
    cache.lend(torch.tensor([1, 2, 3]), learns=True)
    for row in range(10, 20):
        cache.lend(torch.tensor([row]))
    cache.take_figures()
    cache.lend(torch.tensor([1, 2, 3]), learns=True)
    assert cache.take_figures().misses == 0
    assert cache.read_ahead(torch.tensor([30, 31])) == 1, "one place is free of the step's rows"
    assert cache.lend(torch.tensor([40, 41, 42, 43])).unique().numel() == 4, "they go where nothing else can"


def test_rows_that_are_used_again_stay_longer() -> None:
    cache = cache_of(100)
    often = torch.arange(20)
    for step in range(40):
        cache.lend(often)
        cache.lend(torch.arange(1000 + 8 * step, 1008 + 8 * step))
        cache.end_step()
    cache.take_figures()
    cache.lend(often)
    assert cache.take_figures() == CacheFigures(hits=20)


def fails(rows: Tensor) -> None:
    raise TierError("the disk is full")


def test_a_row_that_cannot_be_written_stays() -> None:
    shelf = Shelf()
    cache = cache_of(3, shelf)
    at = cache.lend(torch.tensor([1, 2, 3]), changes=True)
    cache.lines.memory[at] = torch.tensor([[11, 0], [12, 0], [13, 0]])
    shelf.before_write = fails
    with pytest.raises(TierError, match="full"):
        cache.lend(torch.tensor([4]))
    assert numbers(cache, torch.tensor([1, 2, 3])).tolist() == [11, 12, 13] and len(cache) == 3
    shelf.before_write = lambda rows: None
    cache.lend(torch.tensor([4, 5, 6]))
    assert numbers(cache, torch.tensor([1, 2, 3])).tolist() == [11, 12, 13]


def test_a_row_that_cannot_be_read_gets_no_place() -> None:
    shelf = Shelf()
    cache = cache_of(2, shelf)
    cache.lines.memory[cache.lend(torch.tensor([1, 2]), changes=True)] = 50
    cache.lend(torch.tensor([3, 4]))
    shelf.before_read = fails
    with pytest.raises(TierError):
        cache.lend(torch.tensor([1]))
    with pytest.raises(TierError):
        cache.read_ahead(torch.tensor([2]))
    shelf.before_read = lambda rows: None
    assert cache.lines.memory[cache.lend(torch.tensor([1, 2])), 0].tolist() == [50, 50]


def test_a_dynamic_row_that_nothing_holds_is_damage() -> None:
    cache = cache_of(2, draws=False)
    cache.begin(torch.tensor([1]))
    assert cache.read_ahead(torch.tensor([1, 7])) == 0, "a row may have gone since its key was looked up"
    with pytest.raises(DamagedStateError, match="1 rows, the first of them 7"):
        cache.lend(torch.tensor([1, 7]))


def test_who_needs_a_row_that_is_being_read_waits_for_it() -> None:
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
    reader = threading.Thread(target=cache.read_ahead, args=(torch.tensor([1, 2]),))
    reader.start()
    assert started.wait(20)
    shelf.before_read = fails
    threading.Timer(0.02, go.set).start()
    assert cache.lines.memory[cache.lend(torch.tensor([2, 1])), 0].tolist() == [50, 50]
    reader.join()
    assert cache.take_figures().stall_s > 0


def beside_a_reader(seed: int, steps: int) -> None:
    """The caller's thread changes rows while another reads ahead: no row is older than its last change."""
    places, rows = 16, 80
    cache, truth = cache_of(places), torch.arange(rows)
    generator, other = (torch.Generator().manual_seed(seed + each) for each in (0, 1))
    failures: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                cache.read_ahead(drawn(other, rows, 8).unique())
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(steps):
            asked = drawn(generator, rows, 10).unique()
            at = cache.lend(asked, changes=True, learns=True)
            assert torch.equal(cache.lines.memory[at, 0], truth[asked])
            truth[asked] += 100
            cache.lines.memory[at, 0] = truth[asked]
            if step % 3 == 0:
                gone = drawn(generator, rows, 3).unique()
                cache.remove(gone)
                truth[gone] = gone
            cache.end_step()
    finally:
        is_over.set()
        reader.join()
    assert not failures
    for part in torch.arange(rows).split(places):
        assert torch.equal(numbers(cache, part), truth[part])


def test_a_thread_reads_ahead_beside_the_caller() -> None:
    beside_a_reader(0, 120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_many_lives(seed: int) -> None:
    one_life(100 + seed, places=3 + seed % 9, steps=400)
    beside_a_reader(10 * seed, 600)


def test_rows_that_leave_together_are_written_in_their_order() -> None:
    shelf, written = Shelf(), []
    shelf.before_write = lambda rows: written.append(rows.tolist())
    cache = RowCache(Lines(8), Lines(8), 8, shelf, draw, lambda rows: -(rows % 10))
    rows = torch.tensor([31, 5, 48, 12, 77, 9, 20, 64])
    cache.lines.memory[cache.lend(rows, changes=True), 0] = rows + 1000
    cache.end_step()
    cache.lend(torch.arange(100, 108))
    assert written == [[9, 48, 77, 5, 64, 12, 31, 20]]
    assert torch.equal(numbers(cache, rows), rows + 1000)
