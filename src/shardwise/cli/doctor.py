"""``shardwise doctor RUN``: which rank of a job hangs, where and since when; else where the time of its steps goes.

rings of records in the folder    the verdict on the ranks, running or ended (comm/watching/inquiry.py)
outcome.json in the folder        the seconds of a step by phase, and the first cause of what is lost
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.cli.outlook.outcome import RunOutcome
    from shardwise.comm.watching.verdict import JobVerdict
    from shardwise.observe.diagnosis import StepDiagnosis

_WIDTH = 19
"""Letters of the longest name of a phase."""
_WRONG = ("hung", "slow", "mismatch")


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, or of the logs of a script (--logs); the run may be running or have ended.",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The folder of another run, whose steps are compared with these."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict and the diagnosis as JSON.")
    ] = False,
) -> None:
    """Name the rank of a job that hangs, with its place, and print the seconds of the steps by phase.

    The exit code is 1 if a rank keeps the others waiting, if ranks have called different collectives, or if the run
    ended with an error.
    """
    import json
    from pathlib import Path

    folder = Path(run)
    verdict = _verdict(folder)
    measured = None if verdict is not None and not (folder / "outcome.json").exists() else _diagnosed(folder)
    other = None if against is None else _diagnosed(Path(against))
    if as_json:
        typer.echo(json.dumps(_plain(verdict, measured, other), indent=2))
    else:
        said = [] if verdict is None else _lines_of(verdict)
        if measured is not None:
            said += [""] * bool(said) + _lines(*measured)
            if other is not None:
                said += ["", f"beside {against}, {other[1].step_s:.4g} s a step, cause: {other[1].cause}:"]
                said += _lines_beside(measured[1], other[1])
        typer.echo("\n".join(said))
    if verdict is not None and (
        verdict.state in _WRONG or (verdict.state == "ended" and verdict.rank is not None)
    ):
        raise typer.Exit(1)


def _verdict(folder: "Path") -> "JobVerdict | None":
    """Return the verdict on the ranks of a job; None if they keep no records here.

    Raises:
        DamagedError: if the records of a rank are damaged.
    """
    from shardwise.comm.rendezvous.handshake import identity
    from shardwise.comm.watching.inquiry import inquire, ring_folder

    rings = ring_folder(folder)
    return None if rings is None else inquire(rings, identity("").host, _failures(folder))


def _failures(folder: "Path") -> dict[int, Any]:
    """Return the failures that the launcher has kept beside the logs, by rank."""
    import re

    from shardwise.comm.watching.inquiry import OwnFailure
    from shardwise.launch.failure import kept_in, read

    found = {}
    for path in (*kept_in(folder / "logs"), *kept_in(folder)):
        number = re.search(r"rank_(\d+)", path.name)
        if number is not None:
            failure = read(path, int(number[1]), 0.0)
            found[failure.rank] = OwnFailure(failure.time_s, failure.headline, failure.is_of_peers)
    return found


def _plain(
    verdict: "JobVerdict | None",
    measured: "tuple[RunOutcome, StepDiagnosis] | None",
    other: "tuple[RunOutcome, StepDiagnosis] | None",
) -> dict[str, Any]:
    """Return the verdict and the diagnosis as values for JSON."""
    whole: dict[str, Any] = {} if measured is None else measured[1].plain()
    if verdict is None:
        whole = {"state": "ended", **whole}
    else:
        # The rank of a verdict that names none is the one that the diagnosis names.
        whole = whole | {
            name: value for name, value in verdict._asdict().items() if value is not None or name not in whole
        }
    return whole | {"against": None if other is None else other[1].plain()}


def _lines_of(verdict: "JobVerdict") -> list[str]:
    said = [f"{verdict.state}: {verdict.sentence}"]
    if verdict.phase is not None:
        since = "" if verdict.seconds is None else f", for {verdict.seconds:.0f} s"
        said.append(f"it is {verdict.phase}{since}")
    if verdict.stack and verdict.stack not in verdict.sentence:
        said += ["its main thread is at", verdict.stack]
    return said


def _diagnosed(folder: "Path") -> "tuple[RunOutcome, StepDiagnosis]":
    """Return the outcome of a run and its diagnosis.

    Raises:
        UsageError: if the run has no outcome, or no step was measured.
    """
    from shardwise.base.errors import UsageError
    from shardwise.cli.outlook.outcome import read_outcome
    from shardwise.cli.runs.run_folder import RunFolder
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
