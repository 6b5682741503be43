"""The interface of a back end: how the agent of each host is started.

A back end starts ``python -m shardwise.launch.agent`` once on each host and connects its standard streams with this
process. Everything else is the same for all back ends: the order, the address, failures, signals and the end
(``cluster.py``). Most back ends start one program for each host, such as ``ssh HOST``; these derive from
:class:`CommandLauncher`.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.words import in_words
from shardwise.launch.hosts import Host
from shardwise.launch.link import AgentProcess

AGENT = "shardwise.launch.agent"


class Launcher(Protocol):
    """A back end that starts an agent on each host."""

    name: str
    ends_unreached: bool
    """True if the program of the back end ends when it does not reach its host."""

    def check(self) -> None:
        """Check that the back end can be used here.

        Raises:
            ConfigError: if its program is not installed.
            UsageError: if it needs a place to run that this is not.
        """

    def start(self, hosts: Sequence[Host]) -> Sequence[AgentProcess]:
        """Start the agents and return them, by host."""

    def trial(self, host: Host) -> str:
        """Return the command by which a user can try to reach a host."""

    def hosts_here(self, ranks: int | None, count: int | None) -> Sequence[Host]:
        """Return the hosts that the back end has without a hostfile.

        Args:
            ranks: Number of ranks on each host; None: as many as the host has places.
            count: Number of hosts; None: all.

        Raises:
            UsageError: if the back end has no hosts of its own.
        """

    def render(self, hosts: Sequence[Host]) -> str:
        """Return what :meth:`start` would start, as text; it contains no secret."""


class CommandLauncher(ABC):
    """A back end that reaches each host by one program of its own.

    Args:
        arguments: Additional arguments of that program (``--launcher_args``).
    """

    name = ""
    program = ""
    """Program that reaches a host."""
    package = ""
    """Package of Debian that contains the program."""
    ends_unreached = True
    """True if the program ends when it does not reach its host."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = tuple(arguments)

    @abstractmethod
    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """Return the command that runs ``agent`` on a host, with the standard streams of the command."""

    def check(self) -> None:
        """Raise ConfigError if the program is not installed."""
        if shutil.which(self.program) is None:
            raise ConfigError(
                f"launch: --launcher {self.name} needs the program {self.program}, which is not installed here "
                f"(Debian: {self.package})"
            )

    def start(self, hosts: Sequence[Host]) -> list[AgentProcess]:
        """Start the agents, each program in a session of its own, so that Ctrl-C reaches the launcher alone.

        Raises:
            ConfigError: if a program cannot be started.
        """
        started: list[AgentProcess] = []
        try:
            for host in hosts:
                started.append(
                    subprocess.Popen(
                        self.command(host, agent_command()),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        start_new_session=True,
                    )
                )
        except OSError as error:
            for each in started:
                each.kill()
            raise ConfigError(f"launch: {self.program} cannot be started: {in_words(error)}") from None
        return started

    def hosts_here(self, ranks: int | None, count: int | None) -> Sequence[Host]:
        """Raise UsageError: ssh and mpirun reach the hosts that they are given."""
        raise UsageError(
            f"launch: --launcher {self.name} needs --hostfile, a file with a line `HOST slots=N` per host"
        )

    def trial(self, host: Host) -> str:
        """Return the command by which a user can try to reach a host."""
        return shlex.join(self.command(host, ["true"]))

    def render(self, hosts: Sequence[Host]) -> str:
        """Return one command a host; the order goes to its standard input."""
        return "\n".join(shlex.join(self.command(host, agent_command())) for host in hosts)


class LauncherArguments(argparse.ArgumentParser):
    """The parser of ``--launcher_args`` for a back end whose words are Shardwise's own."""

    def __init__(self) -> None:
        super().__init__(prog="--launcher_args", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError: argparse itself would end the process."""
        raise UsageError(f"launch: --launcher_args: {message}")


def agent_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of an agent: this Python, which every host has at the same place, and its modules' path.

    ``-P`` keeps Python from importing modules of the folder in which the agent is started, which is the home folder
    under ssh.
    """
    path = environment.get("PYTHONPATH", "")
    search = ["env", f"PYTHONPATH={path}"] if path else []
    return [*search, sys.executable, "-P", "-m", AGENT]
