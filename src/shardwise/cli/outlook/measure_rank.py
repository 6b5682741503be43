"""The ranks that ``shardwise plan --measure`` starts: each runs a few steps of one configuration on made batches.

    shardwise launch --ranks 2 -m shardwise.cli.outlook.measure_rank JOB.json OUT

JOB.json holds the configuration with every key and the number of steps. Rank r writes ``OUT/r.json``: the median
seconds of the steps, and the most bytes that the rank has held. Batches have the shapes of the plan's, and tokens are
drawn evenly from the vocabulary. The run's data is not read, but for the sample of ``data.target`` that plans read.

Cost: the start of the ranks, two steps that are not counted, and the steps.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.pytree import rebuilt
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.cli.outlook.job_shapes import shapes_of
from shardwise.comm.world import World, join
from shardwise.config.auto import resolve
from shardwise.config.run import RunConfig
from shardwise.engine.construction.build import initialize
from shardwise.observe.memory import peak_resident_bytes
from shardwise.observe.sinks import MonitorPolicy

_UNCOUNTED = 2
"""Steps before those that count: the first makes buffers and, on a device, chooses kernels."""


def main(arguments: Sequence[str]) -> None:
    """Run the steps as one rank, and write what they took.

    Args:
        arguments: Path of the job, and the folder for the ranks' figures.
    """
    job = json.loads(read_small_file(Path(arguments[0])))
    config = RunConfig.parse(job["config"], "the measured configuration")
    world = join(policy=config.comm)
    figures = figures_of(world, config, job["steps"])
    write_small_file(Path(arguments[1]) / f"{world.rank}.json", json.dumps(figures).encode())
    world.close()


def figures_of(world: World, config: RunConfig, steps: int) -> dict[str, float]:
    """Return the median seconds of a step on this rank, and the most bytes that the rank has held.

    Args:
        world: The ranks.
        config: The configuration, with a model.
        steps: Steps that count.
    """
    config = resolve(config, world.size, world.device.type).config
    micro_size, accumulation = config.batch.micro_size, config.batch.accumulation
    assert micro_size is not None and accumulation is not None, "a plan of this configuration was made"
    shapes = shapes_of(config, micro_size)
    engine = initialize(shapes.make(), _undisturbed(shapes.config), world=world)
    draws = torch.Generator().manual_seed(engine.dp_index)
    vocab = getattr(shapes.config.model, "vocab", None) or 2
    batches = [filled(shapes.example, vocab, draws) for _ in range(accumulation)]
    seconds = []
    for _ in range(_UNCOUNTED + steps):
        begin_s = time.perf_counter()
        engine.train_step(batches)
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        seconds.append(time.perf_counter() - begin_s)
    is_cpu = world.device.type == "cpu"
    peak = peak_resident_bytes() if is_cpu else torch.accelerator.max_memory_allocated(world.device)
    engine.close()
    return {"step_s": statistics.median(seconds[_UNCOUNTED:]), "peak_bytes": peak}


def _undisturbed(config: RunConfig) -> RunConfig:
    """Return the configuration without the check of the first step, the comparison of batches, and monitors."""
    batch = config.batch.model_copy(update={"duplicates": "allow"})
    monitor = MonitorPolicy().asked()
    return config.model_copy(update={"check_first_step": "off", "batch": batch, "monitor": monitor})


def filled(value: Any, vocab: int, draws: torch.Generator) -> Any:
    """Return a pytree with its tensors on meta replaced by numbers: whole ones below ``vocab``, others near zero.

    Tensors of one dim that hold whole numbers are labels of pictures, of which the first class always exists.

    Args:
        value: The pytree.
        vocab: Limit of whole numbers.
        draws: Generator of the numbers.
    """
    if not isinstance(value, Tensor):
        return rebuilt(value, lambda inner: filled(inner, vocab, draws))
    if not value.is_meta:
        return value
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=draws, dtype=value.dtype)
    if value.dim() < 2:
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.randint(vocab, value.shape, generator=draws, dtype=value.dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
