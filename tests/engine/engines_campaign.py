"""A campaign of engines in one job: built, refused, closed, dropped and collected at random, on two ranks.

    python -m tests.engine.engines_campaign [ENGINES] [SEED] [WIDTH]

Both ranks draw what becomes of an engine from one seed: its stage, what carries its tensors, where its state lies, and
whether it is refused, closed, or dropped without ``close``. Python's collector runs at thresholds of each rank's own,
from 1 to 700, and after an engine was dropped on one rank alone, which both draw.

WIDTH is the size of the model's layers: 632 makes 3.2 MB of fp32 parameters.

Prints what each rank holds after 10 engines and after all: resident memory, threads, descriptors.
"""

import contextlib
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise
from shardwise.base.errors import ShardwiseError

__all__ = ["campaign", "fresh_job"]

WIDTH = 96
REFUSALS: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp": 5}},
    {"init_from": {"path": "/nonexistent"}},
    {"batch": {"global_size": 7, "micro_size": 2}},
)
MiB = 1 << 20


def fresh_job(function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(*args)`` on two ranks of a job of their own; results by rank."""
    shardwise.initialize  # noqa: B018  imported once, and not in every rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread
        return shardwise.launch(function, *args, ranks=2, every=True)


class Held(NamedTuple):
    """What one process holds."""

    resident_bytes: int
    threads: int
    descriptors: int


def held() -> Held:
    """What this process holds, once threads that end have ended and memory that is free was given back."""
    gc.collect()
    time.sleep(1.5)  # threads without work linger for half a second, those of a watch for one
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def model(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))


@contextlib.contextmanager
def thresholds(own: random.Random) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(own.choice((1, 2, 7, 30, 100, 700)), own.randint(1, 10), own.randint(1, 10))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def one_life(
    number: int, rank: int, drawn: random.Random, own: random.Random, folder: Path, width: int = WIDTH
) -> str:
    """Build an engine, train a step and end it as ``drawn`` says, which is alike on all ranks."""
    config: dict[str, Any] = {"zero": {"stage": drawn.randrange(4)}}
    if drawn.random() < 0.5:
        config["comm"] = {"transport": "torch"}
    if drawn.random() < 0.4:
        config["offload"] = {"optimizer": "disk", "disk_path": str(folder)}
        if config["zero"]["stage"] == 3:
            config["offload"]["parameters"] = "disk"
    fate = drawn.choice(("refused", "closed", "dropped"))
    refusal, steps, collects = drawn.choice(REFUSALS), drawn.randrange(3), drawn.randrange(2)
    with thresholds(own):
        if fate == "refused":
            try:
                shardwise.initialize(
                    model(number, width), config | refusal, loss=lambda net, x: net(x).square().mean()
                )
            except ShardwiseError:
                return fate
            raise AssertionError(f"engine {number}: {refusal} was taken")
        engine = shardwise.initialize(
            model(number, width), config, loss=lambda net, x: net(x).square().mean()
        )
        for step in range(steps):
            rows = torch.full((2, width), 0.1 * (1 + step + rank))
            assert engine.train_step([rows]).loss > 0
        if fate == "closed":
            engine.close(whole=drawn.random() < 0.5)
        else:
            drawn.random()
        del engine
        if fate == "dropped" and collects == rank:
            gc.collect()
    return fate


def campaign(engines: int, seed: int, folder: str, width: int = WIDTH) -> list[tuple[int, Held]]:
    """``engines`` lives; what this rank held after 10 of them and after all."""
    rank = int(os.environ["RANK"])
    drawn, own = random.Random(seed), random.Random(f"{seed} {rank}")
    found = []
    fates = dict.fromkeys(("refused", "closed", "dropped"), 0)
    for number in range(engines):
        fates[one_life(number, rank, drawn, own, Path(folder), width)] += 1
        if number + 1 in (10, engines):
            gc.collect()
            # What dropped engines left open ends where the next one is built.
            shardwise.initialize(model(number, width), {}, loss=lambda net, x: net(x).sum()).close()
            found.append((number + 1, held()))
    assert all(fates.values()) or engines < 10, fates
    return found


def main(engines: int = 100, seed: int = 0, width: int = WIDTH) -> None:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        for rank, found in enumerate(fresh_job(campaign, engines, seed, folder, width)):
            for number, each in found:
                print(
                    f"rank {rank} after {number:3d} engines: {each.resident_bytes / MiB:.1f} MiB resident, "
                    f"{each.threads} threads, {each.descriptors} descriptors"
                )
        print(f"{time.monotonic() - begun:.0f} s; left in the disk folder: {sorted(os.listdir(folder))}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
