"""``--launcher ray``: the agent of each host by an actor of Ray on that node.

    placement group   one bundle a node: a processor for each rank (and an accelerator, if the node has some)
    actor             starts the agent as a process of its own, and copies its standard streams
    address           that of the first actor's own node, and not that of Ray's head, on which no rank may run

``shardwise launch --launcher ray --ranks 4 --num_nodes 2`` runs on a machine of the cluster, as ``ray job submit``
does; ``--launcher_args "--address HOST:6379"`` names another cluster than the running one. A hostfile names nodes by
the addresses that ``ray status -v`` shows. More ranks than a node has processors or accelerators are refused before
anything starts, where Ray itself would wait. If this process ends, Ray ends its actors, and with them the agents'
connections. Ray keeps the command line of this process, which must be text in UTF-8, and shows it in its dashboard.

Ray is an extra of the project, ``ray``, or ``pip install ray``.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, Any

from shardwise.base.errors import ConfigError, UsageError
from shardwise.launch.backends.protocol import LauncherArguments, agent_command
from shardwise.launch.hosts import Host
from shardwise.launch.link import AgentProcess

_PLACE_S = 10.0
"""Seconds for Ray to place the group, whose resources are known to be there unless another job has taken them."""
_CHUNK_BYTES = 1 << 16
_OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Beginnings of the names of variables that Ray sets for an actor, and that ranks do not inherit."""


class AgentActor:
    """The part of the back end that runs on a node, as an actor of Ray."""

    def __init__(self, command: Sequence[str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=kept)

    def write(self, data: bytes) -> None:
        """Write bytes to the agent's standard input; no bytes close it."""
        stdin = self._process.stdin
        assert stdin is not None, "the agent is started with pipes"
        with contextlib.suppress(OSError, ValueError):  # the agent has ended
            if data:
                stdin.write(data)
                stdin.flush()
            else:
                stdin.close()

    def read(self, number: int) -> bytes:
        """Wait for bytes of the agent's standard output (1) or standard error (2); none at the end."""
        stream = self._process.stdout if number == 1 else self._process.stderr
        assert stream is not None, "the agent is started with pipes"
        return os.read(stream.fileno(), _CHUNK_BYTES)


class ActorProcess:
    """The streams of an agent that an actor has started, as pipes of this process.

    Args:
        actor: Handle of the actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._readers = [threading.Thread(target=self._copy_out, args=(n,), daemon=True) for n in (1, 2)]
        source, sink = os.pipe()
        self._source = source
        self.stdin: IO[bytes] | None = os.fdopen(sink, "wb", buffering=0)
        outputs = [os.pipe(), os.pipe()]
        self._sinks = [sink for _, sink in outputs]
        self.stdout: IO[bytes] | None = os.fdopen(outputs[0][0], "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(outputs[1][0], "rb")
        for thread in (*self._readers, threading.Thread(target=self._copy_in, daemon=True)):
            thread.start()

    def _copy_in(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray has many errors for an actor that is gone
            data = b"x"
            while data:
                data = os.read(self._source, _CHUNK_BYTES)
                ray.get(self._actor.write.remote(data))
        os.close(self._source)

    def _copy_out(self, number: int) -> None:
        import ray

        sink = self._sinks[number - 1]
        try:
            while data := ray.get(self._actor.read.remote(number)):
                while data:
                    data = data[os.write(sink, data) :]
        except Exception as error:  # Ray has many errors for an actor that is gone
            with contextlib.suppress(OSError):
                os.write(self._sinks[1], f"ray: {type(error).__name__}: {str(error)[:500]}\n".encode())
        finally:
            if number == 1:
                os.close(sink)
            else:
                self._readers[0].join()
                os.close(sink)

    def poll(self) -> int | None:
        """Return 0 after the agent's output has ended, and None before."""
        return None if any(thread.is_alive() for thread in self._readers) else 0

    def kill(self) -> None:
        """End the actor, and with it the agent's connection."""
        import ray

        ray.kill(self._actor)


class RayLauncher:
    """The back end that starts agents by actors.

    Args:
        arguments: ``--address HOST:PORT`` of the cluster.
    """

    name = "ray"
    ends_unreached = True

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        parser = LauncherArguments()
        parser.add_argument("--address", default="auto")
        self._address = parser.parse_args(list(arguments)).address

    def check(self) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: if Ray is not installed or no cluster answers.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "launch: --launcher ray needs Ray, which is not installed: pip install ray"
            ) from None
        path = os.environ.get("PYTHONPATH")
        variables = {"env_vars": {"PYTHONPATH": path}} if path else {}
        if ray.is_initialized():
            return
        try:
            ray.init(self._address, runtime_env=variables, logging_level="ERROR", log_to_driver=False)
        except UnicodeEncodeError:
            raise UsageError(
                "launch: Ray takes no command with arguments that are not text in UTF-8; write them to a file"
            ) from None
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"launch: no cluster of Ray answers at {self._address}: {str(error).splitlines()[0]}; start one with "
                "`ray start --head`, or give --launcher_args '--address HOST:PORT'"
            ) from None

    def _nodes(self) -> dict[str, dict[str, float]]:
        """Return the resources of the nodes that are alive, by address."""
        self.check()
        import ray

        alive = (node for node in ray.nodes() if node["Alive"])
        return {node["NodeManagerAddress"]: node["Resources"] for node in alive}

    def hosts_here(self, ranks: int | None, count: int | None) -> list[Host]:
        """Return nodes of the cluster.

        Args:
            ranks: Number of ranks on each node; None: its accelerators, else its processors.
            count: Number of nodes; None: all.

        Raises:
            UsageError: if the cluster has fewer nodes.
        """
        nodes = self._nodes()
        if count is not None and count > len(nodes):
            raise UsageError(
                f"launch: --num_nodes {count}, and the cluster has {len(nodes)} nodes: asked {count}, have {len(nodes)}"
            )
        return [Host(name, tuple(range(ranks or _places(nodes[name])))) for name in sorted(nodes)][:count]

    def start(self, hosts: Sequence[Host]) -> list[AgentProcess]:
        """Place one actor on each node and start its agent.

        Raises:
            UsageError: if a node is not there, or has fewer places than ranks are asked for.
            ConfigError: if other jobs have taken the places.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = self._nodes()
        for host in hosts:
            if host.name not in nodes:
                raise UsageError(
                    f"launch: the cluster has no node {host.name}; it has {', '.join(sorted(nodes))}"
                )
            if len(host.slots) > _places(nodes[host.name]):
                raise UsageError(
                    f"launch: {len(host.slots)} ranks on {host.name}: asked {len(host.slots)}, have "
                    f"{_places(nodes[host.name])}"
                )
        bundles = [_needs(len(host.slots), nodes[host.name]) | {f"node:{host.name}": 0.001} for host in hosts]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not group.wait(_PLACE_S):
            remove_placement_group(group)
            raise ConfigError(
                f"launch: Ray has no room for {bundles} within {_PLACE_S:.0f} s: other jobs hold it"
            )
        actor = ray.remote(AgentActor)
        started: list[AgentProcess] = []
        for number, needs in enumerate(bundles):
            placed = actor.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            )
            started.append(ActorProcess(placed.remote(agent_command())))
        return started

    def trial(self, host: Host) -> str:
        """Return the command that shows the nodes."""
        return "ray status -v"

    def render(self, hosts: Sequence[Host]) -> str:
        """Return the bundles of the placement group, one line a node."""
        return "\n".join(f"# actor on {host.name}: {' '.join(agent_command())}" for host in hosts)


def _places(resources: dict[str, float]) -> int:
    """Return the number of ranks for which a node has room: its accelerators if it has some, else its processors."""
    return int(resources.get("GPU", 0)) or int(resources.get("CPU", 0))


def _needs(ranks: int, resources: dict[str, float]) -> dict[str, float]:
    """Return the resources that ``ranks`` ranks take on a node."""
    needs = {"CPU": float(min(ranks, int(resources.get("CPU", 0))))}
    return needs | ({"GPU": float(ranks)} if resources.get("GPU") else {})
