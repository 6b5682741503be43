"""How fast two processes can tell one another that a piece is ready: a round trip of two tokens.

Only ways that also order memory on weakly ordered machines may carry the ring (comm/shared_ring.py). A plain counter is
here for comparison: it does not.

    python benchmarks/collectives/tokens.py
"""

import ctypes
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable

Post = Callable[[], object]
Ends = tuple[Post, Post]
ROUNDS = 5000
SPIN_S = 50e-6


def semaphores(polls: bool) -> tuple[Ends, Ends]:
    """POSIX semaphores in shared memory, by way of ctypes."""
    quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for call in (quick.sem_post, quick.sem_trywait, slow.sem_wait):
        call.argtypes = [ctypes.c_void_p]

    def ends(mine: int, theirs: int) -> Ends:
        def wait(_keep: mmap.mmap = memory) -> None:
            end = time.perf_counter() + SPIN_S
            while polls and time.perf_counter() < end:
                if quick.sem_trywait(theirs) == 0:
                    return
                os.sched_yield()
            slow.sem_wait(theirs)

        return (lambda: quick.sem_post(mine)), wait

    for address in (base, base + 128):
        quick.sem_init(ctypes.c_void_p(address), 1, 0)
    return ends(base, base + 128), ends(base + 128, base)


def sockets() -> tuple[Ends, Ends]:
    """A pair of Unix sockets, one byte for a token."""
    left, right = socket.socketpair()
    return tuple(((lambda s=s: s.send(b"x")), (lambda s=s: s.recv(1))) for s in (left, right))  # type: ignore[misc,return-value]


def pipes() -> tuple[Ends, Ends]:
    """A pipe for each direction."""
    (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
    return (
        ((lambda: os.write(write_a, b"x")), (lambda: os.read(read_b, 1))),
        ((lambda: os.write(write_b, b"x")), (lambda: os.read(read_a, 1))),
    )


def event_descriptors() -> tuple[Ends, Ends]:
    """An eventfd for each direction."""
    a, b = os.eventfd(0), os.eventfd(0)
    return (
        ((lambda: os.eventfd_write(a, 1)), (lambda: os.eventfd_read(b))),
        ((lambda: os.eventfd_write(b, 1)), (lambda: os.eventfd_read(a))),
    )


def plain_counters() -> tuple[Ends, Ends]:
    """Counters that each side reads until they move; not ordered with other memory except on x86."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    a = ctypes.c_int64.from_buffer(memory, 0)
    b = ctypes.c_int64.from_buffer(memory, 128)

    def ends(mine: ctypes.c_int64, theirs: ctypes.c_int64) -> Ends:
        seen = 0

        def post() -> None:
            mine.value += 1

        def wait() -> None:
            nonlocal seen
            seen += 1
            while theirs.value < seen:
                os.sched_yield()

        return post, wait

    return ends(a, b), ends(b, a)


def round_trips(make: Callable[[], tuple[Ends, Ends]]) -> list[float]:
    """Sorted seconds of ``ROUNDS`` round trips between this process and a forked one."""
    (post, wait), (answer, hear) = make()

    def echo() -> None:
        for _ in range(ROUNDS):
            hear()
            answer()

    process = multiprocessing.get_context("fork").Process(target=echo)
    process.start()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        post()
        wait()
        taken.append(time.perf_counter() - start)
    process.join()
    return sorted(taken)


def main() -> None:
    """Print the table."""
    ways: dict[str, Callable[[], tuple[Ends, Ends]]] = {
        "semaphores, polling with sched_yield first": lambda: semaphores(True),
        "semaphores, sleeping at once": lambda: semaphores(False),
        "eventfd": event_descriptors,
        "pipes": pipes,
        "Unix sockets": sockets,
        "plain counters with sched_yield": plain_counters,
    }
    print("| way | median, us | 90 %, us |\n|---|---:|---:|")
    for name, make in ways.items():
        taken = round_trips(make)
        print(f"| {name} | {taken[ROUNDS // 2] * 1e6:.1f} | {taken[ROUNDS * 9 // 10] * 1e6:.1f} |")


if __name__ == "__main__":
    main()
