"""The job and the hardware that a command such as ``shardwise plan`` names, before anything is computed.

CONFIG or RUN -> configuration, ranks       RUN: config.yaml, the ranks of the last start, outcome.json
--device      -> Hardware, bytes of a rank  a shipped table, a file, or this machine
shapes        -> a model and a microbatch   cli/outlook/job_shapes.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, read_hardware
from shardwise.base.regular_files import read_small_file
from shardwise.base.words import counted
from shardwise.cli.outlook.job_shapes import JobShapes, shapes_of
from shardwise.cli.outlook.outcome import RunOutcome, read_outcome
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.run import RunConfig
from shardwise.engine.fit.fits import Memory, budget
from shardwise.observe.memory import available_bytes
from shardwise.plan.placement import Tier
from shardwise.simulate.calibration import cpu_hardware

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
    """Seconds after which a search ends with what it has found, counted from ``begun_s``."""
    begun_s: float | None = None
    """Time at which the command began, by ``time.monotonic``; None: the limit counts from the search's own begin."""
    write: Path | None = None
    """File into which the best configuration of a search goes."""
    solve: str | None = None
    measure: bool = False
    """Run the best configurations on this machine."""
    draw: Path | None = None
    """File into which the lanes of a foreseen step are drawn."""


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
    missing_outcome: str | None = None
    """Sentence on how to get an outcome, if the request names a run that has none."""


def check_new_file(option: str, path: Path | None) -> None:
    """Check that a file can lie at ``path``, before anything is computed that goes into the file.

    Args:
        option: Name of the option that gives the path.
        path: The path; None: the option was not given.

    Raises:
        UsageError: if its folder does not exist, or if the path is a folder.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: there is no folder {path.parent}; make it, or give another path")
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; give the path of a file")


def job_of(request: PlanRequest, name: str, device_type: str) -> PlannedJob:
    """Return the job that ``name`` names: a configuration, an example or a run."""
    folder = RunFolder(Path(name))
    is_run = folder.root.is_dir()
    if is_run and not folder.config.is_file():
        raise UsageError(f"plan: {name} is a folder without config.yaml, so no run of shardwise train")
    ranks = request.ranks or (_ranks_of(folder) if is_run else 1)
    source = str(folder.config) if is_run else name
    wanted = CommandRequest(source, request.overrides, ranks=ranks).load()
    # As shardwise train would run it.
    trained = wanted.model_copy(update={"monitor": wanted.monitor.of_train()})
    resolved = resolve(trained, ranks, device_type)
    micro_size = resolved.config.batch.micro_size
    if micro_size is None:
        raise ConfigError(
            f"{name}: batch.micro_size does not follow from batch.global_size; give one of micro_size and accumulation"
        )
    outcome, missing = None, None
    if is_run:
        try:
            outcome = read_outcome(folder.outcome)
        except UsageError as error:
            missing = str(error)
    return PlannedJob(wanted, resolved, ranks, shapes_of(resolved.config, micro_size), outcome, missing)


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


def setting_of(request: PlanRequest) -> tuple[PlanSetting, tuple[str, ...]]:
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


def rank_memory(
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
