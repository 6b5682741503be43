"""Fits: whether a job fits the memory of its ranks, and the changes that make it fit, by seconds a step.

    tiles.logits, tiles.mlp          the loss, or feed-forward parts, a tile of tokens at a time
    recompute: selective, full       blocks compute activations again in the backward pass
    offload.activations: host        activations of blocks wait in host memory                 (only on an accelerator)
    offload.optimizer, parameters    masters, moments, weights in host memory (only on an accelerator) or on a disk, for
                                     the smallest fraction of the Units that makes the job fit

All combinations that the model supports are tried. The memory of each is computed as for the job itself
(``foresee.py``), and its time from rates (``simulate/price.py``). The batch is cut as in the configuration, so results
differ only in the rounding of sums.

Cost: a pass on shapes for each combination of tiles and recomputation, a Plan for each of tiers.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.words import bytes_text
from shardwise.compose.plan import PlannedModel
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate, process_bytes, read
from shardwise.engine.fit.knobs import KnobScope, RecomputeChoice, knob_of
from shardwise.engine.fit.ordered import largest
from shardwise.engine.fit.outside import HOLES_ROW, OUTSIDE_ROW
from shardwise.engine.parts.inputs import Loss
from shardwise.observe.flops import flops_text
from shardwise.plan.action import Kind
from shardwise.plan.placement import Tier
from shardwise.precision.policy import NAMES
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.price import StepSeconds, step_seconds, step_timeline
from shardwise.simulate.rates import measured_hardware
from shardwise.tiers.offload import OffloadPolicy

Memory = Mapping[Tier, int | str]
"""Bytes of a rank by tier, as a number or as text: ``{"device": "16 GiB", "disk": "200 GB"}``."""

_Job = tuple[tuple[str, ...], JobFacts]
"""Overrides of the configuration, and the job with them."""
_SIZE = re.compile(r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b?)\s*")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_PARTS = 100
"""Number of parts of the Units; fractions are tried in hundredths."""
_SHOWN = 4
"""Number of changes that the text for people names."""
_ROWS = {
    "process": "torch and this program, before the model",
    "kept": "by forward passes for backward ones",
    "at work": "made and let go of by the Unit that runs",
    "received": "from the stages beside",
    "rows at work": "keys, vectors, gradients and lines of table rows",
    "gathered": "whole weights of Units in use",
    "brought": "shards of weights from another tier",
    "staging": "gradients before they are reduced",
    "reducing": "what exchanges of gradients receive into",
    "waiting": "small gradients until one launch copies all of a Unit",
    "loaded": "state on its way from and to a disk",
    "leaving": "gradients on their way to a disk",
    OUTSIDE_ROW: "outside torch: context, cuBLAS, NCCL (estimate)",
    HOLES_ROW: "between the blocks of torch's allocator (estimate)",
}
"""Explanations of rows whose names do not explain them."""


class ConfigChange(NamedTuple):
    """A change of the configuration, with the memory and the time of a step under it."""

    overrides: tuple[str, ...]
    """Keys and their values, as ``--set`` takes them."""
    outlook: MemoryEstimate
    seconds: StepSeconds
    price_s: float
    """Seconds that the change adds to a step."""

    def line(self) -> str:
        """Return the change as one line of text for people."""
        words = " ".join(f"--set {override}" for override in self.overrides)
        return f"{words}: {_needs(self.outlook)}, {self.price_s:+.3g} s a step"

    def plain(self) -> dict[str, Any]:
        """Return the change as values for JSON."""
        return {"set": list(self.overrides), "needs": self.outlook.bytes_by_tier, "price_s": self.price_s}


class FitReport(NamedTuple):
    """The memory that a job needs, the memory that its ranks have, and changes that make the job fit."""

    memory: Mapping[Tier, int]
    """Bytes that a rank has, by tier."""
    outlook: MemoryEstimate
    """The outlook of the configuration without changes."""
    seconds: StepSeconds
    hardware: Hardware
    """Rates by which the seconds are computed."""
    dtype: str
    """Name of the dtype of products."""
    changes: tuple[ConfigChange, ...]
    """The changes that make the job fit, the cheapest first; empty if it fits without a change, or nothing makes it
    fit."""
    least: ConfigChange | None
    """The change that needs the least device memory, if nothing makes the job fit; else None."""

    @property
    def fits(self) -> bool:
        """True if the job fits without a change."""
        return is_within(self.outlook, self.memory)

    def lines(self) -> list[str]:
        """Return the result as lines of text for people."""
        step = self.outlook.step
        assert step is not None, "it was foreseen with an example"
        where, steps = "a rank", self.outlook.steps
        if len(steps) > 1:
            each = ", ".join(f"{bytes_text(one.bytes_by_tier['device'])} on rank {one.rank}" for one in steps)
            where = f"rank {step.rank}, the most ({each})"
        spent = ", ".join(f"{part} {each_s:.2g}" for part, each_s in self.seconds.spent.items() if each_s)
        said = [f"a step needs {_needs(self.outlook)} on {where}"]
        rows = sorted(step.peak.rows.items(), key=lambda row: -row[1])
        wide = len(OUTSIDE_ROW) if OUTSIDE_ROW in step.peak.rows else 12
        said += [
            f"  {row:<{wide}} {bytes_text(size):>10}  {_ROWS.get(row, '')}".rstrip() for row, size in rows
        ]
        action = step.peak.action
        if action is not None:
            way = "forward" if action.kind is Kind.F else "backward"
            said.append(f"  at its peak, in the {way} pass of {step.peak.unit}: {action}")
        said += [f"  {assumed}" for assumed in self.outlook.assumes]
        said += [f"and takes about {self.seconds.total:.3g} s: {spent}", f"  {self._rates_text()}"]
        has = ", ".join(f"{bytes_text(size)} of {tier}" for tier, size in self.memory.items())
        if self.fits:
            return [*said, f"it fits: a rank has {has}"]
        said.append(f"it does not fit: a rank has {has}")
        if self.changes:
            said.append(
                "what makes it fit, the cheapest first:" if len(self.changes) > 1 else "what makes it fit:"
            )
        for change in self.changes[:_SHOWN]:
            words = " ".join(f"--set {override}" for override in change.overrides)
            said.append(f"  {words}: {_needs(change.outlook)}, {change.price_s:+.3g} s a step")
        if not self.changes and self.least is not None:
            words = " ".join(f"--set {override}" for override in self.least.overrides)
            least = f"{words} needs least: " if words else "as it is it needs least: "
            said.append(f"nothing known makes it fit; {least}{_needs(self.least.outlook)}")
            process = step.peak.rows.get("process", 0)
            if process > self.memory["device"]:
                said.append(
                    f"  (the process alone, torch and this program, takes {bytes_text(process)} of them)"
                )
            outside = step.peak.rows.get(OUTSIDE_ROW, 0)
            if outside > self.memory["device"]:
                said.append(f"  (the driver and the communicators alone take {bytes_text(outside)} of them)")
        return said

    def _rates(self) -> dict[str, float]:
        """Return the rates that the seconds depend on, by name."""
        hardware = self.hardware
        return {
            "flops_s": hardware.flops_s(self.dtype),
            **{f"{tier}_bytes_s": rate for tier, rate in hardware.memory_bytes_s.items()},
            "link_bytes_s": hardware.links["device"].bytes_s,
            "exchange_bytes_s": hardware.links["host"].bytes_s,
        }

    def _rates_text(self) -> str:
        """Return the rates that the seconds depend on, as text."""
        rates, mesh = self._rates(), self.outlook.plan.mesh
        said = [f"{flops_text(rates['flops_s'])}/s", f"{rates['host_bytes_s'] / 1e9:.3g} GB/s of host memory"]
        tiers = {*self.memory, *self.outlook.bytes_by_tier}
        if "host" in tiers:
            said.append(f"{rates['link_bytes_s'] / 1e9:.3g} GB/s between host and device")
        if "disk" in tiers:
            said.append(f"{rates['disk_bytes_s'] / 1e9:.3g} GB/s of disk")
        if mesh.world_size > 1:
            said.append(f"{rates['exchange_bytes_s'] / 1e9:.3g} GB/s between ranks")
        return f"by {', '.join(said)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def plain(self) -> dict[str, Any]:
        """Return the result as numbers and lists for programs."""
        step = self.outlook.step
        assert step is not None, "it was foreseen with an example"
        return {
            "memory": dict(self.memory),
            "fits": self.fits,
            "needs": self.outlook.bytes_by_tier,
            "rows": dict(step.peak.rows),
            "seconds": dict(self.seconds.spent),
            "rates": self._rates(),
            "changes": [change.plain() for change in self.changes],
        }


def fits(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    memory: Memory,
    example: Any,
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    loss: Loss | None = None,
    hardware: Hardware | None = None,
    per_host: int | None = None,
) -> FitReport:
    """Check whether a step of the job fits ``memory``, and find the changes that make it fit.

    Args:
        make: function that builds the model anew each time, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        memory: bytes of one rank by tier: ``{"device": "16 GiB", "host": "64 GiB", "disk": "1 TB"}``. The device is
            required. A tier that is left out is not checked, and no change moves state to it. CPU ranks have no host
            memory beside the device's.
        example: a microbatch, or tensors of its shapes.
        ranks: number of ranks of the job.
        device: device of the ranks; None: CPU.
        loss: the loss function, as ``initialize`` takes it.
        hardware: rates of a rank; None: measured in this process, in about a second.
        per_host: ranks of one host; None: all ranks lie on one host.

    Returns:
        The needs of the job, and the changes that make it fit.

    Raises:
        ShardwiseError: as ``foresee``.
        ConfigError: if ``memory`` is not valid.
        UsageError: if ``example`` is missing.
    """
    device = device or torch.device("cpu")
    given, have = load(config), budget(memory)

    def look(config: RunConfig) -> JobFacts:
        return read(make, config, ranks, device, example, loss, per_host)

    known = look(given)
    if not known.passed:
        missing = "an example is missing: a microbatch, or tensors of its shapes"
        raise UsageError(f"fits: {known.unforeseen or missing}")
    folder = known.settings.offload.disk_path
    compute_dtype = known.settings.precision.compute_dtype or torch.float32
    hardware = hardware or measured_hardware(device, compute_dtype, folder)
    dtype, outlook = NAMES[compute_dtype], known.outlook(known.settings.offload)
    now = seconds_of(known, outlook, known.settings.offload, hardware)
    if is_within(outlook, have):
        return FitReport(have, outlook, now, hardware, dtype, (), None)
    jobs = itertools.chain([((), known)], _jobs(known, given, look))
    found, least = _tried(jobs, known, have, hardware, now.total)
    return FitReport(have, outlook, now, hardware, dtype, found, None if found else least)


def _tried(
    jobs: Iterable[_Job], known: JobFacts, have: Mapping[Tier, int], hardware: Hardware, before_s: float
) -> tuple[tuple[ConfigChange, ...], ConfigChange | None]:
    """Return the changes that fit, the cheapest first, and of the others the one that needs least device memory."""
    with_disk = process_bytes("disk" in have) if known.device.type == "cpu" else 0
    found: list[ConfigChange] = []
    least: ConfigChange | None = None
    for overrides, job in _with_unlike_passes(jobs):
        for change in on_tiers(job, overrides, have, hardware, before_s, (known.process_bytes, with_disk)):
            if is_within(change.outlook, have):
                found.append(change)
            elif least is None or _device_bytes(change.outlook) < _device_bytes(least.outlook):
                least = change
    return tuple(sorted(found, key=lambda change: (change.price_s, len(change.overrides)))), least


def budget(memory: Memory) -> dict[Tier, int]:
    """Return ``memory`` in bytes by tier.

    Raises:
        ConfigError: if a tier or a size is not valid, or the device is missing.
    """
    found: dict[Tier, int] = {}
    for tier, size in memory.items():
        if tier not in ("device", "host", "disk"):
            raise ConfigError(f"memory: {tier!r} is no tier; expected device, host or disk")
        matched = _SIZE.fullmatch(str(size))
        if matched is None:
            raise ConfigError(f"memory: {size!r} of {tier} is no size; expected a number of bytes or 16 GiB")
        number, unit = float(matched[1]), matched[2].lower().removesuffix("b")
        found[tier] = int(number * (_BINARY[unit[0]] if unit.endswith("i") else _FACTORS[unit]))
    if "device" not in found:
        raise ConfigError("memory: give that of the device, as in {'device': '16 GiB'}")
    return found


def _jobs(known: JobFacts, given: RunConfig, look: Callable[[RunConfig], JobFacts]) -> Iterator[_Job]:
    """Yield the job with every further combination of tiles and recomputation that the model supports."""
    ranks, blocks = known.mesh.world_size, len(known.blocks)
    scope = KnobScope(given, ranks, ranks, 1, 1, blocks, 0, False, known.device.type == "cpu")
    choices: list[Sequence[tuple[str, ...]]] = []
    for key in ("tiles.logits", "tiles.mlp", "recompute"):
        knob = knob_of(key)
        values = [value for value in knob.values(scope, {}) if _keeps_less(value, knob.current(scope))]
        choices.append([(), *(knob.overrides(scope, {key: value}) for value in values)])
    for words in itertools.product(*choices):
        overrides = tuple(itertools.chain.from_iterable(words))
        if not overrides:
            continue
        try:
            yield overrides, look(load(given, overrides))
        except (ConfigError, PlanError):
            continue


def _keeps_less(value: Any, now: Any) -> bool:
    """Return True if a value of tiles or recomputation keeps less than the configured one, in all blocks alike."""
    if isinstance(value, RecomputeChoice):
        scopes = {"none": ("selective", "full"), "selective": ("full",)}.get(now.scope, ())
        return value.scope in scopes and value == RecomputeChoice(value.scope)
    return bool(value != now)


def _with_unlike_passes(jobs: Iterable[_Job]) -> Iterator[_Job]:
    """Yield ``jobs`` without repetitions: jobs whose overrides have no effect on the passes of this model."""
    passes: list[Mapping[int, MeasuredPass]] = []
    for overrides, job in jobs:
        if job.passed not in passes:
            passes.append(job.passed)
            yield overrides, job


def on_tiers(
    job: JobFacts,
    overrides: tuple[str, ...],
    have: Mapping[Tier, int],
    hardware: Hardware,
    before_s: float,
    process: tuple[int, int],
) -> Iterator[ConfigChange]:
    """Yield the job with state and activations on the possible tiers, each with the smallest fraction that fits.

    If no fraction fits, the change with all Units is yielded.

    Args:
        job: The job.
        overrides: Overrides of the configuration that the job has already.
        have: Bytes of a rank by tier.
        hardware: Rates of a rank.
        before_s: Seconds of a step without any change.
        process: Bytes of the process itself, without a disk and with one.
    """
    for offload, words in _ways(job, have):

        def change(
            fraction: float, offload: OffloadPolicy = offload, words: tuple[str, ...] = words
        ) -> ConfigChange:
            policy = offload.model_copy(update={"fraction": fraction})
            alike = job._replace(process_bytes=process[policy.optimizer == "disk"])
            outlook = alike.outlook(policy)
            seconds = seconds_of(job, outlook, policy, hardware)
            share = (f"offload.fraction={fraction:g}",) * (fraction != job.settings.offload.fraction)
            return ConfigChange((*overrides, *words, *share), outlook, seconds, seconds.total - before_s)

        try:
            best = change(1.0 if offload.optimizer != job.settings.offload.optimizer else offload.fraction)
        except (ConfigError, PlanError):
            continue
        if not words and is_within(best.outlook, have):
            yield best
            return
        if not is_within(best.outlook, have) or offload.optimizer == job.settings.offload.optimizer:
            yield best
            continue
        too_small, fraction = 0, _PARTS
        while fraction - too_small > 1:
            middle = (too_small + fraction) // 2
            tried = change(middle / _PARTS)
            if is_within(tried.outlook, have):
                best, fraction = tried, middle
            else:
                too_small = middle
        yield best


def _ways(job: JobFacts, have: Mapping[Tier, int]) -> Iterator[tuple[OffloadPolicy, tuple[str, ...]]]:
    """Yield offload policies with their overrides: the configured policy, and those that move more state."""
    now, is_cpu = job.settings.offload, job.device.type == "cpu"
    activations = [""] if is_cpu or now.activations == "host" or "host" not in have else ["", "host"]
    states: list[tuple[Tier, bool]] = [("device", False)]
    if now.optimizer == "device":
        states += [(tier, both) for tier in ("host", "disk") for both in (False, True) if tier in have]
    cut = job.settings.zero.stage in (1, 2) and job.mesh.dp_shard > 1
    for moved, (tier, both) in itertools.product(activations, states):
        if (tier == "host" and is_cpu) or (both and cut):
            continue
        changed: dict[str, Any] = {"activations": "host"} if moved else {}
        if tier != "device":
            changed["optimizer"] = tier
        if both:
            changed["parameters"] = tier
        if tier == "disk" and now.disk_path is None:
            changed["disk_path"] = Path(".")
        words = tuple(f"offload.{key}={value}" for key, value in changed.items())
        yield now.model_copy(update=changed), words


def seconds_of(
    job: JobFacts,
    outlook: MemoryEstimate,
    offload: OffloadPolicy,
    hardware: Hardware,
) -> StepSeconds:
    """Return the seconds of a step of a job with state and activations on the tiers of ``offload``.

    A schedule that is made from measured seconds is made from the foreseen seconds of its passes.
    """
    policies, plan = job.policies_with(offload), outlook.plan
    rest = (job.passed, hardware, job.device.type, job.per_host)
    if policies.pipeline.schedule == "zb_greedy" and plan.mesh.pp > 1:
        foreseen = step_timeline(plan, policies, *rest).typical_pass_s()
        plan = PlannedModel(job.spec, policies, plan).with_seconds(foreseen).plan
    return step_seconds(plan, policies, *rest)


def is_within(outlook: MemoryEstimate, have: Mapping[Tier, int]) -> bool:
    """Return True if no rank needs more of a tier than it has."""
    return all(size <= have.get(tier, size) for tier, size in outlook.bytes_by_tier.items())


def _device_bytes(outlook: MemoryEstimate) -> int:
    return outlook.bytes_by_tier["device"]


def _needs(outlook: MemoryEstimate) -> str:
    return " and ".join(
        bytes_text(size) + ("" if tier == "device" else f" of {tier}")
        for tier, size in outlook.bytes_by_tier.items()
    )


class LongestSequence(NamedTuple):
    """The longest sequence that fits a memory."""

    tokens: int
    """Number of tokens; 0 if no sequence fits."""
    outlook: MemoryEstimate
    """The outlook with that sequence, or with the shortest one that was tried if none fits."""


def longest(
    make: Callable[[int], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    memory: Memory,
    example: Callable[[int], Any],
    *,
    ranks: int = 1,
    device: torch.device | None = None,
    loss: Loss | None = None,
    multiple: int = 128,
    most: int = 1 << 24,
) -> LongestSequence:
    """Return the largest number of tokens with which a step fits ``memory``, exact to a fiftieth.

    Args:
        make: function that builds the model for a number of tokens.
        config: the configuration, as ``initialize`` takes it.
        memory: bytes of one rank by tier, as for ``fits``.
        example: function that returns a microbatch for a number of tokens.
        ranks: number of ranks of the job.
        device: device of the ranks; None: CPU.
        loss: the loss function, as ``initialize`` takes it.
        multiple: the result is a multiple of this number of tokens.
        most: the largest number of tokens that is tried.

    Raises:
        ShardwiseError: as ``foresee``.
        ConfigError: if ``memory`` is not valid.
    """
    device, given, have = device or torch.device("cpu"), load(config), budget(memory)
    process_bytes: int | None = None

    def outlook(count: int) -> MemoryEstimate:
        nonlocal process_bytes
        tokens = count * multiple
        known = read(lambda: make(tokens), given, ranks, device, example(tokens), loss)
        process_bytes = known.process_bytes if process_bytes is None else process_bytes
        return known._replace(process_bytes=process_bytes).outlook(known.settings.offload)

    count, best = largest(outlook, lambda tried: is_within(tried, have), most // multiple, 1 / 50)
    return LongestSequence(count * multiple, best)
