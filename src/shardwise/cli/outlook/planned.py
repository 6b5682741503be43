"""The answer of ``shardwise plan``: everything that is foreseen of the job that a request names, beside what it took.

job, hardware -> passes on shapes           cli/outlook/planned_job.py, engine/fit/
report        -> text or JSON               engine/fit/report.py
measured      -> a few steps on this host   cli/outlook/measured.py, with --measure
outcome       -> of a run that has saved    cli/outlook/outcome.py
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import UsageError
from shardwise.base.words import in_words
from shardwise.cli.outlook.job_difference import difference
from shardwise.cli.outlook.job_shapes import JobShapes, shapes_of
from shardwise.cli.outlook.measured import STEPS, Layout, MeasuredLayout, check_machine, measure
from shardwise.cli.outlook.outcome import RunOutcome
from shardwise.cli.outlook.planned_job import (
    PlannedJob,
    PlanRequest,
    PlanSetting,
    check_new_file,
    job_of,
    rank_memory,
    setting_of,
)
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import Memory, fits
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.engine.fit.removals import Removal, removals, remover_of
from shardwise.engine.fit.report import JobReport, JobSeconds, SavePace, restart_seconds, save_pace
from shardwise.engine.fit.search import SearchReport, search
from shardwise.engine.fit.solve import SolvedKey, solve
from shardwise.models import GptPolicy, flops_per_token
from shardwise.observe.timeline_picture import draw_lanes
from shardwise.plan.placement import Tier
from shardwise.plan.timeline import Timeline
from shardwise.precision.policy import NAMES
from shardwise.simulate.price import step_seconds, step_timeline
from shardwise.simulate.step_flops import StepFlops, run_time, seconds_at, step_flops
from shardwise.simulate.why import MemoryReason


@dataclass(frozen=True)
class PlanAnswer:
    """Holds what is foreseen of a job, and what was measured of it."""

    report: JobReport
    outcome: RunOutcome | None = None
    """Outcome of the run, if the request names a run that has one."""
    measured: tuple[MeasuredLayout, ...] = ()
    """With ``--measure``: configurations that ran here, the fastest first."""
    notes: tuple[str, ...] = ()
    """Further sentences for people."""

    def plain(self) -> dict[str, Any]:
        """Return the answer as values for JSON."""
        return self.report.plain() | {"measured": [each.plain() for each in self.measured]}

    def to_json(self) -> str:
        """Return the answer as JSON for programs."""
        return json.dumps(self.plain(), indent=2)

    def lines(self) -> list[str]:
        """Return the answer as lines for people."""
        said = self.report.lines()
        if self.measured:
            said.append(f"measured here in {STEPS} steps each, the fastest first:")
            said += [f"  {each.line()}" for each in self.measured]
        if self.outcome is not None:
            said.append(f"what came of the run, as of {self.outcome.time}:")
            said += [f"  {line}" for line in self.outcome.lines()]
        return [*said, *self.notes]


def plan(request: PlanRequest) -> PlanAnswer:
    """Return what is foreseen of the job that ``request`` names.

    Raises:
        ShardwiseError: as the run itself before its first step, for all that does not depend on its data.
        UsageError: if the call is wrong.
    """
    for option, path in (("--write", request.write), ("--draw", request.draw)):
        check_new_file(option, path)
    setting, assumes = setting_of(request)
    job = job_of(request, request.config, setting.device.type)
    if request.measure:
        check_machine(job.ranks, request.device)
    setting = setting._replace(per_host=request.per_host or setting.per_host)
    memory, told = rank_memory(request, setting, min(setting.per_host or job.ranks, job.ranks))
    report = report_of(request, job, setting, memory, (*assumes, *told))
    shown = {"foreseen" if request.against is None else request.config: report}
    if request.against is not None:
        other = job_of(request._replace(overrides=()), request.against, setting.device.type)
        plainly = request._replace(why=False, search=False, solve=None)
        shown[request.against] = theirs = report_of(plainly, other, setting, memory, ())
        report = replace(report, diff=difference(report, theirs))
    notes = [] if job.missing_outcome is None else [job.missing_outcome]
    if request.draw is not None:
        _draw(shown, setting, request.draw)
        notes.append(f"the lanes of a step are drawn in {request.draw}")
    measured = _measured(report, job, request.device) if request.measure else ()
    return PlanAnswer(report, job.outcome, measured, tuple(notes))


def _measured(report: JobReport, job: PlannedJob, device: str) -> tuple[MeasuredLayout, ...]:
    """Return what the best configurations of a search, or else the job's own, took on this machine."""
    if report.search is not None:
        found, points = report.search, report.search.best
        layouts = [
            Layout(found.config(place), point.set, point.step_s or 0.0, point.peak_bytes or 0)
            for place, point in enumerate(points)
        ]
    else:
        assert report.seconds is not None, "a pass was measured"
        peak_bytes = report.outlook.bytes_by_tier["device"]
        layouts = [Layout(job.config, (), report.seconds.run.step_s, peak_bytes)]
    return measure(layouts, job.ranks, device)


def _draw(reports: Mapping[str, JobReport], setting: PlanSetting, path: Path) -> None:
    """Draw the foreseen lanes of a step of each report into a PNG file.

    Raises:
        UsageError: if the file cannot be written.
    """
    timelines = {name: _timeline(report, setting) for name, report in reports.items()}
    title = f"a step on {setting.hardware.name}"
    try:
        draw_lanes(timelines, path, title=title)
    except OSError as error:
        raise UsageError(f"--draw: {in_words(error)}; give the path of a file that may be written") from None


def _timeline(report: JobReport, setting: PlanSetting) -> Timeline:
    known = report.known
    policies = known.policies_with(known.settings.offload)
    return step_timeline(
        report.outlook.plan, policies, known.passed, setting.hardware, setting.device.type, setting.per_host
    )


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
    known = read(make, config, job.ranks, setting.device, example, per_host=setting.per_host)
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
        _check_options(request, known.unforeseen)
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


def _check_options(request: PlanRequest, unforeseen: str) -> None:
    """Refuse options that need a pass on shapes if there is none.

    Raises:
        UsageError: if there is such an option.
    """
    given = {
        "--why": request.why,
        "--search": request.search,
        "--solve": request.solve is not None,
        "--measure": request.measure,
        "--draw": request.draw is not None,
        "--mfu": request.mfu is not None,
        "--step-s": request.step_s is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"plan: {option} needs a pass of the model on shapes; {unforeseen}")


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
    limit_s = request.limit_s
    if limit_s is not None and request.begun_s is not None:
        limit_s = max(limit_s - (time.monotonic() - request.begun_s), 0.0)
    found = search(
        job.shapes.make,
        job.config,
        memory,
        lambda rows: shapes_of(job.resolved.config, rows).example,
        ranks=job.ranks,
        device=setting.device,
        hardware=setting.hardware,
        free=request.free,
        limit_s=limit_s,
        per_host=setting.per_host,
    )
    if request.write is not None and found.best:
        try:
            found.write(request.write)
        except OSError as error:
            raise UsageError(
                f"--write: {in_words(error)}; give the path of a file that may be written"
            ) from None
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
