"""Ranges of a loop on several threads."""

import threading

import pytest
import torch

from shardwise.kernels.threads import in_threads


def ranges(count: int, least: int, step: int = 1, threads: int = 3) -> list[tuple[int, int]]:
    torch.set_num_threads(threads)
    lock, found = threading.Lock(), []

    def run(start: int, stop: int) -> None:
        with lock:
            found.append((start, stop))

    in_threads(run, count, least, step)
    return sorted(found)


def test_ranges_make_up_the_whole_and_are_cut_at_multiples() -> None:
    assert ranges(10, 1) == [(0, 4), (4, 8), (8, 10)]
    assert ranges(10, 1, step=5) == [(0, 5), (5, 10)]
    assert ranges(10, 4) == [(0, 5), (5, 10)]


def test_little_work_stays_on_this_thread() -> None:
    torch.set_num_threads(3)
    seen: list[str] = []
    in_threads(lambda start, stop: seen.append(threading.current_thread().name), 5, 3)
    assert seen == [threading.current_thread().name] and ranges(9, 1, threads=1) == [(0, 9)]


def test_an_error_of_a_range_is_raised() -> None:
    def run(start: int, stop: int) -> None:
        if start:
            raise ValueError(f"from {start}")

    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="from 5"):
        in_threads(run, 10, 1)
