"""The report of ``shardwise plan``: everything that is foreseen of the job that a request names.

job, hardware -> passes on shapes           cli/outlook/planned_job.py, engine/fit/
report        -> text or JSON               engine/fit/report.py
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwise.cli.outlook.job_difference import difference
from shardwise.cli.outlook.job_shapes import JobShapes, shapes_of
from shardwise.cli.outlook.planned_job import (
    PlannedJob,
    PlanRequest,
    PlanSetting,
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
from shardwise.plan.placement import Tier
from shardwise.precision.policy import NAMES
from shardwise.simulate.price import step_seconds
from shardwise.simulate.step_flops import StepFlops, run_time, seconds_at, step_flops
from shardwise.simulate.why import MemoryReason


def plan(request: PlanRequest) -> JobReport:
    """Return what is foreseen of the job that ``request`` names.

    Raises:
        ShardwiseError: as the run itself before its first step, for all that does not depend on its data.
        UsageError: if the call is wrong.
    """
    setting, assumes = setting_of(request)
    job = job_of(request, request.config, setting.device.type)
    setting = setting._replace(per_host=request.per_host or setting.per_host)
    memory, told = rank_memory(request, setting, min(setting.per_host or job.ranks, job.ranks))
    report = report_of(request, job, setting, memory, (*assumes, *told))
    if request.against is None:
        return report
    other = job_of(request._replace(overrides=()), request.against, setting.device.type)
    theirs = report_of(request._replace(why=False, search=False, solve=None), other, setting, memory, ())
    return replace(report, diff=difference(report, theirs))


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
    known = read(make, config, job.ranks, setting.device, example)
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
            make, config, memory, example, ranks=job.ranks, device=setting.device, hardware=setting.hardware
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
    """Return the composition of the peak of the rank that needs most, and what removes each row."""
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
        (reason, _removal(remover_of(reason.row, found)))
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
