"""State on disk: what is read is what was written, or an error."""

import ctypes
import errno
import gc
import mmap
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import DamagedError, TierError
from shardwise.memory.direct_io import Bytes, DirectFile, aligned_empty
from shardwise.tiers import scratch as module
from shardwise.tiers.scratch import DiskScratch
from shardwise.tiers.scratch_folder import ScratchFolder, _memory_bytes

BLOCK = 8192
SIZES = {"first": 4 * BLOCK + 4096 + 17, "second": 3, "third": 2 * BLOCK}
KINDS = ("master", "exp_avg")


def scratch(folder: Path, threads: int = 2) -> DiskScratch:
    made = DiskScratch(folder, 0, 1, threads, BLOCK)
    made.reserve(dict.fromkeys(KINDS, SIZES))
    return made


def drawn(size: int, seed: int = 0, aligned: bool = True) -> Tensor:
    bytes_ = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return aligned_empty(size, torch.uint8).copy_(bytes_) if aligned else bytes_


def without_direct_opens(patch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    patch.setattr(os, "open", refuse)


def without_direct_reads(patch: pytest.MonkeyPatch) -> None:
    real = DirectFile._read

    def refuse(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        if file.is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, parts, offset)

    patch.setattr(DirectFile, "_read", refuse)


@pytest.mark.parametrize("refuse", [None, without_direct_opens, without_direct_reads])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_read_was_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    aligned: bool,
    refuse: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    if refuse is not None:
        refuse(monkeypatch)
    made = scratch(tmp_path)
    if refuse is not None:
        assert not any(file.is_direct for file in made._folder.files.values())
    asked = [(kind, owner, size) for kind in KINDS for owner, size in SIZES.items()]
    values = {(kind, owner): drawn(size, seed, aligned) for seed, (kind, owner, size) in enumerate(asked)}
    for done in [made.write(*key, value) for key, value in values.items()]:
        done.result()
    for key, value in values.items():
        found = aligned_empty(value.numel(), torch.uint8) if aligned else torch.empty_like(value)
        made.read(*key, found.zero_()).result()
        assert torch.equal(found, value)
    assert made.bytes_written == made.bytes_read == dict.fromkeys(KINDS, sum(SIZES.values()))
    made.close()
    made.close()
    assert os.listdir(tmp_path) == []


def cached_pages(path: Path) -> int:
    """Of the file, in the page cache."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as seen:
        view = ctypes.c_char.from_buffer(seen)
        begin = ctypes.c_void_p(ctypes.addressof(view))
        assert ctypes.CDLL(None).mincore(begin, ctypes.c_size_t(size), found) == 0
        del view
    return sum(page & 1 for page in found)


def test_without_direct_io_the_page_cache_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _memory_bytes(tmp_path) is not None:
        pytest.skip("a tmpfs is its page cache")
    without_direct_opens(monkeypatch)
    made = DiskScratch(tmp_path, 0, 1)
    made.reserve({"master": {"unit": 4 * 2**20}})
    made.write("master", "unit", torch.ones(2**20)).result()
    assert cached_pages(tmp_path / "shardwise.rank0.master") == 0
    made.read("master", "unit", torch.empty(2**20)).result()
    assert cached_pages(tmp_path / "shardwise.rank0.master") == 0
    made.close()


def test_any_dtype_and_shape(tmp_path: Path) -> None:
    made = DiskScratch(tmp_path, 0, 1)
    tensors = [
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0),
    ]
    made.reserve({"weight": {str(place): tensor.nbytes for place, tensor in enumerate(tensors)}})
    for place, tensor in enumerate(tensors):
        made.write("weight", str(place), tensor.requires_grad_())
        found = torch.zeros_like(tensor)
        made.read("weight", str(place), found).result()
        assert torch.equal(found, tensor)
    made.close()


def test_a_part_is_read_by_way_of_whole_blocks(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    value = drawn(SIZES["first"])
    made.write("master", "first", value)
    for first, last in [(0, 1), (BLOCK - 3, BLOCK + 5), (5, len(value)), (BLOCK, 3 * BLOCK), (7, 7)]:
        found = torch.zeros(last - first, dtype=torch.uint8)
        made.read("master", "first", found, first).result()
        assert torch.equal(found, value[first:last])
    made.write("master", "first", drawn(2 * BLOCK, 1), BLOCK).result()
    value[BLOCK : 3 * BLOCK] = drawn(2 * BLOCK, 1)
    found = torch.zeros_like(value)
    made.read("master", "first", found).result()
    assert torch.equal(found, value)
    made.close()


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    made.write("master", "first", drawn(BLOCK), BLOCK)
    for wrong, words in [
        (lambda: made.read("exp_avg", "first", drawn(1)), "never written"),
        (lambda: made.read("master", "first", drawn(BLOCK + 1)), "block 0 was never written"),
        (lambda: made.write("master", "first", drawn(BLOCK), 1), "cut block 0"),
        (lambda: made.write("master", "first", drawn(BLOCK - 1)), "cut block 0"),
        (lambda: made.read("master", "third", drawn(BLOCK), 2 * BLOCK), "of 16384 of master of third"),
        (lambda: made.read("master", "other", drawn(1)), "no space was reserved"),
        (lambda: made.write("master", "first", drawn(2 * BLOCK)[::2]), "not contiguous"),
    ]:
        with pytest.raises(AssertionError, match=words):
            wrong()
    found = torch.zeros(BLOCK, dtype=torch.uint8)
    made.read("master", "first", found, BLOCK).result()  # no failure of the disk: the scratch goes on
    assert torch.equal(found, drawn(BLOCK))
    made.close()


def test_requests_of_a_block_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that take turns at random must not let a read pass the write before it."""
    draw, real = random.Random(0), DirectFile._write

    def late(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        time.sleep(draw.random() * 2e-3)
        return real(file, parts, offset)

    monkeypatch.setattr(DirectFile, "_write", late)
    made = scratch(tmp_path, threads=4)
    found = []
    for seed in range(12):
        made.write("master", "third", drawn(2 * BLOCK, seed))
        found.append(torch.empty(2 * BLOCK, dtype=torch.uint8))
        last = made.read("master", "third", found[-1])
    last.result()
    assert all(torch.equal(value, drawn(2 * BLOCK, seed)) for seed, value in enumerate(found))
    made.close()


def eventually(holds: Callable[[], bool]) -> None:
    """A thread may have been the last to let go, a moment after its result."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def watched(size: int, seed: int = 0) -> tuple[Tensor, Callable[[], object]]:
    """A tensor, and what is None as soon as its memory is free, whoever else made a view of it."""
    array = drawn(size, seed, aligned=False).numpy().copy()
    return torch.from_numpy(array), weakref.ref(array)


def test_a_request_keeps_its_tensor_and_a_thread_none(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    value, held = watched(2 * BLOCK)
    done = made.write("master", "third", value)
    del value
    done.result()
    found = torch.empty(2 * BLOCK, dtype=torch.uint8)
    made.read("master", "third", found).result()
    assert torch.equal(found, drawn(2 * BLOCK))
    eventually(lambda: held() is None)
    made.close()


def test_a_scratch_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    before = threading.active_count()
    made = scratch(tmp_path)
    made.write("master", "first", drawn(SIZES["first"])).result()
    del made
    eventually(lambda: not os.listdir(tmp_path))
    eventually(lambda: threading.active_count() <= before)


def test_a_scratch_is_removed_when_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(module.atexit, "register", at_exit.append)
    made = scratch(tmp_path)
    made.write("master", "first", drawn(SIZES["first"])).result()
    (end,) = at_exit
    end()
    assert os.listdir(tmp_path) == []


def test_the_collector_takes_no_lock(tmp_path: Path) -> None:
    """The collector ran in a thread that made the next scratch and held the folder's lock, and waited for that lock:
    600 s on each of two ranks."""
    made = scratch(tmp_path)
    made.write("master", "first", drawn(SIZES["first"])).result()
    next_one = ScratchFolder(tmp_path, 0, 1)
    busy, may_end = threading.Event(), threading.Event()

    def hold_order(order: Any) -> None:
        with order:
            busy.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold_order, args=(made._threads.order,))
    holder.start()
    busy.wait(30)
    gone = weakref.ref(made)
    with next_one._held():
        del made
        gc.collect()
        assert gone() is None
        assert any(name.endswith(".master") for name in os.listdir(tmp_path))
    may_end.set()
    holder.join()
    eventually(lambda: not any(name.endswith(".master") for name in os.listdir(tmp_path)))
    next_one.end()
    assert os.listdir(tmp_path) == []


def test_a_scratch_whose_disk_failed_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads referred to the error, the error's traceback to the scratch: neither was ever collected."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    made = scratch(tmp_path)
    monkeypatch.setattr(DirectFile, "write", fail)
    for _ in range(2):
        with pytest.raises(TierError):
            made.write("master", "first", drawn(SIZES["first"])).result(10)
    gone = weakref.ref(made)
    del made
    eventually(lambda: gc.collect() >= 0 and gone() is None)
    eventually(lambda: not os.listdir(tmp_path))


def test_the_collector_may_run_inside_of_the_queue(tmp_path: Path) -> None:
    """In a thread that takes a job. The lock of the queue was waited for by who held it: nothing was collected more."""
    made = scratch(tmp_path)
    crew = made._threads.crew
    asked = threading.Event()

    class Collected(type(crew.jobs._urgent)):  # type: ignore[misc]
        def get_nowait(self) -> Any:
            if not asked.is_set():
                asked.set()
                crew.ask_to_leave()
            return super().get_nowait()

    crew.jobs._urgent = Collected()
    made.write("master", "first", drawn(SIZES["first"])).result(10)
    eventually(lambda: not os.listdir(tmp_path))


def test_threads_without_memory_are_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that found none ended in silence, and whoever asked it waited for ever."""

    def none(*_: object) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(module, "aligned_empty", none)
    with pytest.raises(MemoryError):
        DiskScratch(tmp_path, 0, 1)
    assert os.listdir(tmp_path) == []


def test_a_closed_scratch_says_so(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    made.close()
    with pytest.raises(TierError, match="closed"):
        made.write("master", "second", drawn(3)).result()


def test_a_fork_leaves_the_files_alone(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    made.write("master", "second", drawn(3)).result()
    child = os.fork()
    if not child:
        made.close()
        open_files = {os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd")}
        os._exit(any(str(tmp_path) in path for path in open_files))
    assert os.waitpid(child, 0)[1] == 0, "a fork holds no lock and no space"
    made.read("master", "second", torch.empty(3, dtype=torch.uint8)).result()
    made.close()


# Faults ------------------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scratch(tmp_path)

    def full(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made.write("master", "third", drawn(2 * BLOCK)).result()
    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "_write", full)
        failed = made.write("exp_avg", "first", drawn(SIZES["first"])).exception()
    assert isinstance(failed, TierError)
    for words in (
        "shardwise.rank0.exp_avg: write of exp_avg of first, block ",
        "No space left on device",
        "resume",
    ):
        assert words in str(failed)
    assert made.read("master", "third", drawn(2 * BLOCK)).exception() is failed, "a failed scratch stays so"
    made.close()
    assert os.listdir(tmp_path) == []


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    made = scratch(tmp_path)
    made.write("master", "first", drawn(SIZES["first"])).result()
    flip(tmp_path / "shardwise.rank0.master", BLOCK + 5, 3)
    with pytest.raises(
        DamagedError, match=r"rank0\.master: master of first, block 1 .*not those that were written"
    ):
        made.read("master", "first", drawn(4), BLOCK + 100).result()
    made.close()


def test_what_waits_behind_a_failure_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked, may_fail = scratch(tmp_path, threads=1), [], threading.Event()

    def fails(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        may_fail.wait(30)
        asked.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DirectFile, "_write", fails)
    waiting = [made.write(kind, "first", drawn(SIZES["first"])) for kind in KINDS]
    may_fail.set()
    first, second = (done.exception() for done in waiting)
    assert first is second
    assert len(asked) == 1
    made.close()


def test_weights_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thread is busy while requests come; a read of weights waits for the write before it all the same."""
    made, may_go = DiskScratch(tmp_path, 0, 1, 1, BLOCK), threading.Event()
    made.reserve({kind: {"unit": 2 * BLOCK} for kind in ("master", "exp_avg", "weight")})
    real, moved = DirectFile._write, []

    def slow(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        may_go.wait(30)
        return real(file, parts, offset)

    monkeypatch.setattr(DirectFile, "_write", slow)
    value, found = drawn(2 * BLOCK), torch.empty(2 * BLOCK, dtype=torch.uint8)
    asked = [made.write(kind, "unit", value) for kind in ("master", "exp_avg", "weight")]
    asked.append(made.read("weight", "unit", found))
    for name, done in zip(("master", "exp_avg", "weight", "weight read"), asked, strict=True):
        done.add_done_callback(lambda _, name=name: moved.append(name))
    may_go.set()
    for done in asked:
        done.result()
    assert torch.equal(found, value)
    made.close()
    assert moved.index("weight read") < moved.index("exp_avg")
    assert moved.index("weight") < moved.index("weight read")


def test_what_waits_behind_a_request_ends_with_the_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in no thread's hands yet; and no future keeps its memory."""
    made, begun, may_end = scratch(tmp_path, threads=1), threading.Event(), threading.Event()
    real = DirectFile._write

    def slow(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        begun.set()
        may_end.wait(30)
        return real(file, parts, offset)

    monkeypatch.setattr(DirectFile, "_write", slow)
    first = made.write("master", "second", drawn(3))
    begun.wait(30)
    behind = [made.write("master", "second", drawn(3, 1)), made.read("master", "second", drawn(3))]
    closing = threading.Thread(target=made.close)
    closing.start()
    eventually(lambda: made._threads.failure is not None)
    may_end.set()
    closing.join(30)
    assert first.exception(30) is None
    assert all(isinstance(done.exception(30), TierError) for done in behind)


def test_a_request_behind_another_lets_go_of_its_tensor(tmp_path: Path) -> None:
    """At once: what waits for the garbage collector may be gigabytes."""
    made = scratch(tmp_path)
    gc.disable()
    try:
        made.write("master", "third", drawn(2 * BLOCK))
        value, held = watched(2 * BLOCK, 1)
        done = made.write("master", "third", value)
        del value
        done.result()
        eventually(lambda: held() is None)
    finally:
        gc.enable()
        made.close()


def flip(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ (1 << bit)]))


FAULTS = (
    "flip",
    "truncate",
    "lost write",
    "short read",
    "short write",
    "EIO read",
    "EIO write",
    "ENOSPC write",
)


def place_of_data(draw: random.Random) -> int:
    """A byte of a file that some owner wrote, and no padding."""
    starts, start = {}, 0
    for owner, size in SIZES.items():
        starts[owner] = start
        start += -(-size // 4096) * 4096
    owner = draw.choice(list(SIZES))
    return starts[owner] + draw.randrange(SIZES[owner])


def one_place(folder: Path, seed: int, patch: pytest.MonkeyPatch) -> str | None:
    """Writes and reads at random, with one fault on the way: what was raised. Wrong bytes are an assertion."""
    draw = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    operation = fault.split()[-1]
    made = scratch(folder, threads=draw.choice((1, 2, 3)))
    real = {"read": DirectFile._read, "write": DirectFile._write}
    left, lock = draw.randrange(12), threading.Lock()

    def faulty(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
        nonlocal left
        with lock:
            left -= 1
            if left != -1:
                return real[operation](file, parts, offset)
        size = sum(part.nbytes for part in parts)
        if fault == "lost write":
            return size
        if fault.startswith("short"):
            whole = draw.randrange(0, size, 512)
            return real[operation](file, [parts[0][: whole // 4096 * 4096]], offset) if whole >= 4096 else 0
        code = getattr(errno, fault.split()[0])
        raise OSError(code, os.strerror(code))

    if operation in real:
        patch.setattr(DirectFile, f"_{operation}", faulty)
    keys = [(kind, owner) for kind in KINDS for owner in SIZES]
    values = {key: drawn(SIZES[key[1]], seed + place, draw.random() < 0.5) for place, key in enumerate(keys)}
    try:
        for done in [made.write(*key, value) for key, value in values.items()]:
            done.result()
        for _ in range(2):
            if fault in ("flip", "truncate"):
                path = folder / f"shardwise.rank0.{draw.choice(KINDS)}"
                if fault == "flip":
                    flip(path, place_of_data(draw), draw.randrange(8))
                else:
                    os.truncate(path, place_of_data(draw))
            for key in draw.sample(keys, len(keys)):
                value = values[key]
                found = (
                    aligned_empty(value.numel(), torch.uint8)
                    if draw.random() < 0.5
                    else torch.empty_like(value)
                )
                made.read(*key, found.zero_()).result()
                assert torch.equal(found, value), f"place {seed} ({fault}): wrong bytes of {key}"
                values[key] = drawn(SIZES[key[1]], seed + draw.randrange(1000), draw.random() < 0.5)
                made.write(*key, values[key])
        for key, value in values.items():
            found = torch.empty_like(value)
            made.read(*key, found).result()
            assert torch.equal(found, value), f"place {seed} ({fault}): wrong bytes of {key}"
    except (TierError, DamagedError) as error:
        for key in keys:
            assert made.read(*key, torch.empty(1, dtype=torch.uint8)).exception() is error
        return type(error).__name__
    finally:
        made.close()
    return None


def all_seen(folder: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            seen = one_place(folder, seed, patch)
        fault = FAULTS[seed % len(FAULTS)]
        assert seen == (
            "DamagedStateError" if fault in ("flip", "truncate", "lost write") else "TierError"
        ), (
            seed,
            fault,
        )
    assert os.listdir(folder) == []


def test_faults_are_seen(tmp_path: Path) -> None:
    all_seen(tmp_path, range(24))


@pytest.mark.soak
def test_all_faults_are_seen(tmp_path: Path) -> None:
    all_seen(tmp_path, range(24, 600))
