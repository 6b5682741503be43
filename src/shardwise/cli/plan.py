"""``shardwise plan CONFIG|RUN``: bytes, seconds and reasons of a layout before a rank exists."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

_Config = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG/RUN",
        help="The run as YAML or JSON, the name of an example, or the folder of a run, with its outcome.",
    ),
]
_Ranks = Annotated[
    int | None, typer.Option("--ranks", "-n", min=1, help="Ranks of the job; of a run, those it had.")
]
_Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in zero.stage=3.")
]
_Device = Annotated[
    str,
    typer.Option(
        metavar="NAME/FILE",
        help="Hardware of a rank: a name that --devices lists, a file of the same form, or cpu: this machine.",
    ),
]
_PerHost = Annotated[
    int | None, typer.Option(min=1, help="Ranks of one host; left out: the usual number, or all.")
]
_Memory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a rank instead of the device's, as 16GiB, or host=64GiB or disk=1TB beside it.",
    ),
]
_Devices = Annotated[bool, typer.Option("--devices", help="List the hardware that is known by name.")]
_Why = Annotated[bool, typer.Option("--why", help="Explain every byte at the peak, and what removes it.")]
_Against = Annotated[
    str | None,
    typer.Option(metavar="CONFIG/RUN", help="Another job on the same hardware: print what differs."),
]
_Mfu = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Use this model FLOP/s utilization in place of foreseen seconds."),
]
_StepS = Annotated[
    float | None,
    typer.Option("--step-s", min=0.0, help="Use this many seconds a step in place of those foreseen."),
]
_Failures = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Failures of the whole job in a day: the best interval of checkpoints, and goodput."
    ),
]
_Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure this machine with two ranks, half a minute, and keep it for --device cpu.",
    ),
]
_Refit = Annotated[
    Path | None,
    typer.Option(
        metavar="LINES",
        help="Fit the table of --device to measured steps, a JSON object a line with config, ranks, device, per_host "
        "and step_s, and write it with --write.",
    ),
]
_Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File that --search (the best configuration) or --refit (a table) writes."
    ),
]
_Search = Annotated[
    bool,
    typer.Option("--search", help="Find the fastest layouts that fit, over all knobs of the configuration."),
]
_Free = Annotated[
    str,
    typer.Option(
        metavar="KEYS",
        help="With --search: keys that may change the run's numbers, divided by commas, as batch.global_size.",
    ),
]
_LimitS = Annotated[
    float | None,
    typer.Option(
        "--limit-s",
        min=0.0,
        help="With --search: seconds of the whole command after which the search ends with what it has found.",
    ),
]
_Solve = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Find the largest batch.micro_size, model.context, model.layers or experts.rows that fits, or the fewest "
        "ranks.",
    ),
]
_Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Run the configuration, or the best three of --search, for five steps on this machine.",
    ),
]
_Draw = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the lanes of the foreseen step into a PNG file."),
]
_History = Annotated[
    bool,
    typer.Option("--history", help="List what was foreseen and measured of the runs of this machine."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")]


def command(
    config: _Config = None,
    ranks: _Ranks = None,
    overrides: _Overrides = None,
    device: _Device = "cpu",
    per_host: _PerHost = None,
    memory: _Memory = None,
    devices: _Devices = False,
    why: _Why = False,
    against: _Against = None,
    mfu: _Mfu = None,
    step_s: _StepS = None,
    failures_per_day: _Failures = None,
    calibrate: _Calibrate = False,
    refit: _Refit = None,
    write: _Write = None,
    search: _Search = False,
    free: _Free = "",
    limit_s: _LimitS = None,
    solve: _Solve = None,
    measure: _Measure = False,
    draw: _Draw = None,
    history: _History = False,
    as_json: _AsJson = False,
) -> None:
    """Print what a job needs, how long it takes and why, without data, devices or processes.

    The exit code is 0 if the job fits, or if --search or --solve has found something, and 2 otherwise or if the call is
    wrong.
    """
    begun_s = time.monotonic()  # in front of the imports, which take seconds

    from shardwise.cli.check import memory_of
    from shardwise.cli.outlook.planned import plan
    from shardwise.cli.outlook.planned_job import PlanRequest

    said = _lines_without_a_job(devices, calibrate, history, as_json, refit, device, write)
    if said:
        typer.echo("\n".join(said))
        return
    _check_call(config, mfu, step_s, search, {"--free": free, "--limit-s": limit_s, "--write": write})
    has = None if memory is None else memory_of(memory)
    request = PlanRequest(config or "", tuple(overrides or ()), ranks, device, per_host, has)
    request = request._replace(
        mfu=mfu, step_s=step_s, failures_per_day=failures_per_day, against=against, why=why
    )
    freed = tuple(key.strip() for key in free.split(",") if key.strip())
    request = request._replace(search=search, free=freed, limit_s=limit_s, begun_s=begun_s)
    request = request._replace(write=write, solve=solve)
    answer = plan(request._replace(measure=measure, draw=draw))
    typer.echo(answer.to_json() if as_json else "\n".join(answer.lines()))
    raise typer.Exit(0 if answer.report.answers else 2)


def _check_call(
    config: str | None,
    mfu: float | None,
    step_s: float | None,
    search: bool,
    of_search: "Mapping[str, object]",
) -> None:
    """Refuse options that do not belong together.

    Args:
        config: The job.
        mfu: The utilization that replaces foreseen seconds.
        step_s: The seconds that replace foreseen ones.
        search: True if layouts are searched.
        of_search: Values of the options that a search alone reads, by name.

    Raises:
        UsageError: if there are such options, or no job.
    """
    from shardwise.base.errors import UsageError

    if config is None:
        raise UsageError(
            "plan: CONFIG is missing: a configuration, the name of an example, or the folder of a run"
        )
    if mfu is not None and step_s is not None:
        raise UsageError("plan: --mfu and --step-s both replace the seconds of a step; give one")
    for option, value in of_search.items():
        if not search and value not in (None, ""):
            raise UsageError(f"plan: {option} belongs to --search; give --search too, or leave it out")


def _lines_without_a_job(
    devices: bool,
    calibrate: bool,
    history: bool,
    as_json: bool,
    refit: Path | None,
    device: str,
    write: Path | None,
) -> list[str]:
    """Do what an option asks for that needs no job, and return its lines; an empty list if there is no such option."""
    from shardwise.base.errors import UsageError
    from shardwise.cli.outlook import hardware_tables
    from shardwise.cli.outlook.history import RunHistory
    from shardwise.simulate.calibration import calibrate as measure_machine

    if devices:
        return hardware_tables.device_lines()
    if calibrate:
        return hardware_tables.calibration_lines(measure_machine())
    if history:
        found = RunHistory.read()
        return [found.to_json()] if as_json else found.lines()
    if refit is None:
        return []
    if write is None:
        raise UsageError("plan: --refit needs --write FILE, into which the fitted table goes")
    fitted = hardware_tables.refitted(refit, device, write)
    worst = max(abs(ratio - 1) for ratio in fitted.after)
    said = [f"{name:<10} times {factor:.3g}" for name, factor in fitted.factors.items()]
    return [*said, f"{write}: foreseen within {worst:.1%} of the {len(fitted.after)} measured steps"]
