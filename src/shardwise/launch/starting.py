"""From the options of ``shardwise launch`` and ``shardwise train`` about hosts to a running job.

    no option of hosts              ranks on this host                                            local.py
    --node_rank N                   this host's part of a job that the user starts on each host   local.py
    --launcher NAME                 an agent on every host, from here                             cluster.py
    --hostfile with several hosts   the same, by ssh
    --launcher torchrun             this host's part, by torch's agent                            backends/torchrun.py
    --render                        print what would be started

Options that contradict one another are refused before anything starts.
"""

import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from shardwise.base.errors import UsageError
from shardwise.base.words import counted
from shardwise.launch.backends import AGENTLESS, LAUNCHERS, launcher_of
from shardwise.launch.backends.kubernetes import manifest, manifest_options
from shardwise.launch.backends.slurm import batch_script
from shardwise.launch.backends.torchrun import (
    SEPARATE_STORE,
    become_torchrun,
    torchrun_command,
    torchrun_environment,
)
from shardwise.launch.cluster import ClusterJob, run_on_hosts
from shardwise.launch.environment import SECRET
from shardwise.launch.hosts import (
    HERE,
    RANK_LIMIT,
    Host,
    HostRanks,
    choose,
    cores_of_ranks,
    ranks_here,
    read_hostfile,
    slots_named,
)
from shardwise.launch.local import RankProgram, check_ranks, check_script, run
from shardwise.launch.messages import AgentOrder
from shardwise.launch.terminal import lasting_console

_PORT = 29500
_LAST_PORT = 65535
_PASSED_ON = ("NCCL_", "PYTHON", "UCX_")
"""Beginnings of the names of variables that every rank gets without ``--export``, as from DeepSpeed's launcher."""


class HostChoice(NamedTuple):
    """The options that say on which hosts a job runs, and how it gets there."""

    ranks: int | None = None
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    launcher: str | None = None
    launcher_args: str = ""
    ssh_port: int | None = None
    exports: tuple[str, ...] = ()
    """``NAME`` or ``NAME=VALUE``."""
    stays_here: bool = False
    """True for ``--no_ssh``: nothing is started on other hosts."""
    leaves_here: bool = False
    """True for ``--force_multi``: one host is reached by the back end, too."""
    renders: bool = False

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        named: dict[str, object] = {
            "--ranks": self.ranks,
            "--hostfile": self.hostfile,
            "--include": self.include,
            "--exclude": self.exclude,
            "--num_nodes": self.num_nodes,
            "--node_rank": self.node_rank,
            "--master_addr": self.address,
            "--master_port": self.port,
            "--launcher": self.launcher,
            "--launcher_args": self.launcher_args,
            "--ssh_port": self.ssh_port,
        }
        words = [
            word for name, value in named.items() if value not in (None, "") for word in (name, str(value))
        ]
        # A value may be a secret, which is not repeated.
        words += [word for each in self.exports for word in ("--export", each.partition("=")[0])]
        flags = {"--no_ssh": self.stays_here, "--force_multi": self.leaves_here}
        return words + [name for name, is_set in flags.items() if is_set]

    def names_hosts(self) -> bool:
        """Return True if any option beside ``--ranks`` and ``--export`` is given."""
        return self._replace(ranks=None, exports=()) != HostChoice()


class RankOptions(NamedTuple):
    """The options that hold for the ranks of every host alike."""

    logs: Path | None = None
    as_deepspeed: bool = False
    binds_cores: bool = False
    core_list: str | None = None
    is_quiet: bool = False
    says: Callable[[Sequence[int]], None] | None = None
    """Function that is called with the process numbers of this host's ranks."""
    words: tuple[str, ...] = ()
    """Words after ``shardwise`` that start the job again, without options of hosts; empty: those of ``launch``."""

    def repeated(self, program: RankProgram, of_hosts: Sequence[str]) -> list[str]:
        """Return the words after ``shardwise`` that start a program again.

        Args:
            program: The program.
            of_hosts: Options of hosts.
        """
        if self.words:
            return [*self.words, *of_hosts]
        named = {"--logs": self.logs, "--bind_core_list": self.core_list}
        words = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        flags = {"--as-deepspeed": self.as_deepspeed, "--bind_cores_to_rank": self.binds_cores}
        words += [name for name, is_set in flags.items() if is_set]
        return ["launch", *of_hosts, *words, *program.words()]


class JobPlace(NamedTuple):
    """Hosts of a job, before it is known which of them starts what."""

    hosts: Sequence[Host]
    hides_devices: bool
    """True if slots stand for accelerators, of which a rank sees its own alone."""
    launcher: str | None
    """Back end that starts the agents; None: ranks are started on this host alone."""

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return sum(len(host.slots) for host in self.hosts)


def place_of(choice: HostChoice, counts_devices: bool) -> JobPlace:
    """Return the hosts and slots of a job.

    Args:
        choice: The options.
        counts_devices: Without a number of ranks, start one for each accelerator of this host.

    Raises:
        UsageError: if options contradict one another, or ask for more ranks than there are slots.
        ConfigError: if the hostfile is wrong; the message names the line.
    """
    _check(choice)
    name = choice.launcher
    if name == "slurm" and choice.renders:
        count, ranks = choice.num_nodes or 1, choice.ranks or 1
        return JobPlace([Host(f"host {number}", tuple(range(ranks))) for number in range(count)], False, name)
    if choice.hostfile is not None:
        hosts = _from_hostfile(choice, choice.hostfile)
        if name is None and choice.leaves_here:
            name = "ssh"
        if name is None and len(hosts) > 1 and choice.node_rank is None and not choice.stays_here:
            name = "ssh"
        return JobPlace(hosts, True, name)
    if name is not None and name not in AGENTLESS:
        found = launcher_of(name, _words(choice.launcher_args)).hosts_here(choice.ranks, choice.num_nodes)
        return JobPlace(choose(found, choice.include, choice.exclude), False, name)
    if choice.include or choice.exclude:
        slots = slots_named(choice.include) if choice.include else []
        count = max(slots) + 1 if slots else _devices()
        return JobPlace(choose([Host(HERE, tuple(range(count)))], choice.include, choice.exclude), True, name)
    ranks = choice.ranks or (_devices() if counts_devices and choice.ranks is None else 1)
    if choice.ranks is not None:
        check_ranks(choice.ranks)
    count = choice.num_nodes or 1
    if count == 1:
        if choice.node_rank:
            raise UsageError(
                f"launch: --node_rank {choice.node_rank} of 1 host; give --num_nodes or a --hostfile"
            )
    elif choice.address is None and name != "kubernetes":
        raise UsageError(
            "launch: several hosts need --master_addr, the first host's address in their network"
        )
    if count * ranks > RANK_LIMIT:
        raise UsageError(
            f"launch: --num_nodes {count} with {ranks} ranks each; at most {RANK_LIMIT} ranks are started"
        )
    return JobPlace([Host(f"host {number}", tuple(range(ranks))) for number in range(count)], False, name)


def _check(choice: HostChoice) -> None:
    """Raise UsageError if options contradict one another."""
    if choice.port is not None and not 0 <= choice.port <= _LAST_PORT:
        raise UsageError(f"launch: --master_port {choice.port}; expected a port from 0 to {_LAST_PORT}")
    if (choice.include or choice.exclude) and (choice.ranks is not None or choice.num_nodes is not None):
        raise UsageError(
            "launch: --include and --exclude say which slots take ranks; leave out --ranks and --num_nodes beside them"
        )
    if choice.num_nodes is not None and choice.num_nodes < 1:
        raise UsageError(f"launch: --num_nodes {choice.num_nodes}; at least 1 is needed")
    if choice.launcher is not None and choice.launcher not in LAUNCHERS:
        raise UsageError(f"launch: --launcher {choice.launcher!r}; expected one of {', '.join(LAUNCHERS)}")
    if choice.stays_here and (choice.launcher or choice.leaves_here):
        raise UsageError(
            "launch: --no_ssh starts nothing on other hosts; leave out --launcher and --force_multi"
        )
    starts_agents = choice.launcher is not None and choice.launcher not in AGENTLESS
    if starts_agents and choice.node_rank is not None:
        raise UsageError(
            f"launch: --launcher {choice.launcher} starts all hosts from here; leave out --node_rank, or --launcher"
        )
    if choice.leaves_here and choice.hostfile is None:
        raise UsageError("launch: --force_multi reaches the hosts of a hostfile; give --hostfile")
    if choice.renders and choice.launcher is None and choice.hostfile is None:
        raise UsageError(
            f"launch: --render prints what a back end starts; give --launcher, one of {', '.join(LAUNCHERS)}"
        )


def _from_hostfile(choice: HostChoice, hostfile: Path) -> list[Host]:
    hosts = choose(read_hostfile(hostfile), choice.include, choice.exclude)
    if choice.num_nodes is not None and choice.num_nodes > len(hosts):
        raise UsageError(
            f"launch: --num_nodes {choice.num_nodes}, and {hostfile} has {counted(len(hosts), 'host')}: asked "
            f"{choice.num_nodes}, have {len(hosts)}"
        )
    hosts = hosts[: choice.num_nodes]
    for host in hosts:
        if choice.ranks is not None and not 1 <= choice.ranks <= len(host.slots):
            raise UsageError(
                f"launch: --ranks {choice.ranks}, and {host.name} has {counted(len(host.slots), 'slot')}: asked "
                f"{choice.ranks}, have {len(host.slots)}"
            )
    return [Host(host.name, host.slots[: choice.ranks]) for host in hosts]


def _devices() -> int:
    """Return the number of accelerators of this host; 1 if there is none."""
    import torch

    return max(torch.accelerator.device_count(), 1)


def exported(
    choice: HostChoice, passes_on: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that every rank gets.

    Args:
        choice: The options.
        passes_on: Add the variables of this process whose names begin with NCCL_, PYTHON or UCX_.
        environment: Environment of this process.

    Raises:
        UsageError: if ``--export NAME`` names a variable that is not set.
    """
    found = {n: v for n, v in environment.items() if n.startswith(_PASSED_ON)} if passes_on else {}
    for each in choice.exports:
        name, equals, value = each.partition("=")
        if not name or (not equals and name not in environment):
            raise UsageError(
                f"launch: --export {name}: the variable is not set here; set it, or give {name or 'NAME'}=VALUE"
            )
        found[name] = value if equals else environment[name]
    return found


def start(
    program: RankProgram,
    place: JobPlace,
    choice: HostChoice,
    options: RankOptions,
    exports: Mapping[str, str] | None = None,
) -> int:
    """Run a program on the ranks of a job, on this host or on several, and return the exit code.

    Args:
        program: Program of every rank.
        place: Hosts of the job (:func:`place_of`).
        choice: The options of hosts.
        options: The options of ranks.
        exports: More variables for every rank; ``--export`` overrides them.

    Raises:
        UsageError: if options contradict one another.
        ConfigError: if a host is not reached or its ranks cannot be started.
    """
    if place.launcher == "kubernetes":
        return _print_manifest(program, place, choice, options)
    variables = dict(exports or {}) | exported(choice, place.launcher is not None)
    if place.launcher is not None and place.launcher not in AGENTLESS:
        return _start_agents(program, place, choice, options, variables)
    here = ranks_here(
        place.hosts, choice.node_rank, choice.address, _PORT if choice.port is None else choice.port
    )
    if not place.hides_devices:
        here = here._replace(slots=None)
    if place.launcher == "torchrun":
        return _become_torchrun(program, here, len(place.hosts), choice, options, variables)
    cores_of = (
        cores_of_ranks(options.core_list, here.local) if options.binds_cores or options.core_list else ()
    )
    if not options.is_quiet and not here.is_one_host:
        _say_where(lasting_console(stderr=True), here)
    return run(
        program,
        here,
        options.logs,
        cores_of=cores_of,
        exports=variables,
        says=options.says,
        as_deepspeed=options.as_deepspeed,
    )


def _start_agents(
    program: RankProgram,
    place: JobPlace,
    choice: HostChoice,
    options: RankOptions,
    variables: Mapping[str, str],
) -> int:
    """Run a program by agents on all hosts, or print how they would be started."""
    assert place.launcher is not None, "the caller has chosen a back end"
    launcher = launcher_of(place.launcher, _words(choice.launcher_args), choice.ssh_port)
    console = lasting_console(stderr=True)
    if choice.renders and place.launcher == "slurm":
        words = [sys.executable, "-m", "shardwise", *options.repeated(program, choice.words())]
        print(batch_script(words, len(place.hosts), len(place.hosts[0].slots)))
        return 0
    if choice.renders:
        print("\n".join(_comments(program, place, variables)))
        print(launcher.render(place.hosts))
        return 0
    if options.says is not None:
        raise UsageError(
            f"launch: --save_pid keeps process numbers of this host; leave it out with --launcher {place.launcher}"
        )
    for host in place.hosts:
        check_ranks(len(host.slots))
    check_script(program)
    order = AgentOrder(
        HostRanks(1, 1),
        program,
        os.getcwd(),
        os.environ.get(SECRET) or secrets.token_hex(32),
        variables,
        None if options.logs is None else str(options.logs),
        options.binds_cores,
        options.core_list,
        options.as_deepspeed,
    )
    job = ClusterJob(place.hosts, order, choice.address, choice.port or 0, place.hides_devices)
    return run_on_hosts(job, launcher, console)


def _become_torchrun(
    program: RankProgram,
    here: HostRanks,
    nodes: int,
    choice: HostChoice,
    options: RankOptions,
    variables: Mapping[str, str],
) -> int:
    """Replace this process by torch's agent, or print its command."""
    if options.as_deepspeed or options.binds_cores or options.core_list or options.says is not None:
        raise UsageError(
            "launch: --as-deepspeed, --bind_cores_to_rank, --bind_core_list and --save_pid are of our own launcher; "
            "leave them out with --launcher torchrun, or leave out --launcher torchrun"
        )
    arguments = _words(choice.launcher_args)
    if options.logs is not None and not options.words:
        arguments = [f"--log-dir={options.logs}", "--redirects=3", "--tee=0:3", *arguments]
    command = torchrun_command(program, here, nodes, choice.node_rank or 0, arguments)
    if not choice.renders:
        become_torchrun(command, torchrun_environment(here, variables))
    print(f"{SEPARATE_STORE}=1 {shlex.join(command)}")
    return 0


def _print_manifest(program: RankProgram, place: JobPlace, choice: HostChoice, options: RankOptions) -> int:
    """Print the manifest of a job on Kubernetes.

    Raises:
        UsageError: without ``--render``, because nothing is started there from here.
    """
    if not choice.renders:
        raise UsageError(
            "launch: --launcher kubernetes starts nothing; give --render, and hand the manifest to kubectl apply -f -"
        )
    wanted = manifest_options(_words(choice.launcher_args))
    words = options.repeated(program, ())
    if wanted.kind == "trainjob":
        flags = {"script": [], "module": ["--module"], "program": ["--no-python"]}[program.kind]
        words = (
            ["--module", "shardwise", *words] if options.words else [*flags, program.name, *program.arguments]
        )
    names = [each.partition("=")[0] for each in choice.exports]
    print(manifest(place.hosts, words, names, wanted, _PORT if choice.port is None else choice.port), end="")
    return 0


def _words(text: str) -> list[str]:
    """Return the words of ``--launcher_args``, split as a shell splits them.

    Raises:
        UsageError: if a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"launch: --launcher_args {text!r}: {error}") from None


def _comments(program: RankProgram, place: JobPlace, variables: Mapping[str, str]) -> list[str]:
    """Return the content of the agents' orders as comments, with the names of variables but not their values."""
    said = [f"# {counted(place.world, 'rank')} on {counted(len(place.hosts), 'host')}: {_shown(program)}"]
    said += [f"# every rank gets the variables {', '.join(sorted(variables))}"] if variables else []
    return [*said, "# each agent reads its order, with the job's secret, from its standard input:"]


def _shown(program: RankProgram) -> str:
    words = [program.name, *program.arguments]
    return shlex.join({"script": ["python"], "module": ["python", "-m"], "program": []}[program.kind] + words)


def _say_where(console: Console, here: HostRanks) -> None:
    last = here.first + here.local - 1
    console.print(
        f"ranks {here.first} to {last} of {here.world} on this host; they meet at {here.address}:{here.port}, reached "
        f"by interface {here.interface or 'that the system chooses'}",
        highlight=False,
        soft_wrap=True,
    )
