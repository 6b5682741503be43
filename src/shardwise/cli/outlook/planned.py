"""A run as ``shardwise plan`` foresees it: configuration or run folder, hardware, shapes without data, and the report.

CONFIG or RUN -> configuration, ranks       RUN: config.yaml, the ranks of the last start, outcome.json
--device      -> Hardware, bytes of a rank  a shipped table, a file, or this machine
shapes        -> passes on shapes           cli/outlook/job_shapes.py, engine/fit/
report        -> text or JSON               engine/fit/report.py
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, read_hardware, shipped_tables, write_hardware
from shardwise.base.regular_files import read_small_file
from shardwise.base.words import bytes_text, counted
from shardwise.cli.outlook.job_shapes import JobShapes, shapes_of
from shardwise.cli.outlook.outcome import RunOutcome, read_outcome
from shardwise.cli.request import CommandRequest
from shardwise.cli.run_folder import RunFolder, differences
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import Memory, budget, fits
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.engine.fit.removals import Removal, removals, remover_of
from shardwise.engine.fit.report import JobReport, JobSeconds, SavePace, restart_seconds, save_pace
from shardwise.engine.fit.search import SearchReport, search
from shardwise.engine.fit.solve import SolvedKey, solve
from shardwise.models import GptPolicy, flops_per_token
from shardwise.observe.flops import flops_text
from shardwise.observe.memory import available_bytes
from shardwise.plan.placement import Tier
from shardwise.plan.plan import Plan
from shardwise.precision.policy import NAMES
from shardwise.simulate.calibration import Calibration, calibrate, calibration_file, cpu_hardware
from shardwise.simulate.price import step_seconds
from shardwise.simulate.refit import Refit, StepLine, read_lines, refit
from shardwise.simulate.step_flops import StepFlops, run_time, seconds_at, step_flops
from shardwise.simulate.why import MemoryReason

CPU = "cpu"
"""Name of this machine as hardware."""
_STARTS_BYTES = 16 << 20


class PlanRequest(NamedTuple):
    """The user's request on the command line of ``shardwise plan``."""

    config: str
    """A configuration, the name of an example, or the folder of a run."""
    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "cpu"
    per_host: int | None = None
    memory: Memory | None = None
    mfu: float | None = None
    step_s: float | None = None
    failures_per_day: float | None = None
    against: str | None = None
    why: bool = False
    search: bool = False
    free: tuple[str, ...] = ()
    limit_s: float | None = None
    """Seconds after which a search ends with what it has found."""
    write: Path | None = None
    """File into which the best configuration of a search goes."""
    solve: str | None = None


class PlanSetting(NamedTuple):
    """The hardware of a job."""

    hardware: Hardware
    device: torch.device
    """A device of its type; it need not exist here."""
    per_host: int | None = None
    """Ranks of one host; None: all ranks are on one host."""


class PlannedJob(NamedTuple):
    """A job as the request names it, before anything is computed."""

    config: RunConfig
    """The configuration as it was given."""
    resolved: ResolvedConfig
    ranks: int
    shapes: JobShapes
    outcome: RunOutcome | None
    """Outcome of the run, if the request names a run that has one."""


def plan(request: PlanRequest) -> JobReport:
    """Return what is foreseen of the job that ``request`` names.

    Raises:
        ShardwiseError: as the run itself before its first step, for all that does not depend on its data.
        UsageError: if the call is wrong.
    """
    setting, assumes = _setting(request)
    job = _job(request, request.config, setting.device.type)
    setting = setting._replace(per_host=request.per_host or setting.per_host)
    memory, told = _memory(request, setting, min(setting.per_host or job.ranks, job.ranks))
    report = report_of(request, job, setting, memory, (*assumes, *told))
    if request.against is None:
        return report
    other = _job(request._replace(overrides=()), request.against, setting.device.type)
    theirs = report_of(request._replace(why=False, search=False, solve=None), other, setting, memory, ())
    return replace(report, diff=_difference(report, theirs))


def _job(request: PlanRequest, name: str, device_type: str) -> PlannedJob:
    """Return the job that ``name`` names: a configuration, an example or a run."""
    folder = RunFolder(Path(name))
    is_run = folder.root.is_dir()
    if is_run and not folder.config.is_file():
        raise UsageError(f"plan: {name} is a folder without config.yaml, so no run of shardwise train")
    ranks = request.ranks or (_ranks_of(folder) if is_run else 1)
    if ranks < 1:
        raise UsageError(f"plan: --ranks is {ranks}; a job has at least 1 rank")
    source = str(folder.config) if is_run else name
    wanted = CommandRequest(source, request.overrides, ranks=ranks).load()
    resolved = resolve(wanted, ranks, device_type)
    micro_size = resolved.config.batch.micro_size
    if micro_size is None:
        raise ConfigError(
            f"{name}: batch.micro_size does not follow from batch.global_size; give one of micro_size and accumulation"
        )
    outcome = read_outcome(folder.outcome) if is_run and folder.outcome.is_file() else None
    return PlannedJob(wanted, resolved, ranks, shapes_of(resolved.config, micro_size), outcome)


def _ranks_of(folder: RunFolder) -> int:
    """Return the ranks of a run's last start."""
    path = folder.root / "run.json"
    try:
        starts = json.loads(read_small_file(path, _STARTS_BYTES))["starts"]
        ranks = starts[-1]["ranks"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        ranks = None
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"plan: {path} does not say how many ranks the run had; give --ranks")
    return ranks


def _setting(request: PlanRequest) -> tuple[PlanSetting, tuple[str, ...]]:
    """Return the hardware that the request names, and sentences on where its figures come from."""
    name = request.device
    if name == CPU:
        device = torch.device(CPU)
        found, said = cpu_hardware(torch.float32)
        return PlanSetting(found, device), (said,)
    device = torch.device("cuda")
    if name.endswith(".json") or Path(name).is_file():
        return PlanSetting(read_hardware(Path(name)), device), (f"the rates of {name}",)
    found = find_hardware(name)
    guessed = sum(1 for source in found.sources.values() if source.startswith("assumed"))
    return PlanSetting(found, device), (
        f"the rates of {name}, as its data sheet and papers give them; {counted(guessed, 'figure')} of "
        f"{len(found.sources)} are assumed",
    )


def device_lines() -> list[str]:
    """Return a line for each hardware that is known by name."""
    said = [f"{CPU:<12} this machine"]
    for name in shipped_tables():
        found = find_hardware(name)
        peak = max(found.peaks.values())
        memory = bytes_text(found.memory_bytes["device"]) if "device" in found.memory_bytes else "-"
        said.append(f"{name:<12} {memory:>10}  {flops_text(peak)}/s at most")
    return said


def calibration_lines(found: Calibration) -> list[str]:
    """Return what a calibration has measured as lines for people."""
    hardware = found.hardware
    said = [f"{found.machine.processor}, {counted(found.machine.ranks, 'rank')}, torch {found.machine.torch}"]
    said += [
        f"  products in {dtype:<6} {flops_text(peak):>14}/s at most" for dtype, peak in hardware.peaks.items()
    ]
    said += [f"  {tier:<18} {rate / 1e9:>8.3g} GB/s" for tier, rate in hardware.memory_bytes_s.items()]
    link = hardware.links["host"]
    said.append(
        f"  between ranks      {link.bytes_s / 1e9:>8.3g} GB/s, {link.latency_s * 1e6:.3g} us a message"
    )
    said.append(f"  an operation       {hardware.operation_s * 1e6:>8.3g} us")
    said.append(f"  an Action          {hardware.action_s * 1e6:>8.3g} us")
    said.append(f"  one that ends      {hardware.ending_action_s * 1e6:>8.3g} us")
    said += [
        f"  {name:<18} {max(rate for _, rate in table) / 1e9:>8.3g} GB/s at most"
        for name, table in hardware.operations.items()
    ]
    return [*said, f"kept in {calibration_file()}"]


def calibrated_here() -> Calibration:
    """Measure this machine with two ranks, and keep the figures for later plans."""
    return calibrate()


def refitted(lines: Path, device: str, out: Path) -> Refit:
    """Fit the table of a device to measured steps, and write the new table.

    Args:
        lines: File of measured steps, one JSON object a line.
        device: Name of the shipped table to begin with.
        out: File to write.
    """
    jobs: dict[tuple[str, int], tuple[JobFacts, Plan]] = {}

    def price(line: StepLine, hardware: Hardware) -> float:
        key = line.config, line.ranks
        if key not in jobs:  # one pass on shapes and one Plan of each job, whatever the number of prices
            job = _job(PlanRequest(line.config, ranks=line.ranks, device=line.device), line.config, "cuda")
            shapes = job.shapes
            known = read(shapes.make, shapes.config, job.ranks, torch.device("cuda"), shapes.example)
            if not known.passed:
                raise ConfigError(
                    f"refit: {line.config}: {known.unforeseen or 'the job has no example batch'}"
                )
            jobs[key] = known, known.outlook(known.settings.offload).plan
        known, plan = jobs[key]
        policies = known.policies_with(known.settings.offload)
        return step_seconds(plan, policies, known.passed, hardware, "cuda", line.per_host).total

    found = refit(read_lines(lines), find_hardware(device), price)
    write_hardware(out, found.hardware)
    return found


def _memory(
    request: PlanRequest, setting: PlanSetting, sharers: int
) -> tuple[Mapping[Tier, int], tuple[str, ...]]:
    """Return the bytes of a rank by tier, and sentences on what they are taken from."""
    if request.memory is not None:
        return budget(request.memory), ()
    found: dict[Any, int] = dict(setting.hardware.memory_bytes)
    if "device" not in found and request.device == CPU:
        free = available_bytes(setting.device)
        if free is not None:
            return {"device": free // sharers}, (
                f"a rank has its share of the memory that is free here now, of {sharers} on this host",
            )
    return found, ()


def report_of(
    request: PlanRequest,
    job: PlannedJob,
    setting: PlanSetting,
    memory: Mapping[Tier, int],
    assumes: tuple[str, ...],
) -> JobReport:
    """Return what is foreseen of a job.

    Args:
        request: The user's request, of which the parts that this adds to the report count.
        job: The job.
        setting: Its hardware.
        memory: Bytes of a rank by tier.
        assumes: Sentences on the hardware.
    """
    config, make, example, _, told = job.shapes
    assumes = (*assumes, *told)
    try:
        known = read(make, config, job.ranks, setting.device, example, per_host=setting.per_host)
    except UsageError as error:
        known = read(make, config, job.ranks, setting.device, per_host=setting.per_host)
        assumes = (*assumes, f"model state alone is counted: {error}")
    outlook = known.outlook(known.settings.offload)
    report = JobReport(
        known,
        job.ranks,
        request.device,
        memory,
        outlook,
        job.resolved.choices,
        (*assumes, *outlook.assumes),
        outcome=None if job.outcome is None else job.outcome.plain(),
    )
    if not known.passed:
        return report
    flops = _flops(known, job.shapes)
    seconds = _seconds(request, report, flops, setting, job.shapes)
    report = replace(report, seconds=seconds._replace(pace=_pace(request, report, seconds, setting)))
    if not report.fits:
        found = fits(
            make,
            config,
            memory,
            example,
            ranks=job.ranks,
            device=setting.device,
            hardware=setting.hardware,
            per_host=setting.per_host,
        )
        report = replace(report, changes=found.changes)
    if request.why:
        report = replace(report, why=_why(request, report, job, setting))
    if request.search:
        report = replace(report, search=_searched(request, job, setting, memory))
    if request.solve is not None:
        report = replace(report, solved=_solved(request.solve, job, setting, memory))
    return report


def _flops(known: JobFacts, shapes: JobShapes) -> StepFlops:
    """Return the operations of a step of all ranks."""
    config, mesh = known.settings, known.mesh
    model, samples = config.model, config.batch.global_size
    return step_flops(
        known.passed,
        config.batch.accumulation or 1,
        mesh.size("dp"),
        mesh.tp,
        None if shapes.tokens is None or samples is None else shapes.tokens * samples,
        flops_per_token(model, causal=False) if isinstance(model, GptPolicy) else None,
        flops_per_token(model) if isinstance(model, GptPolicy) else None,
    )


def _seconds(
    request: PlanRequest, report: JobReport, flops: StepFlops, setting: PlanSetting, shapes: JobShapes
) -> JobSeconds:
    """Return the seconds of a step, as they are foreseen or as the request gives them."""
    known, hardware, config = report.known, setting.hardware, report.config
    dtype = NAMES[config.precision.compute_dtype or torch.float32]
    spent: dict[str, float] = {}
    exposed: dict[str, float] = {}
    given = ""
    if request.step_s is not None:
        step_s, given = request.step_s, "--step-s"
    elif request.mfu is not None:
        step_s, given = seconds_at(request.mfu, flops, hardware, dtype, report.ranks), "--mfu"
    low_s = high_s = 0.0
    if not given:
        policies = known.policies_with(known.settings.offload)
        found = step_seconds(
            report.outlook.plan, policies, known.passed, hardware, setting.device.type, setting.per_host
        )
        step_s, low_s, high_s = found.total, found.low_s, found.high_s
        spent = {str(use): each_s for use, each_s in found.spent.items() if each_s}
        exposed = dict(found.exposed)
    samples = config.batch.global_size
    tokens = None if shapes.tokens is None or samples is None else shapes.tokens * samples
    run = run_time(flops, step_s, hardware, dtype, report.ranks, tokens, config.train.steps)
    return JobSeconds(run, low_s or step_s, high_s or step_s, spent, exposed, flops, given)


def _why(
    request: PlanRequest, report: JobReport, job: PlannedJob, setting: PlanSetting
) -> tuple[tuple[MemoryReason, Mapping[str, Any]], ...]:
    """Return the composition of the peak of the rank that needs most, and what removes each entry."""
    step, known = report.outlook.step, report.known
    assert step is not None, "a pass was measured"
    found = removals(
        job.shapes.make,
        job.config,
        {**report.memory, "device": report.memory.get("device", step.bytes_by_tier["device"])},
        lambda rows: shapes_of(job.resolved.config, rows).example,
        ranks=job.ranks,
        device=setting.device,
        hardware=setting.hardware,
        per_host=setting.per_host,
    )
    return tuple(
        (reason, _removal(remover_of(reason, found)))
        for reason in known.reasons(report.outlook.plan, step, step.peak)
    )


def _removal(found: Removal | None) -> dict[str, Any]:
    """Return the change that removes a row as values for JSON."""
    if found is None:
        return {"removed_by": None, "saves_bytes": None, "price_s": None}
    return {
        "removed_by": " ".join(found.set),
        "saves_bytes": found.saves_bytes,
        "price_s": found.price_s,
    }


def _searched(request: PlanRequest, job: PlannedJob, setting: PlanSetting, memory: Memory) -> SearchReport:
    """Return the fastest layouts of a job, and write the best if the request says where."""
    found = search(
        job.shapes.make,
        job.config,
        memory,
        lambda rows: shapes_of(job.resolved.config, rows).example,
        ranks=job.ranks,
        device=setting.device,
        hardware=setting.hardware,
        free=request.free,
        limit_s=request.limit_s,
        per_host=setting.per_host,
    )
    if request.write is not None and found.best:
        found.write(request.write)
    return found


def _solved(key: str, job: PlannedJob, setting: PlanSetting, memory: Memory) -> SolvedKey:
    """Return the largest value of a key with which the job fits, or the fewest ranks."""

    def shapes(config: RunConfig) -> JobShapes:
        return shapes_of(config, config.batch.micro_size or job.resolved.config.batch.micro_size or 1)

    return solve(
        key,
        lambda config: shapes(config).make(),
        job.config,
        memory,
        lambda config: shapes(config).example,
        ranks=job.ranks,
        device=setting.device,
    )


def _pace(
    request: PlanRequest, report: JobReport, seconds: JobSeconds, setting: PlanSetting
) -> SavePace | None:
    """Return the best interval of checkpoints under the failures that the request gives."""
    if not request.failures_per_day:
        return None
    state = sum(report.outlook.bytes_per_rank().values())
    copy_s = state / setting.hardware.links["device"].bytes_s
    read_s = state / setting.hardware.memory_bytes_s["disk"]
    return save_pace(copy_s, restart_seconds(read_s), seconds.run.step_s, request.failures_per_day)


def _difference(ours: JobReport, theirs: JobReport) -> dict[str, Any]:
    """Return what differs between two jobs, of the heaviest class: theirs minus ours."""
    set_keys = differences(
        ours.config.model_dump(mode="json", exclude_none=True),
        theirs.config.model_dump(mode="json", exclude_none=True),
    )
    return {
        "set": set_keys,
        "rows": _minus(_rows(theirs), _rows(ours)),
        "actions": _minus(_actions(theirs), _actions(ours)),
        "sent": _sent_difference(ours, theirs),
        "spent": _minus(_spent(theirs), _spent(ours)),
    }


def _rows(report: JobReport) -> Mapping[str, float]:
    step = report.outlook.step
    return report.outlook.bytes_per_rank() if step is None else step.peak.rows


def _actions(report: JobReport) -> Mapping[str, float]:
    lists = report.outlook.plan.actions.values()
    return Counter(action.kind.name for action in max(lists, key=len))


def _spent(report: JobReport) -> Mapping[str, float]:
    return {} if report.seconds is None else report.seconds.spent


def _sent_difference(ours: JobReport, theirs: JobReport) -> list[dict[str, Any]]:
    """Return the rows of ``sent`` that differ, of the rank that sends most in each job."""
    counts = ("calls", "elements", "bytes")
    sides = []
    for report in (ours, theirs):
        ranks = (report.sent(rank) for rank in report.outlook.plan.mesh.ranks("pp", 0))
        most = max(ranks, key=lambda rows: sum(row["bytes"] for row in rows))
        sides.append({(row["operation"], row["purpose"], row["axis"]): row for row in most})
    found = []
    for key in dict.fromkeys([*sides[1], *sides[0]]):
        here, there = (side.get(key, dict.fromkeys(counts, 0)) for side in sides)
        row = {count: there[count] - here[count] for count in counts}
        if any(row.values()):
            found.append(dict(zip(("operation", "purpose", "axis"), key, strict=True)) | row)
    return found


def _minus(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """Return the differences of the entries that differ."""
    names = dict.fromkeys([*theirs, *ours])
    found = {name: theirs.get(name, 0) - ours.get(name, 0) for name in names}
    return {name: each for name, each in found.items() if each}
