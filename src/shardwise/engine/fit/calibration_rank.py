"""The ranks that calibration starts: they measure together, and the first writes the figures as JSON.

    shardwise launch --ranks 2 -m shardwise.engine.fit.calibration_rank OUT [DISK_FOLDER]

All measurements are made in several sweeps, seconds apart, and each figure is the median of its repeats in all of them.
The spread of the repeats over their medians tells how far a step may be from its price. Of passes of a model it is the
spread of the time of the clock over the medians of the CPU time, because other processes lengthen a step too.

Operations that are measured one by one do not take from one another what they do in a model: room in the core's caches
for their operands and for the code of their kernels, and of ranks beside one another the memory that they share. So
the passes of a GPT are measured too, by one rank while the others wait and by all of them, and counted by operation;
their seconds over the sum of their operations' are a factor on the price of passes.

What an operation and an Action cost is measured with a GPT so small that its arithmetic takes no time:

    an operation              its passes without an engine, over their operations
    an Action of a pass       a further microbatch of an engine's step, less the same passes, over its Actions
    an Action that ends one   the rest of the step, over the Actions that end a step

Cost: less than a minute, of which the imports of the ranks take some seconds.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.regular_files import write_small_file
from shardwise.comm.collectives import Group
from shardwise.comm.peers import PointToPoint
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.engine.construction.build import initialize
from shardwise.engine.engine import Engine
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.plan.mesh import Mesh
from shardwise.precision.policy import DTYPES
from shardwise.simulate.measurements import (
    Repeats,
    differences,
    exchange_repeats,
    late_shares,
    message_repeats,
    operation_repeats,
    product_repeats,
    rates,
    row_repeats,
    times,
    united,
)
from shardwise.simulate.rates import measured_disk
from shardwise.simulate.storages import LiveBytes

_SWEEPS = 3
_STEPS = 14
"""Steps of the small model, of which the first two do not count."""
_FEW, _MANY = 1, 5
"""Microbatches of the two steps whose difference is the cost of a microbatch."""
_ENDS = (0.02, 0.98)
"""Shares of repeats below the low and the high end of the range of a price."""
_LEAST = 0.1
"""Least factor for the low end, and one over the largest for the high end, that a file of hardware may have."""
_MODEL = GptPolicy(layers=3, width=320, heads=5, context=128, vocab=2048)
"""Model of the measured passes: its weights and activations exceed a core's own cache, as those of larger models do."""
_ROWS = 4
"""Sequences of a measured pass."""
_PASSES = 4
"""Passes in one sweep by one rank alone, and by all."""
_SMALL = GptPolicy(layers=4, width=16, heads=1, context=4, vocab=16)


def main(arguments: list[str]) -> None:
    """Measure, and write the figures on the first rank.

    Args:
        arguments: Path of the file to write, and a folder on the disk to measure.
    """
    world = join()
    figures = measured(world, Path(arguments[1]) if len(arguments) > 1 else None)
    if world.rank == 0:
        write_small_file(Path(arguments[0]), json.dumps(figures).encode())


class Channels(NamedTuple):
    """All ranks, joined by shared memory and by gloo."""

    group: Group
    peers: PointToPoint
    gloo: Group
    gloo_peers: PointToPoint

    @classmethod
    def of(cls, world: World) -> "Channels":
        """Join all ranks of a world."""
        mesh, clock, traffic = Mesh(dp_shard=world.size), StepClock(600.0), Traffic()
        found: list[Any] = []
        for policy in (CommPolicy(), CommPolicy(transport="torch")):
            group = world.group(mesh, "dp", policy, clock, traffic)
            found += [group, world.peers(group, policy)]
        return cls(*found)


def measured(world: World, disk: Path | None) -> dict[str, Any]:
    """Return the figures of this rank, measured beside the other ranks.

    Args:
        world: The ranks.
        disk: Folder on the disk to measure; None: no disk is measured.
    """
    channels = Channels.of(world)
    passes = ModelPasses(channels.group)
    sweeps = [sweep(channels) | passes.repeats() for _ in range(_SWEEPS)]
    found = {name: united([each[name] for each in sweeps]) for name in sweeps[0]}

    def of(kind: str) -> dict[str, Repeats]:
        start = f"{kind} "
        return {name.removeprefix(start): found[name] for name in found if name.startswith(start)}

    channels.group.barrier()
    python = python_s(world)
    channels.group.barrier()
    ends = {
        "compute": _ends([*of("rate").values(), *of("operation").values()], passes.lengthened()),
        "update": _ends([found["operation update"]]),
        "exchange": _ends(list(of("exchange").values())),
    }
    return {
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "rates": {name: rates(each) for name, each in of("rate").items()},
        "operations": {name: rates(each) for name, each in of("operation").items()},
        "rows": rates(found["rows"])[0][1],
        "exchanges": {name: times(each) for name, each in of("exchange").items()},
        "unevenness": [(size, statistics.mean(each)) for size, each in found["late"].items()],
        "passes": [(ranks, statistics.median(each)) for ranks, each in found["passes"].items()],
        "work": passes.counted(),
        **python._asdict(),
        "spread": ends,
        "disk": None if disk is None else list(measured_disk(disk)),
    }


def sweep(channels: Channels) -> dict[str, Repeats]:
    """Return the repeats of all measurements but those of Python, by kind and name.

    Args:
        channels: The ranks, which make this call together.
    """
    found: dict[str, Repeats] = {}

    def keep(name: str, measure: Callable[[], Repeats]) -> None:
        channels.group.barrier()
        found[name] = measure()

    for name, dtype in DTYPES.items():
        keep(f"rate product {name}", lambda dtype=dtype: product_repeats("product", dtype))  # type: ignore[misc]
    for kind in ("batched", "attention", "convolution"):
        keep(f"rate {kind} fp32", lambda kind=kind: product_repeats(kind, torch.float32))  # type: ignore[misc]
    for of_class in ("arithmetic", "function", "copy", "update"):
        keep(f"operation {of_class}", lambda of_class=of_class: operation_repeats(of_class))  # type: ignore[misc]
    keep("rows", row_repeats)
    for start, group, peers in (
        ("exchange ", channels.group, channels.peers),
        ("exchange gloo ", channels.gloo, channels.gloo_peers),
    ):
        found |= {f"{start}{name}": each for name, each in exchange_repeats(group).items()}
        keep(f"{start}send", lambda group=group, peers=peers: message_repeats(group, peers))  # type: ignore[misc]
    keep("late", lambda: late_shares(channels.group))
    return found


class ModelPasses:
    """Passes of a model without an engine, by one rank while the others wait, and by all ranks at once.

    Args:
        group: The ranks.
        model: Description of the model.
    """

    def __init__(self, group: Group, model: GptPolicy = _MODEL):
        self._group = group
        assert model.vocab is not None, "the models here have vocabularies"
        self._module = Gpt(model)
        ids = torch.randint(model.vocab, (_ROWS, model.context), generator=torch.Generator().manual_seed(0))
        self._batch = {"tokens": ids, "targets": ids}
        self._elapsed: Repeats = {1.0: [], float(group.size): []}
        """Seconds of the clock of all passes, by the number of ranks that run them at once."""
        self._taken: Repeats = {1.0: [], float(group.size): []}
        """Seconds that count for the figures."""
        self._run()

    def _run(self) -> None:
        self._module(**self._batch).backward()
        self._module.zero_grad()

    def repeats(self) -> dict[str, Repeats]:
        """Return the seconds of passes by the number of ranks that run them at once, and keep them."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        size = self._group.size
        found: Repeats = {1.0: [], float(size): []}
        for number in range(_PASSES * (size + 1)):
            turn = number % (size + 1)  # the last turn is that of all ranks
            self._group.barrier()
            if turn not in (self._group.index, size):
                continue
            self._run()  # finds in its caches what the ranks that ran before left there
            ranks = 1.0 if turn < size else float(size)
            begin, begin_s = clock(), time.perf_counter()
            self._run()
            found[ranks].append(clock() - begin)
            self._elapsed[ranks].append(time.perf_counter() - begin_s)
        for ranks, seconds in found.items():
            self._taken[ranks] += seconds
        return {"passes": found}

    def lengthened(self) -> list[float]:
        """Return the time of the clock of each pass over the median of what counts for the figures."""
        return [
            each / statistics.median(self._taken[ranks])
            for ranks, row in self._elapsed.items()
            for each in row
        ]

    def counted(self) -> dict[str, Any]:
        """Return the operations of a pass: products with their bytes, and others, by class."""
        with LiveBytes() as live:
            self._run()
        work = live.work.take()
        return {
            "calls": work.calls,
            "products": [
                [*product, calls, work.product_bytes[product]] for product, calls in work.products.items()
            ],
            "others": [[*each, calls] for each, calls in work.others.items()],
        }


def _ends(found: list[Repeats], more: Sequence[float] = ()) -> tuple[float, float]:
    """Return the factors between which most repeats are, over the medians of their sizes.

    The wider range counts if there are ``more`` repeats, given as factors, because they are fewer.
    """
    ends = _ends_of([each for repeats in found for each in differences(repeats)])
    if not more:
        return ends
    others = _ends_of(more)
    return min(ends[0], others[0]), max(ends[1], others[1])


def _ends_of(factors: Sequence[float]) -> tuple[float, float]:
    rows = sorted(factors)
    low, high = (rows[round(share * (len(rows) - 1))] for share in _ENDS)
    return min(max(low, _LEAST), 1.0), max(min(high, 1 / _LEAST), 1.0)


# Python ------------------------------------------------------------------------------------------------------------


class PythonSeconds(NamedTuple):
    """Seconds that operations and Actions take however small they are."""

    operation: float
    action: float
    ending_action: float


def python_s(world: World) -> PythonSeconds:
    """Return the seconds that an operation, an Action of a pass and an Action that ends a step take.

    Every rank measures engines of its own, beside the other ranks.

    Args:
        world: This rank's World.
    """
    alone = world.among((world.rank,))
    model, batch = Gpt(_SMALL), _batch()

    def run() -> None:
        model(**batch).backward()

    few, many = (_small_engine(alone, number) for number in (_FEW, _MANY))
    calls: dict[str, Callable[[], object]] = {
        "pass": run,
        "few": lambda: few.train_step([batch] * _FEW),
        "many": lambda: many.train_step([batch] * _MANY),
    }
    seconds = {name: statistics.median(row) for name, row in _repeats_in_turn(calls).items()}
    (acted, ending), (acted_more, _) = _counts(few), _counts(many)
    for engine in (few, many):
        engine.close()
    with LiveBytes() as live:
        run()
        operations = live.work.take().calls
    microbatch_s = (seconds["many"] - seconds["few"]) / (_MANY - _FEW)
    actions = (acted_more - acted) / (_MANY - _FEW)
    return PythonSeconds(
        seconds["pass"] / operations,
        max((microbatch_s - seconds["pass"]) / actions, 1e-7),
        max((seconds["few"] - _FEW * microbatch_s) / ending, 1e-7),
    )


def _batch() -> dict[str, Tensor]:
    ids = torch.zeros(1, _SMALL.context, dtype=torch.int64)
    return {"tokens": ids, "targets": ids}


def _small_engine(world: World, microbatches: int) -> Engine:
    """Return an engine of a small model whose steps have so many microbatches."""
    settings = {
        "batch": {"accumulation": microbatches, "duplicates": "allow"},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "zero": {"stage": 0},
        "check_first_step": "off",
    }
    return initialize(Gpt(_SMALL), settings, world=world)


def _counts(engine: Engine) -> tuple[int, int]:
    """Return the Actions of an engine's list, and those that end a step."""
    actions = engine.plan.own.actions
    return len(actions), sum(action.kind.ends_step for action in actions)


def _repeats_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of calls that take turns, so that a slow moment hits all of them alike."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_STEPS):
        for name, call in calls.items():
            begin = clock()
            call()
            if number > 1:
                found[name].append(clock() - begin)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
