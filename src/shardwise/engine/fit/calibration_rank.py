"""The ranks that calibration starts: they measure together, and the first writes the figures as JSON.

    shardwise launch --ranks 2 -m shardwise.engine.fit.calibration_rank OUT [DISK_FOLDER]

Python per Action is measured with an engine on a chain of small layers: further microbatches of a step, less the same
passes without an engine, over their Actions.

Cost: half a minute, of which the imports of the ranks take a third.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.base.regular_files import write_small_file
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.engine.construction.build import initialize
from shardwise.plan.mesh import Mesh
from shardwise.precision.policy import DTYPES
from shardwise.simulate.measurements import (
    best_s,
    exchange_times,
    memory_rate,
    operation_s,
    product_rates,
    row_rate,
)
from shardwise.simulate.rates import disk_rate

_UNITS, _STEPS = 24, 12


def main(arguments: list[str]) -> None:
    """Measure, and write the figures on the first rank.

    Args:
        arguments: Path of the file to write, and a folder on the disk to measure.
    """
    world = join()
    group = world.group(Mesh(dp_shard=world.size), "dp", CommPolicy(), StepClock(600.0), Traffic())
    figures = measured(world, group, Path(arguments[1]) if len(arguments) > 1 else None)
    if world.rank == 0:
        write_small_file(Path(arguments[0]), json.dumps(figures).encode())


def measured(world: World, group: Group, disk: Path | None) -> dict[str, Any]:
    """Return the figures of this rank, measured beside the other ranks.

    Args:
        world: The ranks.
        group: All of them.
        disk: Folder on the disk to measure; None: no disk is measured.
    """
    figures: dict[str, Any] = {"ranks": world.size, "threads": torch.get_num_threads(), "rates": {}}
    for name, dtype in DTYPES.items():
        group.barrier()
        figures["rates"][f"product {name}"] = product_rates("product", dtype)
    for kind in ("attention", "convolution"):
        group.barrier()
        figures["rates"][f"{kind} fp32"] = product_rates(kind, torch.float32)
    group.barrier()
    figures["memory"] = memory_rate()
    group.barrier()
    figures["rows"] = row_rate()
    group.barrier()
    figures["operation"] = operation_s()
    figures["exchanges"] = exchange_times(group)
    group.barrier()
    figures["action"] = action_s(world)
    group.barrier()
    figures["disk"] = None if disk is None else disk_rate(disk)
    return figures


class _Chain(nn.Sequential):
    """Layers that are so small that a pass takes no time but Python's."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4, bias=False) for _ in range(_UNITS)))


def action_s(world: World) -> float:
    """Return the seconds of Python for one Action: of further microbatches, less the same passes without an engine."""
    few, many = 1, 9
    batch = torch.ones(2, 4)
    seconds = {number: _step_s(world, batch, number) for number in (few, many)}
    plain = _Chain()

    def run() -> None:
        plain(batch).sum().backward()

    extra_s = (seconds[many] - seconds[few]) / (many - few) - best_s(run)
    return max(extra_s / (2 * _UNITS), 1e-7)


def _step_s(world: World, batch: torch.Tensor, microbatches: int) -> float:
    """Return the seconds of the fastest step of an engine with so many microbatches."""
    settings = {
        "batch": {"accumulation": microbatches, "duplicates": "allow"},
        "zero": {"stage": 0},
        "check_first_step": "off",
    }
    engine = initialize(_Chain(), settings, loss=lambda model, x: model(x).sum(), world=world)
    best = float("inf")
    for _ in range(_STEPS):
        begin = time.perf_counter()
        engine.train_step([batch] * microbatches)
        best = min(best, time.perf_counter() - begin)
    engine.close()
    return best


if __name__ == "__main__":
    main(sys.argv[1:])
