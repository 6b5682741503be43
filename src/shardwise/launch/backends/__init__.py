"""Back ends of ``shardwise launch --launcher NAME``: programs that start the agent of each host.

    ssh, pdsh                    ssh.py          ``ssh HOST``
    mpi, openmpi, mpich, impi    mpi.py          ``mpirun`` with one process on the host
    slurm                        slurm.py        ``srun`` inside an allocation
    ray                          ray.py          an actor on each node
    torchrun                     torchrun.py     torch's own agent, for this host's part alone
    kubernetes                   kubernetes.py   a manifest, printed

The last two start no agent of ours.
"""

from collections.abc import Sequence

from shardwise.launch.backends.mpi import MpiLauncher
from shardwise.launch.backends.protocol import Launcher
from shardwise.launch.backends.ray import RayLauncher
from shardwise.launch.backends.slurm import SlurmLauncher
from shardwise.launch.backends.ssh import SshLauncher

AGENTLESS = ("torchrun", "kubernetes")
"""Back ends that start no agent of ours on other hosts."""
LAUNCHERS = ("ssh", "pdsh", "mpi", "openmpi", "mpich", "impi", "slurm", "ray", *AGENTLESS)
"""Values of ``--launcher``."""


def launcher_of(name: str, arguments: Sequence[str] = (), ssh_port: int | None = None) -> Launcher:
    """Return the back end of a name.

    Args:
        name: One of ``LAUNCHERS`` that starts agents.
        arguments: Additional arguments of its program.
        ssh_port: Port of the hosts' ssh servers.
    """
    if name in ("ssh", "pdsh"):
        return SshLauncher(arguments, ssh_port)
    if name == "slurm":
        return SlurmLauncher(arguments)
    if name == "ray":
        return RayLauncher(arguments)
    return MpiLauncher(arguments, name)
