"""``deepspeed.utils.logger`` and related functions, which use Python's logging below ``shardwise``."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from shardwise.comm import default_group
from shardwise.deepspeed.calls.device import get_accelerator

logger = logging.getLogger("shardwise.deepspeed.script")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks only; on all ranks if ``ranks`` is empty or contains -1."""
    own = default_group.rank()
    if not ranks or -1 in ranks or own in ranks:
        logger.log(level, "[rank %d] %s", own, message)


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO) -> None:
    """Log a message as ``log_dist`` does, but each message only once."""
    log_dist(message, ranks, level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks only; on all ranks if ``ranks`` is empty or contains -1."""
    own = default_group.rank()
    if not ranks or -1 in ranks or own in ranks:
        print(f"[rank {own}] {message}")


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print a message on rank 0 if ``debug`` or ``force`` is True."""
    if default_group.rank() == 0 and (debug or force):
        print(message)


@cache
def warning_once(*args: Any) -> None:
    """Log a warning, each text only once."""
    logger.warning(*args)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the log, given the level's name."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func`` as it is: torch's profiler records calls without marks."""
    return func


def see_memory_usage(message: str, force: bool = False, **ignored: Any) -> None:
    """Log the device memory in use and its peak on rank 0, if ``force`` is True."""
    if force:
        device = get_accelerator()
        now, peak = device.memory_allocated(), device.max_memory_allocated()
        log_dist(f"{message}: {now / 2**30:.2f} GiB in use, {peak / 2**30:.2f} at the peak", [0])
