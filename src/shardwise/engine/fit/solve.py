"""Solve: the largest value of one key with which a job fits a memory, or the fewest ranks.

    batch.micro_size, experts.rows     samples of a microbatch, pairs that a rank's experts work on at once
    model.layers, model.context        sizes of the model, whose maker and example follow from the configuration
    ranks                              over which state and samples are divided

A rank's memory grows with each of these, and falls with the ranks. The value is found by doubling and halving
(ordered.py), and the value next to the result was counted and does not fit. Other keys have no order; ``search`` tries
their values.

Cost: a pass on shapes for each value that is looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.policy import nearest
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.fits import Memory, budget, is_within
from shardwise.engine.fit.foresee import MemoryEstimate, read
from shardwise.engine.fit.knobs import KNOBS, divisors
from shardwise.engine.fit.ordered import largest
from shardwise.engine.parts.inputs import Loss
from shardwise.plan.mesh import DataParallelPolicy

RANKS = "ranks"
"""Key of the number of ranks, which is no key of a configuration."""
_OF_MODEL = ("model.layers", "model.context")
_MOST_RANKS = 1 << 17
_OF_RUNS = {knob.key for knob in KNOBS if knob.order == "more"}


class SolvedKey(NamedTuple):
    """The largest value of a key that fits, or the fewest ranks."""

    key: str
    value: int | None
    """The value; None if none fits."""
    outlook: MemoryEstimate
    """The outlook with the value, or with the one that was nearest to fitting."""
    beyond: int | None
    """The next value, which does not fit; None if there is none, or ``value`` is None."""

    def plain(self) -> dict[str, Any]:
        """Return the result as values for programs."""
        return {"key": self.key, "value": self.value}


class _Look(NamedTuple):
    """A value and the outlook with it."""

    value: int
    outlook: MemoryEstimate


def ordered_keys() -> list[str]:
    """Return the keys for which ``solve`` finds a value."""
    return sorted({*_OF_RUNS, *_OF_MODEL, RANKS})


def solve(
    key: str,
    make: Callable[[RunConfig], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    memory: Memory,
    example: Callable[[RunConfig], Any],
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    loss: Loss | None = None,
    multiple: int = 1,
    most: int = 1 << 24,
) -> SolvedKey:
    """Return the largest value of ``key``, or the fewest ranks, with which a step fits ``memory``.

    The samples of a step stay as they are: of ``batch.micro_size`` the values are tried that divide a rank's share of
    ``batch.global_size``, or any if it is not given.

    Args:
        key: ``batch.micro_size``, ``experts.rows``, ``model.layers``, ``model.context`` or ``ranks``.
        make: function of the configuration that builds the model anew each time, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        memory: bytes of one rank by tier, as for ``fits``.
        example: function of the configuration that returns a microbatch, or tensors of its shapes.
        ranks: number of ranks of the job; with the key ``ranks``, ignored.
        device: device of the ranks; None: CPU.
        loss: the loss function, as ``initialize`` takes it.
        multiple: the result is a multiple of this number.
        most: the largest value that is tried.

    Raises:
        ShardwiseError: as ``foresee``.
        ConfigError: if ``memory`` is not valid, or ``key`` has no order.
    """
    if key not in ordered_keys():
        raise ConfigError(
            f"solve: the values of {key!r} have no order in which a step's memory grows{nearest(key, ordered_keys())}"
        )
    given, have, device = load(config), budget(memory), device or torch.device("cpu")
    process_bytes: int | None = None

    def look(value: int) -> _Look:
        nonlocal process_bytes
        count = value if key == RANKS else ranks
        changed = given if key == RANKS else load(given, _overrides(given, key, value))
        job = read(lambda: make(changed), changed, count, device, example(changed), loss)
        if not job.passed:
            raise UsageError("solve: an example is missing: a microbatch, or tensors of its shapes")
        process_bytes = job.process_bytes if process_bytes is None else process_bytes
        job = job._replace(process_bytes=process_bytes)
        return _Look(value, job.outlook(job.settings.offload))

    values = _values(given, key, ranks, multiple, most)
    number, found = largest(
        lambda place: look(values[place - 1]), lambda each: is_within(each.outlook, have), len(values)
    )
    if not number:
        return SolvedKey(key, None, found.outlook, None)
    return SolvedKey(key, found.value, found.outlook, values[number] if number < len(values) else None)


def _values(given: RunConfig, key: str, ranks: int, multiple: int, most: int) -> Sequence[int]:
    """Return the values to look at, the one with the least memory first.

    Raises:
        ConfigError: if the configuration sets the number of ranks.
    """
    if key == RANKS:
        return [each for each in _rank_counts(given, min(most, _MOST_RANKS)) if each % multiple == 0]
    total = given.batch.global_size
    if key == "batch.micro_size" and total is not None:
        dp = given.mesh.mesh(ranks).size("data")
        return [each for each in divisors(total // dp, most) if each % multiple == 0]
    return range(multiple, most + 1, multiple)


def _overrides(given: RunConfig, key: str, value: int) -> tuple[str, ...]:
    is_cut = key == "batch.micro_size" and given.batch.global_size is not None
    return (
        f"{key}={value}",
        *["batch.accumulation=null"] * (is_cut and given.batch.accumulation is not None),
    )


def _rank_counts(given: RunConfig, most: int) -> list[int]:
    """Return the numbers of ranks that the mesh and the batch allow, descending."""
    mesh, batch = given.mesh, given.batch
    model, shard = mesh.pp * mesh.cp * mesh.tp, 1
    if isinstance(mesh.dp, DataParallelPolicy):
        shard = mesh.dp.shard
    if isinstance(mesh.dp, int) or (mesh.dp is not None and mesh.dp.replicate != "auto"):
        raise ConfigError(
            "solve: mesh.dp sets the number of ranks; leave it out to solve for ranks, or set {replicate: auto, shard: "
            "N}"
        )
    sizes: Sequence[int] = range(shard, most // model + 1, shard)
    if batch.global_size is not None:
        sizes = divisors(batch.global_size // (batch.micro_size or batch.accumulation or 1), most // model)
    experts = mesh.ep * mesh.etp
    fitting = [dp for dp in sizes if dp % shard == 0 and (dp * mesh.cp * mesh.tp) % experts == 0]
    return [model * dp for dp in reversed(fitting)]
