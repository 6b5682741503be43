"""``--launcher ssh`` and ``pdsh``: the agent of each host by the user's own ssh, with the user's own configuration.

    ssh [--launcher_args] -T -x -o BatchMode=yes -o ConnectTimeout=8 [-p --ssh_port] HOST 'exec PYTHON -m ...'

ssh hands the last word to the login shell of the other host, so that word contains nothing of the job: it is the
agent's command alone, quoted for POSIX shells. Program, arguments, variables and secret are read by the agent from
its standard input. ssh asks for no password: keys, or an agent that holds them, are expected.

ssh takes the first value of an option, so ``--launcher_args "-o ConnectTimeout=30"`` changes the values above.
"""

import shlex
from collections.abc import Sequence

from shardwise.launch.backends.protocol import CommandLauncher
from shardwise.launch.hosts import Host

_OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")


class SshLauncher(CommandLauncher):
    """The back end that starts agents by ssh.

    Args:
        arguments: Additional arguments of ssh.
        port: Port of the hosts' ssh servers; None: that of the user's configuration.
    """

    name = "ssh"
    program = "ssh"
    package = "openssh-client"

    def __init__(self, arguments: Sequence[str] = (), port: int | None = None) -> None:
        super().__init__(arguments)
        self.port = port

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """Return the ssh command that runs ``agent`` on a host."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return ["ssh", *self.arguments, *_OPTIONS, *port, "--", host.name, f"exec {shlex.join(agent)}"]
