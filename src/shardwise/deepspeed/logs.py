"""``deepspeed.utils.logger`` and its like: the log of DeepSpeed's scripts is Python's, under ``shardwise``."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from shardwise.comm import default_group
from shardwise.deepspeed.device import get_accelerator

logger = logging.getLogger("shardwise.deepspeed.script")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks alone; on all where they are left out or have a -1."""
    own = default_group.rank()
    if not ranks or -1 in ranks or own in ranks:
        logger.log(level, "[rank %d] %s", own, message)


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, for each message once."""
    log_dist(message, ranks, level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks alone."""
    own = default_group.rank()
    if not ranks or -1 in ranks or own in ranks:
        print(f"[rank {own}] {message}")


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0."""
    if default_group.rank() == 0 and (debug or force):
        print(message)


@cache
def warning_once(*args: Any) -> None:
    """A warning, for each text once."""
    logger.warning(*args)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Level of the log, by its name."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` as it is: torch's profiler names calls without marks."""
    return func


def see_memory_usage(message: str, force: bool = False, **ignored: Any) -> None:
    """Log the memory in use, where ``force`` is true."""
    if force:
        device = get_accelerator()
        now, peak = device.memory_allocated(), device.max_memory_allocated()
        log_dist(f"{message}: {now / 2**30:.2f} GiB in use, {peak / 2**30:.2f} at the peak", [0])
