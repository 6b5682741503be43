"""Removals: how far each single change of a knob lowers the peak of a step, by row, and its price in seconds.

Each value of each knob that does not change the run's numbers is tried by itself on the configured job. The change that
removes a row is the one under which the row falls most at the peak, among those under which the peak falls.

Cost: a Plan for each value, and a pass on shapes where the value changes the passes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, MeshError, PlanError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.fits import Memory, budget, seconds_of
from shardwise.engine.fit.foresee import MemoryEstimate
from shardwise.engine.fit.jobs import JobShelf, rows_of
from shardwise.engine.fit.knobs import KNOBS, Copies, Knob, KnobScope, data_ranks, knob_of, overrides_of
from shardwise.engine.fit.search import batch_of, hardware_of, scope_of
from shardwise.engine.parts.inputs import Loss


class Removal(NamedTuple):
    """One change of the configuration, and what it saves at the peak of a step."""

    set: tuple[str, ...]
    """Overrides; the first is the key and value that was tried, others keep the samples of a step as they are."""
    saves_bytes: int
    """Bytes by which the peak of the device's memory falls."""
    price_s: float
    """Seconds that the change adds to a step."""
    rows: Mapping[str, int]
    """Bytes by which each row falls from peak to peak, without rows that stay."""


def removals(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    memory: Memory,
    example: Any,
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
    loss: Loss | None = None,
    knobs: Collection[str] | None = None,
    per_host: int | None = None,
) -> tuple[Removal, ...]:
    """Return what each single change of a knob saves, the change that saves most first.

    Args:
        make: function that builds the model anew each time, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        memory: bytes of one rank by tier, as for ``fits``; state moves only to tiers that are named.
        example: a microbatch, as for ``search``.
        ranks: number of ranks of the job.
        device: device of the ranks; None: CPU.
        hardware: rates of a rank; None: measured in this process.
        loss: the loss function, as ``initialize`` takes it.
        knobs: keys of the knobs that are tried; None: all.
        per_host: ranks of one host, within which tensors are cut; None: 8.

    Raises:
        ShardwiseError: as ``foresee``.
    """
    device, given = device or torch.device("cpu"), load(config)
    shelf = JobShelf(make, device, example, loss, per_host)
    sizes = batch_of(given, [ranks], None if callable(example) else rows_of(example))
    scope = scope_of(shelf, given, ranks, budget(memory), sizes, per_host or 8)
    rates = hardware_of(hardware, given, device)
    now = _configured(scope)
    job = shelf.job(load(given, overrides_of(scope, now)), ranks)
    before = job.outlook(job.settings.offload)
    before_s = seconds_of(job, before, job.settings.offload, rates).total
    found = []
    for knob in KNOBS:
        if "numbers" in knob.changes or (knobs is not None and knob.key not in knobs):
            continue
        for chosen in _changed(scope, knob, now):
            said = overrides_of(scope, chosen)
            try:
                job = shelf.job(load(given, said), ranks)
                outlook = job.outlook(job.settings.offload)
            except (ConfigError, PlanError, MeshError):
                continue
            seconds = seconds_of(job, outlook, job.settings.offload, rates).total
            found.append(_removal(said, before, outlook, seconds - before_s))
    return tuple(sorted(found, key=lambda each: (-each.saves_bytes, each.price_s, each.set)))


def remover_of(row: str, found: Collection[Removal]) -> Removal | None:
    """Return the change that removes most of a row of the peak; None if no change that lowers the peak does.

    Args:
        row: Name of a row.
        found: Result of ``removals``.
    """
    helping = [each for each in found if each.saves_bytes > 0 and each.rows.get(row, 0) > 0]
    return min(helping, key=lambda each: (-each.rows[row], each.price_s, each.set), default=None)


def _configured(scope: KnobScope) -> dict[str, Any]:
    now = {knob.key: knob.current(scope) for knob in KNOBS}
    copies, dp = now["mesh.dp"], data_ranks(scope, now)
    return now if copies.replicate * copies.shard == dp else now | {"mesh.dp": Copies(1, dp)}


def _changed(scope: KnobScope, knob: Knob, now: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configured values with each other value of one knob.

    Ranks that cut the model are taken from the data-parallel ones, whose samples stay those of the step.
    """
    source = knob_of("offload.optimizer") if knob.key == "offload.parameters" else knob
    for value in source.values(scope, now):
        if value == now[knob.key]:
            continue
        chosen = {**now, knob.key: value}
        model = chosen["mesh.pp"] * chosen["mesh.tp"]
        if scope.ranks % model:
            continue
        dp = scope.ranks // model
        if knob.key in ("mesh.pp", "mesh.tp"):
            chosen["mesh.dp"] = Copies(1, dp)
        if knob.key == "pipeline.schedule" and value == "interleaved_1f1b":
            chosen["pipeline.virtual_stages"] = 2
        if knob.key == "offload.parameters" and value != "device":
            chosen["offload.optimizer"] = value
        if chosen["batch.global_size"] % (dp * chosen["batch.micro_size"]) == 0:
            yield chosen


def _removal(said: tuple[str, ...], before: MemoryEstimate, after: MemoryEstimate, price_s: float) -> Removal:
    one, other = before.step, after.step
    if one is None or other is None:
        raise UsageError("removals: an example is missing: a microbatch, or tensors of its shapes")
    rows = {
        row: one.peak.rows.get(row, 0) - other.peak.rows.get(row, 0)
        for row in {*one.peak.rows, *other.peak.rows}
    }
    return Removal(
        said,
        before.bytes_by_tier["device"] - after.bytes_by_tier["device"],
        price_s,
        {row: fall for row, fall in sorted(rows.items()) if fall},
    )
