"""``shardwise launch --ranks N script.py ...``: any script, on several ranks of this host or of several hosts.

The command also accepts the options of DeepSpeed's launcher by their own names, with underscores. Options that start
processes on other hosts by ssh are refused with what to do instead: every host runs the same command with its own
``--node_rank``.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardwise.base.errors import UsageError
from shardwise.base.regular_files import read_small_file
from shardwise.base.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.launch.hosts import HostRanks

_HOSTS = "Hosts and slots"
_RANKS = "Ranks"
_ELSEWHERE = "Refused, with what to do instead"
_PORT = 29500
_LAST_PORT = 65535
_NUMBERS_OF_RANKS = ("--ranks", "--num_gpus", "--num_accelerators", "--nproc-per-node", "--nproc_per_node")
"""Names of the option for the number of ranks, except -n, which many scripts have."""


def _refused(name: str, instead: str) -> Any:
    """Return an option of DeepSpeed's launcher that has no meaning in Shardwise and is refused."""

    def check(value: Any) -> None:
        if value not in (None, False, ""):
            raise UsageError(f"launch: --{name}: {instead}")

    return typer.Option(f"--{name}", callback=check, rich_help_panel=_ELSEWHERE, help=f"Refused: {instead}.")


_SSH = "nothing is started on other hosts; run the command on each, with --node_rank N"
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
_Hostfile = Annotated[
    Path | None,
    typer.Option(
        "-H", "--hostfile", rich_help_panel=_HOSTS, help="File with a line `HOST slots=N` per host."
    ),
]
_Include = Annotated[
    str,
    typer.Option("-i", "--include", rich_help_panel=_HOSTS, help="Hosts or slots to use: HOST@HOST:0,2."),
]
_Exclude = Annotated[
    str, typer.Option("-e", "--exclude", rich_help_panel=_HOSTS, help="Hosts or slots to leave out.")
]
_NumNodes = Annotated[
    int | None,
    typer.Option("--num_nodes", rich_help_panel=_HOSTS, help="Hosts: the hostfile's first, or in all."),
]
_NodeRank = Annotated[
    int | None,
    typer.Option("--node_rank", rich_help_panel=_HOSTS, help="Which host this one is, from 0."),
]
_MasterAddr = Annotated[
    str | None,
    typer.Option(
        "--master_addr", rich_help_panel=_HOSTS, help="Address of the first host; default: its name."
    ),
]
_MasterPort = Annotated[
    int, typer.Option("--master_port", rich_help_panel=_HOSTS, help="Port of the store there.")
]
_NoSsh = Annotated[
    bool,
    typer.Option("--no_ssh", rich_help_panel=_HOSTS, help="As it is here: each host is started by itself."),
]
_NoSshCheck = Annotated[
    bool, typer.Option("--no_ssh_check", hidden=True, help="As it is here: no other host is asked.")
]
_LogLevel = Annotated[str, typer.Option("--log_level", hidden=True, help="Level of what the launcher says.")]
_ForceMulti = Annotated[bool | None, _refused("force_multi", _SSH)]
_Launcher = Annotated[str | None, _refused("launcher", _SSH)]
_LauncherArgs = Annotated[str | None, _refused("launcher_args", _SSH)]
_SshPort = Annotated[int | None, _refused("ssh_port", _SSH)]
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
    hostfile: _Hostfile = None,
    include: _Include = "",
    exclude: _Exclude = "",
    num_nodes: _NumNodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    master_port: _MasterPort = _PORT,
    no_ssh: _NoSsh = False,
    no_ssh_check: _NoSshCheck = False,
    log_level: _LogLevel = "info",
    force_multi: _ForceMulti = None,
    launcher: _Launcher = None,
    launcher_args: _LauncherArgs = None,
    ssh_port: _SshPort = None,
    venv_script: _VenvScript = None,
    min_elastic_nodes: _MinElasticNodes = None,
    max_elastic_nodes: _MaxElasticNodes = None,
    elastic_training: _ElasticTraining = None,
    autotuning: _Autotuning = None,
) -> None:
    """Run a Python script on several ranks: of this host, or this host's part of several.

    The script finds its rank as under torchrun. If one rank fails, all are stopped and its traceback is shown.
    """
    from shardwise.launch.as_deepspeed import read_env_file
    from shardwise.launch.local import RankProgram, run
    from shardwise.launch.terminal import lasting_console

    kind = _kind_of_program(is_module, is_program)
    wants_local_rank = as_deepspeed and not no_local_rank
    made = RankProgram(kind, program, tuple(arguments or ()), wants_local_rank=wants_local_rank)
    _check_level(log_level)
    if not is_program and not (ranks or hostfile or include or exclude or num_nodes):
        _check_order(program, arguments or ())
    here = _ranks_here(
        ranks, hostfile, include, exclude, num_nodes, node_rank, master_addr, master_port, as_deepspeed
    )
    cores_of = _cores_of_ranks(core_list, here.local) if binds_cores or core_list else ()
    is_quiet = is_quiet or log_level.lower() in ("warning", "error", "critical")
    if not is_quiet and not here.is_one_host:
        _say_where(lasting_console(stderr=True), here)
    exports = read_env_file() if as_deepspeed else {}
    with _file_of_pids() if saves_pids else nullcontext() as says:
        code = run(made, here, logs, cores_of=cores_of, exports=exports, says=says, as_deepspeed=as_deepspeed)
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


def _ranks_here(
    ranks: int | None,
    hostfile: Path | None,
    include: str,
    exclude: str,
    num_nodes: int | None,
    node_rank: int | None,
    address: str | None,
    port: int,
    counts_devices: bool,
) -> "HostRanks":
    """Return the ranks that this host starts."""
    from shardwise.launch.hosts import HERE, Host, HostRanks, choose, ranks_here, read_hostfile, slots_named

    if not 0 <= port <= _LAST_PORT:
        raise UsageError(f"launch: --master_port {port}; expected a port from 0 to {_LAST_PORT}")
    if (include or exclude) and (ranks is not None or num_nodes is not None):
        raise UsageError(
            "launch: --include and --exclude say which slots take ranks; leave out --ranks and --num_nodes beside them"
        )
    if num_nodes is not None and num_nodes < 1:
        raise UsageError(f"launch: --num_nodes {num_nodes}; at least 1 is needed")
    if hostfile is not None:
        hosts = choose(read_hostfile(hostfile), include, exclude)
        if num_nodes is not None and num_nodes > len(hosts):
            raise UsageError(
                f"launch: --num_nodes {num_nodes}, and {hostfile} has {counted(len(hosts), 'host')}"
            )
        hosts = hosts[:num_nodes]
        for host in hosts:
            if ranks is not None and not 1 <= ranks <= len(host.slots):
                raise UsageError(
                    f"launch: --ranks {ranks}, and {host.name} has {counted(len(host.slots), 'slot')}"
                )
        return ranks_here([Host(h.name, h.slots[:ranks]) for h in hosts], node_rank, address, port)
    if include or exclude:
        slots = slots_named(include) if include else []
        count = max(slots) + 1 if slots else _devices()
        return ranks_here(
            choose([Host(HERE, tuple(range(count)))], include, exclude), node_rank, address, port
        )
    if ranks is None:
        ranks = _devices() if counts_devices else 1
    if num_nodes is None or num_nodes == 1:
        if node_rank:
            raise UsageError(f"launch: --node_rank {node_rank} of 1 host; give --num_nodes or a --hostfile")
        return HostRanks(ranks, ranks)
    if address is None:
        raise UsageError(
            "launch: several hosts need --master_addr, the first host's address in their network"
        )
    hosts = [Host(f"host {number}", tuple(range(ranks))) for number in range(num_nodes)]
    return ranks_here(hosts, node_rank, address, port)._replace(slots=None)


def _cores_of_ranks(core_list: str | None, ranks: int) -> Sequence[Sequence[int]]:
    """Return the cores that each of ``ranks`` ranks binds itself to.

    Args:
        core_list: The cores to share out; None: the cores of this process.
        ranks: Number of ranks on this host.

    Raises:
        UsageError: if this system does not bind processes to cores, or this process may not use one of the cores.
    """
    from shardwise.launch.hosts import parse_cores, shares

    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("launch: --bind_cores_to_rank: this system does not bind processes to cores")
    mine = sorted(os.sched_getaffinity(0))
    wanted = parse_cores(core_list) if core_list else mine
    if set(wanted) - set(mine):
        raise UsageError(f"launch: --bind_core_list {core_list}: this process may use the cores {mine}")
    return shares(wanted, ranks)


def _devices() -> int:
    """Return the number of accelerators of this host; 1 if there is none."""
    import torch

    return max(torch.accelerator.device_count(), 1)


def _check_level(name: str) -> None:
    known = logging.getLevelNamesMapping()
    if name.upper() not in known:
        raise UsageError(f"launch: --log_level {name!r}; expected debug, info, warning, error or critical")


def _say_where(console: "Console", here: "HostRanks") -> None:
    last = here.first + here.local - 1
    console.print(
        f"ranks {here.first} to {last} of {here.world} on this host; they meet at {here.address}:{here.port}, reached "
        f"by interface {here.interface or 'that the system chooses'}",
        highlight=False,
        soft_wrap=True,
    )


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
