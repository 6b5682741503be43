"""``--launcher torchrun``: this host's part of a job by torch's own agent, with what several hosts need.

    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr ADDRESS --master-port 29500
             --local-addr 10.0.0.2 [--launcher_args] train.py

``--local-addr`` is numeric: without it torch's agents tell one another their hosts' names, which often do not resolve.
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` keeps the agents' store apart from that of the ranks, because a host that joins
a job with a number of hosts from A to B (``--launcher_args "--rdzv-backend c10d --nnodes 1:2 ..."``) otherwise waits
forever. The process becomes torchrun, so signals reach torch's agent, and torch's own reports are shown.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from shardwise.base.errors import ConfigError
from shardwise.base.words import in_words
from shardwise.comm.rendezvous.address import own_address
from shardwise.launch.hosts import HostRanks, visible_devices
from shardwise.launch.local import RankProgram

SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable that keeps the store of torch's agents apart from that of the ranks."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


def torchrun_command(
    program: RankProgram, here: HostRanks, nodes: int, node: int, arguments: Sequence[str] = ()
) -> list[str]:
    """Return the command of torch's agent on this host.

    Args:
        program: Program of every rank.
        here: Position of this host's ranks in the job.
        nodes: Number of hosts.
        node: Number of this host.
        arguments: Additional arguments of torchrun.

    Raises:
        ConfigError: if there is no way to the first host.
    """
    place = ["--standalone"]
    if nodes > 1:
        place = [f"--nnodes={nodes}", f"--node-rank={node}", f"--local-addr={own_address(here.address)}"]
        place += [f"--master-addr={here.address}", f"--master-port={here.port}"]
    kind = {"script": [], "module": ["--module"], "program": ["--no-python"]}[program.kind]
    agent = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={here.local}"]
    return [*agent, *arguments, *kind, program.name, *program.arguments]


def torchrun_environment(
    here: HostRanks, variables: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of torch's agent, which its ranks inherit.

    Args:
        here: Position of this host's ranks in the job.
        variables: Variables that every rank gets.
        environment: Environment of this process.
    """
    found = dict(environment) | {SEPARATE_STORE: "1"} | dict(variables)
    if here.slots is not None:
        found[_DEVICES] = visible_devices(here.slots, found.get(_DEVICES))
    return found


def become_torchrun(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by torch's agent.

    Raises:
        ConfigError: if it cannot be started.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        os.execve(command[0], list(command), dict(environment))
    except OSError as error:
        raise ConfigError(f"launch: torchrun cannot be started: {in_words(error)}") from None
