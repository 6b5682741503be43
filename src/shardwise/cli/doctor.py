"""``shardwise doctor RUN``: where the time of a run's steps goes, and the first cause of what is lost."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.cli.outlook.outcome import RunOutcome
    from shardwise.observe.diagnosis import StepDiagnosis

_WIDTH = 19
"""Letters of the longest name of a phase."""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The folder of another run, whose steps are compared with these."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Print the seconds of a run's steps by phase, beside those that were foreseen, and name the first cause."""
    import json
    from pathlib import Path

    outcome, found = _diagnosed(Path(run))
    other = None if against is None else _diagnosed(Path(against))
    if as_json:
        whole = found.plain() | {"against": None if other is None else other[1].plain()}
        typer.echo(json.dumps(whole, indent=2))
        return
    said = _lines(outcome, found)
    if other is not None:
        said += ["", f"beside {against}, {other[1].step_s:.4g} s a step, cause: {other[1].cause}:"]
        said += _lines_beside(found, other[1])
    typer.echo("\n".join(said))


def _diagnosed(folder: "Path") -> "tuple[RunOutcome, StepDiagnosis]":  # type: ignore[name-defined]  # noqa: F821
    """Return the outcome of a run and its diagnosis.

    Raises:
        UsageError: if the run has no outcome, or no step was measured.
    """
    from shardwise.base.errors import UsageError
    from shardwise.cli.outlook.outcome import read_outcome
    from shardwise.cli.run_folder import RunFolder
    from shardwise.observe.diagnosis import diagnose

    if not folder.is_dir():
        raise UsageError(
            f"doctor: there is no folder {folder}; expected the folder of a run, as runs/gpt_stdlib"
        )
    outcome = read_outcome(RunFolder(folder).outcome)
    if not outcome.phases:
        raise UsageError(
            f"{folder}: no step of this run was measured; it needs three steps, and monitor.rank_seconds not false"
        )
    foreseen = {name: each.foreseen for name, each in outcome.lanes.items() if each.foreseen is not None}
    return outcome, diagnose(outcome.phases, foreseen)


def _lines(outcome: "RunOutcome", found: "StepDiagnosis") -> list[str]:
    said = [f"{found.step_s:.4g} s a step over {outcome.steps} steps of {outcome.ranks} ranks"]
    for name, share in found.shares.items():
        if not share:
            continue
        lane = outcome.lanes.get(name)
        foreseen = "" if lane is None or lane.foreseen is None else f"  foreseen {lane.foreseen:.4g} s"
        named = f"waiting for rank {found.rank}" if name == "waiting" and found.rank is not None else name
        said.append(f"  {named:<{_WIDTH}} {share * found.step_s:10.4g} s  {share:6.1%}{foreseen}")
    return [*said, f"cause: {found.cause}: {found.sentence}"]


def _lines_beside(ours: "StepDiagnosis", theirs: "StepDiagnosis") -> list[str]:
    """Return the seconds of two runs by phase as a table, with what this run takes more."""
    said = [f"  {'':<{_WIDTH}} {'this run':>12} {'the other':>12} {'more':>12}"]
    for name in ours.shares:
        here, there = (each.shares.get(name, 0.0) * each.step_s for each in (ours, theirs))
        if here or there:
            said.append(f"  {name:<{_WIDTH}} {here:10.4g} s {there:10.4g} s {here - there:+10.4g} s")
    return said
