"""Compiled loops on as many threads as torch may use in this process.

A loop runs without the interpreter's lock, on one thread. torch's own threads cannot be used from Python, so this
module has other threads, which sleep between calls.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def in_threads(run: Callable[[int, int], object], count: int, least: int, step: int = 1) -> None:
    """Call ``run(start, stop)`` in threads for ranges that make up [0, count), and raise the first error.

    Args:
        run: called with the start and the end of a range.
        count: end of the last range.
        least: smallest length of a range, approximately.
        step: ranges are cut at multiples of this number.
    """
    threads = min(torch.get_num_threads(), count // least)
    if threads <= 1:
        run(0, count)
        return
    each = -(-count // (threads * step)) * step
    starts = range(0, count, each)
    for _ in _pool(threads).map(lambda start: run(start, min(start + each, count)), starts):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "shardwise loops")
