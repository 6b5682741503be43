"""A run as ``shardwise plan`` foresees it: configuration or run folder, hardware, shapes without data, and the report.

CONFIG or RUN -> configuration, ranks       RUN: config.yaml, the ranks of the last start, outcome.json
--device      -> Hardware, bytes of a rank  a shipped table, a file, or this machine
shapes        -> passes on shapes           cli/job_shapes.py, engine/fit/
report        -> text or JSON               engine/fit/report.py
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, read_hardware, shipped_tables
from shardwise.base.regular_files import read_small_file
from shardwise.base.words import bytes_text, counted
from shardwise.cli.job_shapes import JobShapes, shapes_of
from shardwise.cli.outcome import RunOutcome, read_outcome
from shardwise.cli.request import CommandRequest
from shardwise.cli.run_folder import RunFolder, differences
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import Memory, budget, fits
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.fit.report import JobFlops, JobReport, JobTime, SavePace, restart_seconds, save_pace
from shardwise.launch.local import check_ranks
from shardwise.models import GptPolicy, flops_per_token
from shardwise.observe.flops import flops_text, mfu
from shardwise.observe.memory import available_bytes
from shardwise.plan.placement import Tier
from shardwise.simulate.rates import measured_hardware
from shardwise.simulate.work import peak_dtype

CPU = "cpu"
"""Name of this machine as hardware."""
_DAY_S = 86_400
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


class _Job(NamedTuple):
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
    device = torch.device("cpu") if request.device == CPU else torch.device("cuda")
    job = _job(request, request.config, device.type)
    hardware, assumes = _hardware(request.device, device, job.resolved.config)
    per_host = request.per_host or job.ranks
    memory, told = _memory(request, hardware, min(per_host, job.ranks))
    report = _report(request, job, device, hardware, memory, per_host, (*assumes, *told))
    if request.against is None:
        return report
    other = _job(request._replace(overrides=()), request.against, device.type)
    theirs = _report(request, other, device, hardware, memory, per_host, ())
    return replace(report, diff=_difference(report, theirs))


def _job(request: PlanRequest, name: str, device_type: str) -> _Job:
    """Return the job that ``name`` names: a configuration, an example or a run."""
    folder = RunFolder(Path(name))
    is_run = folder.root.is_dir()
    if is_run and not folder.config.is_file():
        raise UsageError(f"plan: {name} is a folder without config.yaml, so no run of shardwise train")
    ranks = request.ranks or (_ranks_of(folder) if is_run else 1)
    check_ranks(ranks)
    source = str(folder.config) if is_run else name
    wanted = CommandRequest(source, request.overrides, ranks=ranks).load()
    resolved = resolve(wanted, ranks, device_type)
    micro_size = resolved.config.batch.micro_size
    if micro_size is None:
        raise ConfigError(
            f"{name}: batch.micro_size does not follow from batch.global_size; give one of micro_size and accumulation"
        )
    outcome = read_outcome(folder.outcome) if is_run and folder.outcome.is_file() else None
    return _Job(wanted, resolved, ranks, shapes_of(resolved.config, micro_size), outcome)


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


def _hardware(name: str, device: torch.device, config: RunConfig) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware of a name or a file, and sentences on where its figures come from."""
    if name == CPU:
        dtype = config.precision.compute_dtype or torch.float32
        return measured_hardware(device, dtype, config.offload.disk_path), (
            "the rates of this machine, measured just now under the load of the moment",
        )
    if name.endswith(".json") or Path(name).is_file():
        return read_hardware(Path(name)), (f"the rates of {name}",)
    found = find_hardware(name)
    guessed = sum(1 for source in found.sources.values() if source.startswith("assumed"))
    return found, (
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


def _memory(
    request: PlanRequest, hardware: Hardware, sharers: int
) -> tuple[Mapping[Tier, int], tuple[str, ...]]:
    """Return the bytes of a rank by tier, and sentences on what they are taken from."""
    if request.memory is not None:
        return budget(request.memory), ()
    found: dict[Any, int] = dict(hardware.memory_bytes)
    if "device" not in found and request.device == CPU:
        free = available_bytes(torch.device("cpu"))
        if free is not None:
            return {"device": free // sharers}, (
                f"a rank has its share of the memory that is free here now, of {sharers} on this host",
            )
    return found, ()


def _report(
    request: PlanRequest,
    job: _Job,
    device: torch.device,
    hardware: Hardware,
    memory: Mapping[Tier, int],
    per_host: int,
    assumes: tuple[str, ...],
) -> JobReport:
    config, make, example, tokens, told = job.shapes
    assumes = (*assumes, *told)
    fit = None
    try:
        fit = fits(make, config, memory, example, ranks=job.ranks, device=device, hardware=hardware)
        outlook = fit.outlook
    except UsageError as error:
        outlook = foresee(make, config, job.ranks, device)
        assumes = (*assumes, f"model state alone is counted: {error}")
    parameters = sum(math.prod(info.shape) for info in outlook.plan.registry.of_kind("parameter"))
    report = JobReport(
        config,
        job.ranks,
        request.device,
        per_host,
        parameters,
        memory,
        outlook,
        job.resolved.choices,
        (*assumes, *outlook.assumes),
        fit,
        outcome=None if job.outcome is None else job.outcome.plain(),
    )
    if fit is None:
        return report
    flops = _flops(report, tokens)
    time = _time(request, report, flops, hardware, tokens)
    return replace(report, flops=flops, time=time, pace=_pace(request, report, time, hardware))


def _flops(report: JobReport, tokens: int | None) -> JobFlops:
    """Return the operations of a job."""
    batch, mesh = report.config.batch, report.outlook.plan.mesh
    executed = float(report.outlook.flops * (batch.accumulation or 1) * (report.ranks // mesh.pp))
    model, per_token = report.config.model, None
    per_step: float | None = executed
    if isinstance(model, GptPolicy) and tokens is not None and batch.global_size is not None:
        per_token = float(flops_per_token(model, causal=False))
        per_step = per_token * tokens * batch.global_size
    steps = report.config.train.steps
    total = None if per_step is None else per_step * steps
    return JobFlops(per_token, per_step, executed, executed, total)


def _time(
    request: PlanRequest, report: JobReport, flops: JobFlops, hardware: Hardware, tokens: int | None
) -> JobTime:
    """Return the seconds of a step, as they are foreseen or as the request gives them."""
    assert report.fit is not None, "called with a step"
    dtype = report.fit.dtype
    peaks = hardware.peaks[peak_dtype(hardware, dtype)] * report.ranks
    seconds = report.fit.seconds
    spent = {str(name): each_s for name, each_s in seconds.spent.items() if each_s}
    exposed = dict(seconds.exposed)
    step_s, given, low_s, high_s = seconds.total, "", seconds.low_s, seconds.high_s
    if request.step_s is not None:
        step_s, given = request.step_s, "--step-s"
    elif request.mfu is not None:
        step_s, given = (flops.model_per_step or 0.0) / (peaks * request.mfu), "--mfu"
    if given:
        spent, exposed, low_s, high_s = {}, {}, step_s, step_s
    batch, steps = report.config.batch, report.config.train.steps
    samples = batch.global_size
    return JobTime(
        step_s,
        low_s,
        high_s,
        spent,
        exposed,
        None if flops.model_per_step is None else mfu(flops.model_per_step, step_s, peaks),
        mfu(flops.hardware_per_step, step_s, peaks),
        None if tokens is None or samples is None else tokens * samples / step_s,
        step_s * steps / _DAY_S,
        step_s * steps * report.ranks / 3600,
        given,
    )


def _pace(request: PlanRequest, report: JobReport, time: JobTime, hardware: Hardware) -> SavePace | None:
    """Return the best interval of checkpoints under the failures that the request gives."""
    if not request.failures_per_day:
        return None
    state = sum(report.outlook.bytes_per_rank().values())
    copy_s = state / hardware.links["device"].bytes_s
    read_s = state / hardware.memory_bytes_s["disk"]
    return save_pace(copy_s, restart_seconds(read_s), time.step_s, request.failures_per_day)


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
        "sent": [],
        "spent": _minus(_spent(theirs), _spent(ours)),
    }


def _rows(report: JobReport) -> Mapping[str, float]:
    step = report.outlook.step
    return report.outlook.bytes_per_rank() if step is None else step.peak.rows


def _actions(report: JobReport) -> Mapping[str, float]:
    lists = report.outlook.plan.actions.values()
    return Counter(action.kind.name for action in max(lists, key=len))


def _spent(report: JobReport) -> Mapping[str, float]:
    return {} if report.time is None else report.time.spent


def _minus(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """Return the differences of the entries that differ."""
    names = dict.fromkeys([*theirs, *ours])
    found = {name: theirs.get(name, 0) - ours.get(name, 0) for name in names}
    return {name: each for name, each in found.items() if each}
