"""``--launcher mpi``, ``openmpi``, ``mpich`` and ``impi``: the agent of each host by ``mpirun``.

    Open MPI      mpirun --bind-to none -np 1 --host HOST AGENT
    MPICH         mpiexec.hydra -localhost OWN_ADDRESS -n 1 -hosts HOST AGENT
    Intel MPI     the same, with I_MPI_PIN=0

One mpirun reaches one host and starts one process there, the agent; the ranks are the agent's and use no MPI. So each
host has standard streams of its own, a host that is lost is known by name, and neither library can bind all ranks of a
host to one core. MPICH's processes connect to the launcher's host by its name, which may resolve nowhere; so they get
the address from which this host reaches theirs. ``mpi`` takes whatever MPI the program ``mpirun`` belongs to.
"""

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.address import own_address
from shardwise.launch.backends.protocol import CommandLauncher
from shardwise.launch.hosts import Host
from shardwise.launch.link import AgentProcess

_PROGRAMS = {
    "openmpi": ("mpirun.openmpi", "mpirun"),
    "mpich": ("mpirun.mpich", "mpiexec.hydra", "mpirun"),
    "impi": ("mpiexec.hydra", "mpirun"),
}
"""Programs of each MPI, in the order in which they are looked for."""
_PACKAGES = {"openmpi": "openmpi-bin", "mpich": "mpich", "impi": "none; Intel's oneAPI has it"}
_VERSION_S = 10.0


class MpiLauncher(CommandLauncher):
    """The back end that starts agents by ``mpirun``.

    Args:
        arguments: Additional arguments of mpirun.
        kind: "openmpi", "mpich", "impi", or "mpi" for the MPI of ``mpirun``.
    """

    def __init__(self, arguments: Sequence[str] = (), kind: str = "mpi") -> None:
        super().__init__(arguments)
        self.name = kind
        self.kind = _kind_of_mpirun() if kind == "mpi" else kind
        self.ends_unreached = (
            self.kind == "openmpi"
        )  # the others wait for a process that their ssh has not started
        programs = _PROGRAMS[self.kind]
        self.program = next((name for name in programs if shutil.which(name)), programs[-1])
        self.package = _PACKAGES[self.kind]
        self._sessions: str | None = None
        """Folder for the files of running Open MPIs on this host; None until one is started."""

    def start(self, hosts: Sequence[Host]) -> list[AgentProcess]:
        """Start the agents; every mpirun of Open MPI gets a folder of its own for its files.

        Two that start at once in one folder of sessions fail, because each makes what the other is about to make.

        Raises:
            ConfigError: if a program cannot be started.
        """
        if self.kind == "openmpi":
            self._sessions = tempfile.mkdtemp(prefix="shardwise_mpi_")
            weakref.finalize(self, shutil.rmtree, self._sessions, True)
        return super().start(hosts)

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """Return the mpirun command that runs ``agent`` once on a host."""
        if self.kind == "openmpi":
            place = ["--bind-to", "none", "-np", "1", "--host", host.name]
            if self._sessions is not None:
                place = ["--mca", "orte_local_tmpdir_base", os.path.join(self._sessions, host.name), *place]
        else:
            place = [*_own_name(host), "-n", "1", "-hosts", host.name]
            if self.kind == "impi":
                place = ["-genv", "I_MPI_PIN", "0", *place]
        return [self.program, *self.arguments, *place, *agent]


def _own_name(host: Host) -> list[str]:
    """Return the option that gives the other host this host's address; none if the other host's name is an alias."""
    try:
        return ["-localhost", own_address(host.name)]
    except ConfigError:
        return []


def _kind_of_mpirun() -> str:
    """Return the MPI to which the program ``mpirun`` belongs; "openmpi" if there is no such program.

    Raises:
        ConfigError: if the program does not say.
    """
    if shutil.which("mpirun") is None:
        return "openmpi"
    try:
        found = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"launch: `mpirun --version` fails: {error}") from None
    for mark, kind in (("Open MPI", "openmpi"), ("Intel", "impi"), ("HYDRA", "mpich")):
        if mark in found.stdout:
            return kind
    raise ConfigError(
        "launch: `mpirun --version` names neither Open MPI, MPICH nor Intel MPI; give --launcher openmpi, mpich or impi"
    )
