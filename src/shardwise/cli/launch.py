"""``shardwise launch --ranks N script.py ...``: any script, on several ranks of this host or of several hosts.

The command also accepts the options of DeepSpeed's launcher by their own names, with underscores. ``train`` has
the same options of hosts. What they mean is in ``launch/starting.py``.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardwise.base.errors import UsageError
from shardwise.base.regular_files import read_small_file

_HOSTS = "Hosts and slots"
_RANKS = "Ranks"
_ELSEWHERE = "Refused, with what to do instead"
_NUMBERS_OF_RANKS = ("--ranks", "--num_gpus", "--num_accelerators", "--nproc-per-node", "--nproc_per_node")
"""Names of the option for the number of ranks, except -n, which many scripts have."""


def _refused(name: str, instead: str) -> Any:
    """Return an option of DeepSpeed's launcher that has no meaning in Shardwise and is refused."""

    def check(value: Any) -> None:
        if value not in (None, False, ""):
            raise UsageError(f"launch: --{name}: {instead}")

    return typer.Option(f"--{name}", callback=check, rich_help_panel=_ELSEWHERE, help=f"Refused: {instead}.")


_ELASTIC = (
    "start the job with the hosts that are there; a checkpoint of any number of ranks goes on with them"
)


_Program = Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script, or with -m a module.")]
_Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Handed to the script as they are.")
]
_Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "-n",
        "--num_gpus",
        "--num_accelerators",
        "--nproc-per-node",
        "--nproc_per_node",
        help="Processes to start on each host.",
    ),
]
_IsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module.")]
_IsProgram = Annotated[
    bool, typer.Option("--no_python", help="SCRIPT is any program; it is run without Python.")
]
_Logs = Annotated[
    Path | None,
    typer.Option(
        "--logs",
        "--enable_each_rank_log",
        help="Folder for one log per rank; the terminal then shows rank 0 alone.",
    ),
]
_AsDeepspeed = Annotated[
    bool,
    typer.Option(
        "--as-deepspeed",
        "--as_deepspeed",
        help="`import deepspeed` in the script is Shardwise, in this job alone.",
    ),
]
_NoLocalRank = Annotated[
    bool,
    typer.Option("--no_local_rank", help="With --as-deepspeed: do not hand --local_rank=N to the script."),
]
_BindsCores = Annotated[
    bool,
    typer.Option("--bind_cores_to_rank", rich_help_panel=_RANKS, help="Give each rank cores of its own."),
]
_CoreList = Annotated[
    str | None,
    typer.Option("--bind_core_list", rich_help_panel=_RANKS, help="The cores to share out: 0,2-7."),
]
_SavesPids = Annotated[
    bool,
    typer.Option(
        "--save_pid",
        rich_help_panel=_RANKS,
        help="Keep the ranks' process numbers in shardwise_PID.pids meanwhile.",
    ),
]
_IsQuiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Say nothing but errors and what the ranks say.")
]
Hostfile = Annotated[
    Path | None,
    typer.Option(
        "-H", "--hostfile", rich_help_panel=_HOSTS, help="File with a line `HOST slots=N` per host."
    ),
]
Include = Annotated[
    str,
    typer.Option("-i", "--include", rich_help_panel=_HOSTS, help="Hosts or slots to use: HOST@HOST:0,2."),
]
Exclude = Annotated[
    str, typer.Option("-e", "--exclude", rich_help_panel=_HOSTS, help="Hosts or slots to leave out.")
]
NumNodes = Annotated[
    int | None,
    typer.Option("--num_nodes", rich_help_panel=_HOSTS, help="Hosts: the hostfile's first, or in all."),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node_rank",
        rich_help_panel=_HOSTS,
        help="Number of this host, from 0: start this host's ranks alone, and nothing on other hosts.",
    ),
]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        "--master_addr",
        rich_help_panel=_HOSTS,
        help="Address of the first host. Left out: found from what the hosts say, or, with --node_rank, its name.",
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master_port",
        rich_help_panel=_HOSTS,
        help="Port of the store there. Left out: any free port, or, with --node_rank, 29500.",
    ),
]
LauncherName = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        rich_help_panel=_HOSTS,
        help="Start the ranks of all hosts from here, by ssh (or pdsh), slurm, ray, mpi (or openmpi, mpich, impi); or "
        "those of this host by torchrun; or print a manifest for kubernetes. Left out: ssh, if a hostfile has several "
        "hosts and there is no --node_rank.",
    ),
]
LauncherArgs = Annotated[
    str,
    typer.Option(
        "--launcher_args",
        rich_help_panel=_HOSTS,
        help="Additional arguments of ssh, srun, mpirun or torchrun, as in a shell; for kubernetes --image, --name, "
        "--kind, --device, --shm and --runtime.",
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option("--ssh_port", rich_help_panel=_HOSTS, help="Port of the hosts' ssh servers."),
]
Exports = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar="NAME[=VALUE]",
        rich_help_panel=_HOSTS,
        help="Variable that every rank gets, beside those of this process that begin with NCCL_, PYTHON or UCX_.",
    ),
]
NoSsh = Annotated[
    bool,
    typer.Option("--no_ssh", rich_help_panel=_HOSTS, help="Start nothing on other hosts; give --node_rank."),
]
ForceMulti = Annotated[
    bool,
    typer.Option("--force_multi", rich_help_panel=_HOSTS, help="Use ssh for a hostfile with one host, too."),
]
Renders = Annotated[
    bool,
    typer.Option(
        "--render",
        rich_help_panel=_HOSTS,
        help="Print what --launcher would start, without secrets; start nothing.",
    ),
]
_NoSshCheck = Annotated[
    bool, typer.Option("--no_ssh_check", hidden=True, help="No effect: no host is asked before the start.")
]
_LogLevel = Annotated[str, typer.Option("--log_level", hidden=True, help="Level of what the launcher says.")]
_VenvScript = Annotated[
    str | None, _refused("venv_script", "call shardwise from the environment that the ranks shall use")
]
_MinElasticNodes = Annotated[int | None, _refused("min_elastic_nodes", _ELASTIC)]
_MaxElasticNodes = Annotated[int | None, _refused("max_elastic_nodes", _ELASTIC)]
_ElasticTraining = Annotated[bool | None, _refused("elastic_training", _ELASTIC)]
_Autotuning = Annotated[
    str | None, _refused("autotuning", "`print(engine.plan)` tells a layout's memory before it runs")
]


def command(
    program: _Program,
    arguments: _Arguments = None,
    ranks: _Ranks = None,
    is_module: _IsModule = False,
    is_program: _IsProgram = False,
    logs: _Logs = None,
    as_deepspeed: _AsDeepspeed = False,
    no_local_rank: _NoLocalRank = False,
    binds_cores: _BindsCores = False,
    core_list: _CoreList = None,
    saves_pids: _SavesPids = False,
    is_quiet: _IsQuiet = False,
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
    no_ssh_check: _NoSshCheck = False,
    log_level: _LogLevel = "info",
    venv_script: _VenvScript = None,
    min_elastic_nodes: _MinElasticNodes = None,
    max_elastic_nodes: _MaxElasticNodes = None,
    elastic_training: _ElasticTraining = None,
    autotuning: _Autotuning = None,
) -> None:
    """Run a Python script on several ranks: of this host, of several hosts, or this host's part of several.

    The script finds its rank as under torchrun. If one rank fails, all are stopped and its traceback is shown.
    """
    from shardwise.launch.as_deepspeed import read_env_file
    from shardwise.launch.local import RankProgram
    from shardwise.launch.starting import HostChoice, RankOptions, place_of, start

    kind = _kind_of_program(is_module, is_program)
    wants_local_rank = as_deepspeed and not no_local_rank
    made = RankProgram(kind, program, tuple(arguments or ()), wants_local_rank=wants_local_rank)
    _check_level(log_level)
    if not is_program and not (ranks or hostfile or include or exclude or num_nodes or launcher):
        _check_order(program, arguments or ())
    choice = HostChoice(
        ranks, hostfile, include, exclude, num_nodes, node_rank, master_addr, master_port, launcher, launcher_args,
        ssh_port, tuple(exports or ()), no_ssh, force_multi, renders,
    )  # fmt: skip
    place = place_of(choice, as_deepspeed)
    is_quiet = is_quiet or log_level.lower() in ("warning", "error", "critical")
    with _file_of_pids() if saves_pids else nullcontext() as says:
        options = RankOptions(logs, as_deepspeed, binds_cores, core_list, is_quiet, says)
        code = start(made, place, choice, options, read_env_file() if as_deepspeed else None)
    raise typer.Exit(code)


def _kind_of_program(is_module: bool, is_program: bool) -> Literal["script", "module", "program"]:
    """Return the kind of program that the ranks run.

    Raises:
        UsageError: if both options are given.
    """
    if is_module and is_program:
        raise UsageError("launch: --module and --no_python exclude one another; give one of them")
    return "program" if is_program else "module" if is_module else "script"


def _check_order(program: str, arguments: Sequence[str]) -> None:
    """Refuse a number of ranks behind the script's name, unless the script has an option of that name.

    Raises:
        UsageError: if ``launch train.py --ranks 2`` is about to start one rank; the message contains the right order.
    """
    behind = [name for each in arguments if (name := each.partition("=")[0]) in _NUMBERS_OF_RANKS]
    if not behind:
        return
    try:
        text = read_small_file(program)
    except OSError:  # a module; or no such script, which is reported next
        text = b""
    # A script may derive its options from field names, so that its text contains them without the dashes.
    names = [name if name == "--ranks" else name.strip("-").replace("-", "_") for name in behind]
    if any(name.encode() in text for name in names):
        return
    raise UsageError(
        f"launch: {behind[0]} stands behind the script, which would get it, and one rank would start; put it in front: "
        f"shardwise launch {behind[0]} N {program}. If it is an option of the script's own, put --ranks 1 in front"
    )


def _check_level(name: str) -> None:
    known = logging.getLevelNamesMapping()
    if name.upper() not in known:
        raise UsageError(f"launch: --log_level {name!r}; expected debug, info, warning, error or critical")


@contextmanager
def _file_of_pids() -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield a function that writes process numbers to a file; the file is removed at the end of the context."""
    path = Path(f"shardwise_{os.getpid()}.pids")

    def write(pids: Sequence[int]) -> None:
        path.write_text("".join(f"{pid}\n" for pid in pids), encoding="ascii")

    try:
        yield write
    finally:
        path.unlink(missing_ok=True)
