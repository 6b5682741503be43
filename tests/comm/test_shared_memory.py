"""The collectives through shared memory, between real processes.

``four`` are four processes that live as long as this module; groups of 2, 3 and 4 ranks are made of the first of them.
Tests that end a rank start their own.
"""

import errno
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import CommError, DeadlineError, UsageError
from shardwise.comm import shared_memory, shared_ring
from shardwise.comm.shared_memory import SharedMemoryTransport, SharedMemoryUnavailable
from tests.ranks import PRELOADED

PATIENCE_S = 60.0
ERRORS = (SharedMemoryUnavailable, CommError, DeadlineError, UsageError)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WHOLE_NUMBERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SIZES = [0, 1, 3, 300, 4099]
"""Elements per rank; in rings of 16 KiB the last one takes several rounds, except of bytes."""


class Seat:
    """What a function that runs in a worker knows: its rank, and the groups that it made."""

    def __init__(self, rank: int, folder: str):
        self.rank = rank
        self.groups: dict[str, SharedMemoryTransport] = {}
        self._folder = folder

    def group(self, name: str, size: int, ring_bytes: int = 16 << 10, **more: Any) -> SharedMemoryTransport:
        if name not in self.groups:
            store = dist.FileStore(f"{self._folder}/{name}", size)

            def collect(key: str, timeout_s: float) -> list[str]:
                return [store.get(f"{key}/{rank}").decode() for rank in range(size)]

            self.groups[name] = SharedMemoryTransport(
                self.rank,
                size,
                lambda key, text: store.set(f"{key}/{self.rank}", text),
                collect,
                PATIENCE_S,
                ring_bytes,
                **more,
            )
        return self.groups[name]


def _work(rank: int, folder: str, wire: Connection) -> None:
    torch.set_num_threads(1)
    seat = Seat(rank, folder)
    while True:
        try:
            function, args = wire.recv()
        except EOFError:
            return
        try:
            wire.send(function(seat, *args))
        except Exception as error:
            wire.send(error if isinstance(error, ERRORS) else RuntimeError(repr(error)))


class Workers:
    """Processes that run functions of this module; an exception comes back as a value."""

    def __init__(self, size: int, folder: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.wires: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, str(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self.wires.append(ours)
            self.processes.append(process)

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self.wires[rank].send((function, args))

    def result(self, rank: int) -> Any:
        assert self.wires[rank].poll(PATIENCE_S), f"rank {rank} gave no answer"
        return self.wires[rank].recv()

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        for rank in range(size):
            self.start(rank, function, *args)
        return [self.result(rank) for rank in range(size)]

    def stop(self) -> None:
        for wire in self.wires:
            wire.close()
        for process in self.processes:
            process.join(PATIENCE_S)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(4, tmp_path_factory.mktemp("four"))
    yield workers
    workers.stop()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Workers]:
    """Three processes for one test."""
    workers = Workers(3, tmp_path)
    yield workers
    workers.stop()


def _values(rank: int, elements: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.randn(elements, generator=generator, dtype=torch.float64) * 3).to(dtype)


def _total(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The definition: sums in rank order, in the wider dtype, of 16-bit floats in fp32 with one rounding."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


# --- every collective, every dtype, every size -----------------------------------------------------------------------


def _check_all(seat: Seat, size: int, dtype: torch.dtype) -> list[str]:
    group = seat.group(f"all{size}", size)
    wrong = []
    for shard in SIZES:
        parts = [_values(rank, shard * size, dtype) for rank in range(size)]
        mine, own = parts[seat.rank], slice(seat.rank * shard, (seat.rank + 1) * shard)
        total = _total(parts, dtype)

        out = torch.zeros(shard, dtype=dtype)
        group.reduce_scatter(out, mine.clone(), 30, "g").wait()
        aliased = mine.clone()
        group.reduce_scatter(aliased[own], aliased, 30, "g").wait()
        gathered = torch.zeros(shard * size, dtype=dtype)
        group.all_gather(gathered, out, 30, "g").wait()
        in_place = torch.zeros(shard * size, dtype=dtype)
        in_place[own] = out
        group.all_gather(in_place, in_place[own], 30, "g").wait()
        reduced = mine[: max(shard * size - 1, 0)].clone()
        group.all_reduce(reduced, 30, "g").wait()
        sent = mine.clone()
        group.broadcast(sent, size - 1, 30, "g").wait()
        group.barrier(30, "g").wait()

        results = {
            "reduce_scatter": (out, total[own]),
            "reduce_scatter in place": (aliased[own], total[own]),
            "all_gather": (gathered, total),
            "all_gather in place": (in_place, total),
            "all_reduce": (reduced, total[: reduced.numel()]),
            "broadcast": (sent, parts[-1]),
        }
        wrong += [f"{name} {shard}" for name, (given, due) in results.items() if not torch.equal(given, due)]
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS + WHOLE_NUMBERS, ids=lambda dtype: str(dtype)[6:])
def test_results_equal_sums_in_rank_order_bit_for_bit(four: Workers, size: int, dtype: torch.dtype) -> None:
    assert four.run(size, _check_all, size, dtype) == [[]] * size


def _reduce_in_phases(seat: Seat, size: int, elements: int) -> bool:
    """Large enough for the two phases of an all-reduce, with more blocks than the ring has slots."""
    group = seat.group("phases", size, ring_bytes=512 << 10)
    parts = [_values(rank, elements, torch.float32) for rank in range(size)]
    tensor = parts[seat.rank].clone()
    group.all_reduce(tensor, 30, "g").wait()
    return torch.equal(tensor, _total(parts, torch.float32))


@pytest.mark.parametrize("elements", [(5 << 20) // 4 + 3, (2 << 20) // 4 + 1])
def test_large_all_reduce(four: Workers, elements: int) -> None:
    assert all(four.run(4, _reduce_in_phases, 4, elements))


def _two_rank_phases(seat: Seat, elements: int) -> bool:
    group = seat.group("phases2", 2, ring_bytes=512 << 10)
    parts = [_values(rank, elements, torch.bfloat16) for rank in range(2)]
    tensor = parts[seat.rank].clone()
    group.all_reduce(tensor, 30, "g").wait()
    return torch.equal(tensor, _total(parts, torch.bfloat16))


def test_large_all_reduce_of_two_ranks(four: Workers) -> None:
    assert all(four.run(2, _two_rank_phases, (5 << 20) // 2))


def _accumulate(seat: Seat, size: int, narrow: torch.dtype, wide: torch.dtype) -> list[bool]:
    group = seat.group(f"all{size}", size)
    shard = 3001
    parts = [_values(rank, shard * size, narrow) for rank in range(size)]
    own = slice(seat.rank * shard, (seat.rank + 1) * shard)
    total = _total([part.to(wide) for part in parts], wide)[own]
    out = torch.full((shard,), 77, dtype=wide)
    group.reduce_scatter(out, parts[seat.rank].clone(), 30, "g").wait()
    grown = _values(9, shard, wide)
    due = grown + total
    group.reduce_scatter(grown, parts[seat.rank].clone(), 30, "g", accumulate=True).wait()
    return [torch.equal(out, total), torch.equal(grown, due)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
        (torch.int32, torch.int64),
    ],
    ids=str,
)
def test_sum_in_a_wider_dtype_and_accumulation(
    four: Workers, size: int, narrow: torch.dtype, wide: torch.dtype
) -> None:
    assert four.run(size, _accumulate, size, narrow, wide) == [[True, True]] * size


def _fp8(seat: Seat) -> bool:
    group = seat.group("all2", 2)
    mine = torch.full((40,), seat.rank + 1.0).to(torch.float8_e4m3fn)
    out = torch.zeros(80, dtype=torch.uint8).view(torch.float8_e4m3fn)
    group.all_gather(out, mine, 30, "g").wait()
    return out.float().tolist() == [1.0] * 40 + [2.0] * 40


def test_a_dtype_without_arithmetic_can_be_gathered(four: Workers) -> None:
    assert all(four.run(2, _fp8))


# --- many collectives in flight --------------------------------------------------------------------------------------


def _mixture(seat: Seat, size: int, seed: int) -> list[str]:
    """A random program, the same on all ranks; each rank ends its collectives late and pauses where it likes."""
    group = seat.group(f"mixture{size}", size, ring_bytes=64 << 10)
    program, own_pace = random.Random(seed), random.Random(seed * 100 + seat.rank)
    open_ends: list[tuple[Any, Callable[[], None]]] = []
    wrong: list[str] = []
    for step in range(150):
        operation = program.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"])
        dtype = program.choice([torch.float32, torch.bfloat16, torch.int32])
        shard = program.choice([0, 1, 7, 1000, 20_000, 60_000])
        root, whole = program.randrange(size), program.random() < 0.5
        parts = [_values(rank, shard * size, dtype, salt=step) for rank in range(size)]
        mine, own = parts[seat.rank].clone(), slice(seat.rank * shard, (seat.rank + 1) * shard)
        given, due = mine, _total(parts, dtype)
        if operation == "all_gather":
            given, due = torch.zeros_like(mine), torch.cat([part[:shard] for part in parts])
            pending = group.all_gather(given, mine[:shard], 30, f"{step}")
        elif operation == "reduce_scatter":
            given, due = (mine[own] if whole else torch.zeros(shard, dtype=dtype)), due[own]
            pending = group.reduce_scatter(given, mine, 30, f"{step}")
        elif operation == "all_reduce":
            pending = group.all_reduce(mine, 30, f"{step}")
        elif operation == "broadcast":
            due = parts[root]
            pending = group.broadcast(mine, root, 30, f"{step}")
        else:
            given, due = mine, mine
            pending = group.barrier(30, f"{step}")

        def compare(
            given: Any = given, due: Any = due, name: str = f"{step} {operation} {shard} {dtype}"
        ) -> None:
            if not torch.equal(given, due):
                wrong.append(name)

        open_ends.append((pending, compare))
        if own_pace.random() < 0.1:
            time.sleep(own_pace.random() * 0.003)
        while len(open_ends) > own_pace.choice([0, 2, 5]):
            # Not always the oldest: waiting for a later one must end the earlier ones too.
            pending, compare = open_ends.pop(own_pace.randrange(len(open_ends)))
            pending.wait()
            compare()
    for pending, compare in open_ends:
        pending.wait()
        compare()
    return wrong


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_random_programs_with_late_ends(four: Workers, size: int, seed: int) -> None:
    assert four.run(size, _mixture, size, seed) == [[]] * size


def _begin_only(seat: Seat) -> str:
    group = seat.group("deferred", 2)
    seat.full = torch.full((64,), float(seat.rank + 1))  # type: ignore[attr-defined]
    seat.pending = group.reduce_scatter(seat.full[seat.rank * 32 :][:32], seat.full, 30, "g")  # type: ignore[attr-defined]
    return "begun"


def _end(seat: Seat) -> float:
    seat.pending.wait()  # type: ignore[attr-defined]
    return float(seat.full[seat.rank * 32])  # type: ignore[attr-defined]


def _make(seat: Seat, name: str, size: int) -> None:
    seat.group(name, size)


def test_a_rank_goes_on_before_the_others_arrive(four: Workers) -> None:
    four.run(2, _make, "deferred", 2)
    four.start(0, _begin_only)
    assert four.result(0) == "begun"
    four.start(1, _begin_only)
    assert four.result(1) == "begun"
    assert four.run(2, _end) == [3.0, 3.0]


def _many_broadcasts(seat: Seat) -> tuple[int, list[float]]:
    """More than the ring has slots, none of them waited for by the root."""
    group = seat.group("all2", 2)
    tensors = [torch.full((10,), float(number) if seat.rank == 0 else -1.0) for number in range(50)]
    open_ends = [
        group.broadcast(tensor, 0, 30, f"parameter {number}") for number, tensor in enumerate(tensors)
    ]
    if seat.rank == 1:
        open_ends[-1].wait()
    group.barrier(30, "end").wait()
    for pending in open_ends:
        pending.wait()
    return len(group._queue), [float(tensor[-1]) for tensor in tensors]


def test_a_root_need_not_wait(four: Workers) -> None:
    for queued, values in four.run(2, _many_broadcasts):
        assert values == [float(number) for number in range(50)]
        assert queued == 0


# --- ranks that are missing ------------------------------------------------------------------------------------------


def _reduce(seat: Seat, name: str, size: int, timeout_s: float = PATIENCE_S, elements: int = 50_000) -> float:
    tensor = torch.ones(elements)
    seat.group(name, size).all_reduce(tensor, timeout_s, "gradients of blocks.3").wait()
    return float(tensor[-1])


def _die(seat: Seat) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_at_once(mortal: Workers) -> None:
    assert mortal.run(3, _reduce, "g", 3) == [3.0] * 3
    mortal.start(1, _die)
    mortal.start(0, _reduce, "g", 3)
    mortal.start(2, _reduce, "g", 3)
    started = time.monotonic()
    for rank in (0, 2):
        error = mortal.result(rank)
        assert type(error) is CommError
        assert f"rank {rank}: all_reduce of gradients of blocks.3: rank 1 ended" in str(error)
    assert time.monotonic() - started < PATIENCE_S / 2, "found by the deadline, not by the death"
    again = mortal.run(1, _reduce, "g", 3)[0]
    assert type(again) is CommError and "closed earlier" in str(again)


def test_a_late_rank_is_named_at_the_deadline(mortal: Workers) -> None:
    mortal.run(3, _make, "g", 3)
    mortal.start(0, _reduce, "g", 3, 0.2)
    error = mortal.result(0)
    assert type(error) is DeadlineError
    assert "rank 0: all_reduce of gradients of blocks.3: ranks 1, 2 did not arrive within 0.2 s" in str(error)
    # Rank 0 gave up; those that come later hear of it at once.
    mortal.start(2, _reduce, "g", 3)
    error = mortal.result(2)
    assert type(error) is CommError
    assert "rank 2: all_reduce" in str(error) and "rank 0 gave up: rank 0: all_reduce" in str(error)
    assert "ranks 1, 2 did not arrive" in str(error), "the first cause is lost"


def _close(seat: Seat, name: str) -> None:
    seat.groups[name].close()
    seat.groups[name].close()


def test_a_rank_that_closed_is_named_and_its_last_words_count(mortal: Workers) -> None:
    mortal.run(2, _make, "g", 2)
    mortal.start(1, _send_and_end)
    mortal.processes[1].join(PATIENCE_S)
    mortal.start(0, _hear)
    assert mortal.result(0) == 7.0
    mortal.start(0, _hear)
    error = mortal.result(0)
    assert type(error) is CommError and "rank 1 ended or left the group" in str(error)


def _send_and_end(seat: Seat) -> None:
    seat.groups["g"].broadcast(torch.full((100,), 7.0), 1, 30, "x").wait()
    seat.groups["g"].close()
    os._exit(0)


def _hear(seat: Seat) -> float:
    tensor = torch.zeros(100)
    seat.groups["g"].broadcast(tensor, 1, 30, "x").wait()
    return float(tensor[0])


def _run_out_of_memory(seat: Seat) -> str:
    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    copy, shared_memory._copy = shared_memory._copy, fail
    try:
        _reduce(seat, "g", 2)
    except MemoryError:
        return "failed"
    finally:
        shared_memory._copy = copy
    return "did not fail"


def test_a_rank_that_fails_by_itself_is_missed_by_all(mortal: Workers) -> None:
    mortal.run(2, _make, "g", 2)
    mortal.start(0, _run_out_of_memory)
    assert mortal.result(0) == "failed"
    mortal.start(1, _reduce, "g", 2)
    assert "rank 0 gave up: no memory" in str(mortal.result(1))


class _Interrupted(Exception):
    pass


def _interrupted(seat: Seat) -> str:
    def handler(number: int, frame: Any) -> None:
        raise _Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        _reduce(seat, "g", 2)
    except _Interrupted:
        return "interrupted"
    return "not interrupted"


def test_a_signal_reaches_a_rank_that_waits(mortal: Workers) -> None:
    mortal.run(2, _make, "g", 2)
    mortal.start(0, _interrupted)
    assert mortal.result(0) == "interrupted"


# --- wrong calls -----------------------------------------------------------------------------------------------------


def _diverge(seat: Seat) -> None:
    group = seat.group("g", 2, names=(4, 6))
    if seat.rank == 0:
        group.all_gather(torch.zeros(20), torch.zeros(10), 30, "weights of blocks.1").wait()
    else:
        group.all_reduce(torch.zeros(20), 30, "gradients of blocks.2").wait()


def test_different_collectives_are_an_error_and_not_wrong_numbers(mortal: Workers) -> None:
    errors = mortal.run(2, _diverge)
    assert all(isinstance(error, CommError) for error in errors)
    text = " ".join(map(str, errors))
    assert "rank 4: all_gather of weights of blocks.1" in text or "rank 6: all_reduce of gradients" in text
    assert "same order" in text


def _misuse(seat: Seat) -> list[str]:
    group = seat.group("all2", 2)
    ten = torch.zeros(10)
    calls: list[Callable[[], Any]] = [
        lambda: group.all_gather(torch.zeros(19), ten, 30, "w"),
        lambda: group.all_gather(torch.zeros(20, dtype=torch.float64), ten, 30, "w"),
        lambda: group.reduce_scatter(torch.zeros(10, dtype=torch.bfloat16), torch.zeros(20), 30, "w"),
        lambda: group.reduce_scatter(ten, torch.zeros(21), 30, "w"),
        lambda: group.all_reduce(torch.zeros(4, 4), 30, "w"),
        lambda: group.broadcast(torch.zeros(20)[::2], 0, 30, "w"),
        lambda: group.all_reduce(torch.zeros(4, device="meta"), 30, "w"),
    ]
    refused = []
    for number, call in enumerate(calls):
        try:
            call()
        except UsageError as error:
            assert str(error).startswith(f"rank {seat.rank}: ")
            refused.append(str(number))
    return refused


def test_wrong_shapes_are_refused_and_harm_nothing(four: Workers) -> None:
    assert four.run(2, _misuse) == [list("0123456")] * 2
    assert four.run(2, _reduce, "all2", 2) == [2.0, 2.0]


def _forked(seat: Seat) -> str:
    seat.group("all2", 2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _reduce(seat, "all2", 2)
        except UsageError as error:
            os.write(write, str(error).encode())
        finally:
            seat.groups["all2"].close()
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_a_forked_child_is_refused_and_harms_nothing(four: Workers) -> None:
    assert all("forked" in text for text in four.run(2, _forked))
    assert four.run(2, _reduce, "all2", 2) == [2.0, 2.0]


# --- what is left behind, and when not to begin ----------------------------------------------------------------------


def _shared_maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if shared_ring._FOLDER in line]


def _maps_and_descriptors(seat: Seat) -> tuple[list[str], int]:
    return _shared_maps(), len(os.listdir("/proc/self/fd"))


def test_no_file_ever_has_a_name_and_nothing_stays(mortal: Workers) -> None:
    before = mortal.run(3, _maps_and_descriptors)
    mortal.run(3, _make, "g", 3)
    for maps, _ in mortal.run(3, _maps_and_descriptors):
        assert len(maps) == 3
        assert all(line.endswith("(deleted)") for line in maps), "a killed rank would leave a file"
    assert mortal.run(3, _reduce, "g", 3) == [3.0] * 3
    mortal.run(3, _close, "g")
    after = mortal.run(3, _maps_and_descriptors)
    assert [maps for maps, _ in after] == [[]] * 3
    assert [count for _, count in after] == [count for _, count in before]


def _cannot(seat: Seat, fault: str, name: str) -> str:
    """Rank 1 meets a fault while the group is made; all ranks must say so, and hold nothing."""

    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    replaced: tuple[Any, str, Any] | None = None
    if seat.rank == 1:
        if fault == "other host":
            describe = shared_ring._describe
            replaced = (shared_ring, "_describe", lambda *args: describe(*args) | {"host": ["elsewhere", 1]})
        else:
            replaced = (os, {"small": "posix_fallocate", "unreachable": "pidfd_open"}[fault], fail)
    before = len(os.listdir("/proc/self/fd"))
    old = getattr(replaced[0], replaced[1]) if replaced else None
    try:
        if replaced:
            setattr(*replaced)
        seat.group(name, 3)
    except SharedMemoryUnavailable as error:
        error.__traceback__ = None
        assert _shared_maps() == [], "a mapping is left"
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left"
        return str(error)
    finally:
        if replaced:
            setattr(replaced[0], replaced[1], old)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("small", "rank 1: /dev/shm: [Errno 28] No space left on device"),
        ("unreachable", "rank 1: cannot open the memory of rank 0: [Errno 28]"),
        ("other host", "different hosts"),
    ],
)
def test_where_one_rank_cannot_take_part_all_say_so(mortal: Workers, fault: str, text: str) -> None:
    answers = mortal.run(3, _cannot, fault, "g")
    assert len(set(answers)) == 1
    assert text in answers[0]
    assert mortal.run(3, _reduce, "second", 3) == [3.0] * 3
