"""``shardwise train CONFIG``: from one file to a trained model."""

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.launch import (
    Exclude,
    Exports,
    ForceMulti,
    Hostfile,
    Include,
    LauncherArgs,
    LauncherName,
    MasterAddr,
    MasterPort,
    NodeRank,
    NoSsh,
    NumNodes,
    Renders,
    SshPort,
)
from shardwise.cli.runs.chosen_step import NEWEST, StepOption

if TYPE_CHECKING:
    from shardwise.cli.request import CommandRequest
    from shardwise.launch.starting import HostChoice

_Config = Annotated[
    str, typer.Argument(help="The run as YAML, JSON or JSON with comments; or the name of an example.")
]
_Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "-n",
        help="Processes on each host. Left out: the slots of --hostfile; else the ranks of torchrun, srun or mpirun, "
        "or one.",
    ),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in zero.stage=3."),
]
_Resume = Annotated[
    str,
    typer.Option(
        help="auto: from the newest whole checkpoint in the run folder, if any; best: from the best one in it; "
        "never: refuse to go on; or the PATH of a run, of its checkpoints or of one step."
    ),
]
_Profile = Annotated[int, typer.Option(min=0, help="Trace this many steps of every rank.")]
_MemorySnapshot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="On a CUDA device: record every allocation of the steps of --profile, or else of the first three steps, "
        "into one file per rank, as FILE_rank_00000.pickle. pytorch.org/memory_viz draws it.",
    ),
]
_Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Start nothing: read the configuration, open the data, and print the mesh, the plan and the bytes on "
        "a rank.",
    ),
]
_Memory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE",
        help="With --check: of a rank, as 16GiB, or host=64GiB or disk=1TB beside; says what a step takes and what "
        "would make it fit.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="With --check: print it as JSON.")]


def command(
    config: _Config,
    ranks: _Ranks = None,
    overrides: _Overrides = None,
    resume: _Resume = "auto",
    step: StepOption = NEWEST,
    profile: _Profile = 0,
    memory_snapshot: _MemorySnapshot = None,
    check: _Check = False,
    memory: _Memory = None,
    as_json: _AsJson = False,
    hostfile: Hostfile = None,
    include: Include = "",
    exclude: Exclude = "",
    num_nodes: NumNodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    launcher: LauncherName = None,
    launcher_args: LauncherArgs = "",
    ssh_port: SshPort = None,
    exports: Exports = None,
    no_ssh: NoSsh = False,
    force_multi: ForceMulti = False,
    renders: Renders = False,
) -> None:
    """Train a model, and leave checkpoints, metrics and logs in its run folder."""
    from shardwise.cli.rank import train
    from shardwise.cli.request import CommandRequest
    from shardwise.launch.starting import HostChoice, place_of

    choice = HostChoice(
        ranks, hostfile, include, exclude, num_nodes, node_rank, master_addr, master_port, launcher, launcher_args,
        ssh_port, tuple(exports or ()), no_ssh, force_multi, renders,
    )  # fmt: skip
    world = place_of(choice, counts_devices=False).world if check and choice.names_hosts() else ranks
    words = tuple(choice.words())
    request = CommandRequest(
        config, tuple(overrides or ()), resume, profile, world, memory_snapshot, step, words
    )
    _refuse_without_sense(check, as_json, memory, memory_snapshot)
    if check:
        from shardwise.cli import check as checks

        found = checks.check(request, None if memory is None else checks.memory_of(memory))
        typer.echo(found.to_json() if as_json else "\n".join(found.lines()))
        raise typer.Exit(0 if found.report is None or found.report.fits else 2)
    if ranks is None and not choice.names_hosts():
        raise typer.Exit(train(request))
    raise typer.Exit(_launch(request, choice))


def _refuse_without_sense(
    check: bool, as_json: bool, memory: list[str] | None, memory_snapshot: str | None
) -> None:
    """Raise UsageError if options of ``--check`` and options of a run are given together."""
    from shardwise.base.errors import UsageError

    if (as_json or memory) and not check:
        raise UsageError(
            "train: --json goes with --check; the numbers of a run are in its metrics.csv"
            if as_json
            else "train: --memory goes with --check, which starts nothing"
        )
    if check and memory_snapshot is not None:
        raise UsageError("train: --memory-snapshot records steps, and --check starts nothing; leave one out")


def _launch(request: "CommandRequest", choice: "HostChoice") -> int:
    """Check the run, start its ranks, and return the exit code.

    What the ranks check as well is checked here first, so that a fault is reported once, before anything has started.
    """
    import shlex
    from dataclasses import replace
    from pathlib import Path

    from shardwise.cli.runs.run_folder import RunFolder
    from shardwise.config.auto import resolve
    from shardwise.launch.local import RankProgram
    from shardwise.launch.starting import RankOptions, place_of, start

    place = place_of(choice, counts_devices=False)
    wanted = request.load()
    if request.memory_snapshot is not None:
        from shardwise.cli.profile import check_snapshot, device_type_of

        check_snapshot(request.memory_snapshot, device_type_of(wanted.comm.device))
    resolve(wanted, place.world, "cpu")
    folder = RunFolder(Path(wanted.output_dir))
    folder.start_from(request.resume, request.step)
    if not choice.node_rank and not choice.renders:
        with folder.claimed():
            pass  # rank 0 locks the folder for the whole run; a second run is refused before its ranks start
    program = RankProgram("module", "shardwise.cli.rank", (request.to_json(),))
    words = tuple(shlex.split(replace(request, ranks=None, host_words=()).command())[1:])
    return start(program, place, choice, RankOptions(folder.logs, words=words))
