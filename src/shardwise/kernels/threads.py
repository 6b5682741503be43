"""Compiled loops on as many threads as torch may use here.

A loop runs without the interpreter's lock, on one thread. torch's own threads are not to be had from Python, so there
are others, which sleep between calls.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def in_threads(run: Callable[[int, int], object], count: int, least: int, step: int = 1) -> None:
    """``run(start, stop)`` for ranges that make up [0, count), beside one another: of about ``least`` or more each, and
    cut at multiples of ``step``. The first error is raised."""
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
