"""``--launcher slurm``: the agent of each host by ``srun`` inside an allocation.

    srun [--launcher_args] --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist=HOST AGENT

The hosts are those of the allocation (``SLURM_JOB_NODELIST``), with ``--ranks`` ranks each, or as many as the
allocation has tasks there (``SLURM_TASKS_PER_NODE``). ``--render`` prints a batch script instead, which runs this
launcher on the first host of its allocation. SLURM asks for a stop two minutes before the limit
(``--signal=TERM@120``): the agents pass SIGTERM on to their ranks, which save, and the job exits with 143 and is
queued again (``--requeue``).
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from shardwise.base.errors import ConfigError, UsageError
from shardwise.launch.backends.protocol import CommandLauncher
from shardwise.launch.hosts import SLOT_LIMIT, Host

_NODES = "SLURM_JOB_NODELIST"
_TASKS = "SLURM_TASKS_PER_NODE"
_SCONTROL_S = 10.0
_WARNING_S = 120
"""Seconds before the time limit at which SLURM asks the job to stop."""


class SlurmLauncher(CommandLauncher):
    """The back end that starts agents by ``srun``.

    Args:
        arguments: Additional arguments of srun.
        environment: Environment of this process.
    """

    name = "slurm"
    program = "srun"
    package = "slurm-client"

    def __init__(self, arguments: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> None:
        super().__init__(arguments)
        self._environment = environment

    def check(self) -> None:
        """Check that srun is installed and that this process runs in an allocation.

        Raises:
            ConfigError: if srun is not installed.
            UsageError: if there is no allocation.
        """
        super().check()
        if _NODES not in self._environment:
            raise UsageError(
                "launch: --launcher slurm runs inside an allocation of SLURM, and this process is in none; call it in "
                "a batch script or under salloc, or print a batch script with --render"
            )

    def hosts_here(self, ranks: int | None, count: int | None) -> list[Host]:
        """Return the hosts of the allocation.

        Args:
            ranks: Number of ranks on each host; None: the allocation's tasks.
            count: Number of hosts; None: all.

        Raises:
            UsageError: if there is no allocation, or it has fewer hosts.
            ConfigError: if scontrol does not answer.
        """
        self.check()
        names = _hostnames(self._environment[_NODES])
        if count is not None and count > len(names):
            raise UsageError(
                f"launch: --num_nodes {count}, and the allocation has {len(names)}: asked {count}, have {len(names)}"
            )
        tasks = tasks_per_node(self._environment.get(_TASKS, "1"), len(names))
        sizes = tasks if ranks is None else [ranks] * len(names)
        return [Host(name, tuple(range(size))) for name, size in zip(names, sizes, strict=True)][:count]

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """Return the srun command that runs ``agent`` once on a host."""
        place = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", f"--nodelist={host.name}"]
        return ["srun", *self.arguments, *place, *agent]


def tasks_per_node(text: str, nodes: int) -> list[int]:
    """Return the tasks on each node that ``2(x3),1`` names: [2, 2, 2, 1].

    Args:
        text: Value of ``SLURM_TASKS_PER_NODE``.
        nodes: Number of nodes.

    Raises:
        ConfigError: if the text is none that SLURM writes, or does not fit the number of nodes.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None or not 1 <= int(match[1]) <= SLOT_LIMIT:
            raise ConfigError(f"launch: {_TASKS}={text!r}: expected counts such as 2(x3),1; give --ranks")
        found += [int(match[1])] * int(match[2] or 1)
    if len(found) != nodes:
        raise ConfigError(
            f"launch: {_TASKS}={text!r} is of {len(found)} nodes, and {_NODES} of {nodes}; give --ranks"
        )
    return found


def _hostnames(nodes: str) -> list[str]:
    """Return the names in a node list such as ``gpu[1-3],cpu1``."""
    if shutil.which("scontrol") is None:
        raise ConfigError("launch: --launcher slurm needs the program scontrol, which is not installed here")
    try:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_SCONTROL_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"launch: scontrol does not answer within {_SCONTROL_S:.0f} s") from None
    if found.returncode or not found.stdout.split():
        raise ConfigError(f"launch: scontrol show hostnames {nodes!r} fails: {found.stderr.strip()}")
    return found.stdout.split()


def batch_script(command: Sequence[str], nodes: int, ranks: int) -> str:
    """Return a batch script that runs this launcher on the first host of its allocation.

    Args:
        command: The ``shardwise`` command that the script runs.
        nodes: Number of hosts.
        ranks: Number of ranks on each host.
    """
    options = [
        f"--nodes={nodes}",
        f"--ntasks-per-node={ranks}",
        f"--signal=TERM@{_WARNING_S}",
        "--requeue",
        "--open-mode=append",
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options)]
    return "\n".join([*lines, f"exec {shlex.join(command)}"])
