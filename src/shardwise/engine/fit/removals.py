"""Removals: how far each single change of a knob lowers the peak of a step, entry by entry, and its price in seconds.

Each value of each knob that does not change the run's numbers is tried by itself on the configured job, and the peak
under it is composed of entries as that of the job is (simulate/why.py). The change that removes an entry is the one
under which the entry falls most from peak to peak, among those under which the peak falls.

Entries of two jobs are the same if their row, their buffer or operation and their source line are; numbers in names
are left out, because another layout begins a stage with another block.

Cost: a Plan and a second walk for each value, and a pass on shapes where the value changes the passes.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, MeshError, PlanError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.ragged import samples_in
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.fits import Memory, budget, seconds_of
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate
from shardwise.engine.fit.jobs import JobShelf
from shardwise.engine.fit.knobs import (
    KNOBS,
    Copies,
    Knob,
    KnobScope,
    data_ranks,
    knob_of,
    model_ranks,
    overrides_of,
)
from shardwise.engine.fit.search import batch_of, hardware_of, scope_of
from shardwise.engine.parts.inputs import Loss
from shardwise.simulate.why import MemoryReason


class Removal(NamedTuple):
    """One change of the configuration, and what it saves at the peak of a step."""

    set: tuple[str, ...]
    """Overrides; the first is the key and value that was tried, others keep the samples of a step as they are."""
    saves_bytes: int
    """Bytes by which the peak of the device's memory falls."""
    price_s: float
    """Seconds that the change adds to a step."""
    entries: Mapping["EntryKey", int]
    """Bytes by which each entry falls from peak to peak, without entries that stay."""


class EntryKey(NamedTuple):
    """The origin of bytes at a peak, the same in every layout of one model."""

    row: str
    what: str
    """Name of the buffer or the operation, without its numbers."""
    line: str

    @classmethod
    def of(cls, reason: MemoryReason) -> "EntryKey":
        """Return the key of an entry."""
        return cls(reason.row, _NUMBER.sub("#", reason.what), reason.line)


_NUMBER = re.compile(r"\d[\d,]*")


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
        per_host: ranks of one host, within which tensors are cut; None: all ranks lie on one host, and tensors are cut
            over 8 at most.

    Raises:
        ShardwiseError: as ``foresee``.
    """
    device, given = device or torch.device("cpu"), load(config)
    shelf = JobShelf(make, device, example, loss, per_host)
    sizes = batch_of(given, [ranks], None if callable(example) else samples_in(example))
    scope = scope_of(shelf, given, ranks, budget(memory), sizes, per_host)
    rates = hardware_of(hardware, given, device)
    now = _configured(scope)
    job = shelf.job(load(given, overrides_of(scope, now)), ranks)
    before = job.outlook(job.settings.offload)
    entries = _entries(job, before)
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
            fall = _fall(entries, _entries(job, outlook))
            saves = before.bytes_by_tier["device"] - outlook.bytes_by_tier["device"]
            found.append(Removal(said, saves, seconds - before_s, fall))
    return tuple(sorted(found, key=lambda each: (-each.saves_bytes, each.price_s, each.set)))


def remover_of(reason: MemoryReason, found: Collection[Removal]) -> Removal | None:
    """Return the change that removes most of an entry of the peak; None if no change that lowers the peak does.

    Args:
        reason: An entry of the composition of the peak.
        found: Result of ``removals``.
    """
    key = EntryKey.of(reason)
    helping = [each for each in found if each.saves_bytes > 0 and each.entries.get(key, 0) > 0]
    return min(helping, key=lambda each: (-each.entries[key], each.price_s, each.set), default=None)


def _entries(job: JobFacts, outlook: MemoryEstimate) -> Counter[EntryKey]:
    """Return the bytes of the entries at the peak of the rank that needs most.

    Raises:
        UsageError: if the job has no pass.
    """
    if outlook.step is None:
        raise UsageError("removals: an example is missing: a microbatch, or tensors of its shapes")
    found: Counter[EntryKey] = Counter()
    for reason in job.reasons(outlook.plan, outlook.step):
        found[EntryKey.of(reason)] += reason.bytes
    return found


def _fall(before: Counter[EntryKey], after: Counter[EntryKey]) -> dict[EntryKey, int]:
    """Return the bytes by which each entry falls, without entries that stay."""
    falls = {key: before[key] - after[key] for key in sorted({*before, *after})}
    return {key: fall for key, fall in falls.items() if fall}


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
        model = model_ranks(chosen)
        if scope.ranks % model:
            continue
        dp = scope.ranks // model
        if knob.key in ("mesh.pp", "mesh.tp", "mesh.cp"):
            chosen["mesh.dp"] = Copies(1, dp)
        if knob.key == "pipeline.schedule" and value == "interleaved_1f1b":
            chosen["pipeline.virtual_stages"] = 2
        if knob.key == "offload.parameters" and value != "device":
            chosen["offload.optimizer"] = value
        if chosen["batch.global_size"] % (dp * chosen["batch.micro_size"]) == 0:
            yield chosen
