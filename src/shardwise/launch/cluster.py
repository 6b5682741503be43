"""A job on several hosts, started and watched from one place.

    start an agent on each host ── hello of all ── order to the first host ── its port ── orders to the others
       │── all agents end with 0 ───────────────────────────────────────────────► exit code 0
       │── a rank fails ── failures of all hosts settle ── `end` to every agent ── the first one shown ─► its exit code
       │── a host is lost ── the same
       │── Ctrl-C, SIGTERM, SIGUSR1 ── the same to every agent, whose ranks save and stop ─► 0, or 128 + signal
       └── a second one ── every connection is closed ──────────────────────────► 128 + signal

Agents end their ranks when their connection ends, so no way in which this process can end leaves ranks behind. Times of
failures are compared by the launcher's clock (``link.py``), and the first failure of any host is shown first, with its
traceback.

Cost: from a failure to the end of all ranks at most ``_SETTLE_S + grace_s`` and the time to kill; a lost host is
noticed after ``SILENCE_S``.
"""

import contextlib
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import shardwise
import shardwise.launch.report as report
from shardwise.base.errors import ConfigError, ShardwiseError, UsageError
from shardwise.base.words import printable
from shardwise.launch.backends.protocol import Launcher
from shardwise.launch.failure import RankFailure
from shardwise.launch.hosts import LOOPBACK, Host, HostRanks
from shardwise.launch.link import AgentLink, HostEvent
from shardwise.launch.local import GRACE_S, StopSignals
from shardwise.launch.meeting import Hello, meeting_address
from shardwise.launch.messages import PING_S, PROTOCOL, SILENCE_S, AgentOrder

_HELLO_S = 90.0
"""Seconds for all agents to start; a Python on a slow file system takes long. Back ends notice an unreachable host
sooner.
"""
_SPOKEN_S = 6.0
"""Seconds for an agent to start if the back end's program has written an error and would not end by itself."""
_BIND_S = 30.0
"""Seconds for the first host to bind the store's address."""
_SETTLE_S = 0.7
"""Seconds after the first failure in which other hosts may report theirs, to find the cause and not its effects."""
_CAUSE_S = 1.7
"""Seconds after the first failure if only effects have been seen."""
_LEAVE_S = 6.0
"""Seconds for agents to end their ranks and leave."""
_UNUSED_S = 1.0
"""Seconds for agents without ranks to leave."""
_SIGNAL_CODE = 128
_SHOWN = 5


class ClusterJob(NamedTuple):
    """A job on several hosts."""

    hosts: Sequence[Host]
    order: AgentOrder
    """Order to every host, but for the position of its ranks."""
    address: str | None = None
    """Address of the store; None: found from what the hosts say of themselves."""
    port: int = 0
    """Port of the store; 0: any free port."""
    hides_devices: bool = True
    """True if a rank sees only the accelerators that are its host's slots."""

    def ranks_of(self, node: int, address: str, port: int) -> HostRanks:
        """Return the position of the ranks of one host."""
        counts = [len(host.slots) for host in self.hosts]
        slots = self.hosts[node].slots if self.hides_devices else None
        if len(counts) == 1:
            return HostRanks(counts[0], counts[0], slots=slots)
        return HostRanks(counts[node], sum(counts), sum(counts[:node]), address, port, "", slots)


class HostAgents:
    """The agents of all hosts of one job, from their start to their end."""

    def __init__(self, job: ClusterJob, launcher: Launcher, console: Console) -> None:
        self.job, self.launcher, self.console = job, launcher, console
        self.events: queue.Queue[HostEvent] = queue.Queue()
        self.failures: list[RankFailure] = []
        self.codes: dict[int, int] = {}
        """Exit codes of the hosts whose ranks have ended."""
        self.are_ordered = False
        """True once every agent has its order; a request to stop that comes earlier starts nothing."""
        self._said: set[str] = set()
        self._pinged_s = 0.0
        self._began_s = time.monotonic()
        self.links: list[AgentLink] = []

    def connect(self) -> None:
        """Start the agent of every host."""
        processes = self.launcher.start(self.job.hosts)
        self.links = [
            AgentLink(host, node, process, self.events)
            for node, (host, process) in enumerate(zip(self.job.hosts, processes, strict=True))
        ]

    # Starting ------------------------------------------------------------------------------------------------------

    def order_all(self, requests: StopSignals) -> None:
        """Send every agent its order: the first host binds the store's address, then the others follow.

        Raises:
            ConfigError: if a host is not reached, has another version, or cannot start its ranks.
        """
        found = self._wait_for("hello", range(len(self.links)), _HELLO_S, requests)
        hellos = [found.get(node, {}) for node in range(len(self.links))]
        if requests.received:
            return
        self._check_versions(hellos)
        address = LOOPBACK
        if len(self.links) > 1:
            address = meeting_address(hellos, self.links[0].host.name, self.job.address)
        self._order(0, address, self.job.port)
        if len(self.links) > 1:
            port = self._wait_for("listens_at", [0], _BIND_S, requests).get(0)
            if port is None:
                return
            for node in range(1, len(self.links)):
                self._order(node, address, int(port))
        self.are_ordered = True

    def _order(self, node: int, address: str, port: int) -> None:
        order = self.job.order._replace(here=self.job.ranks_of(node, address, port))
        self.links[node].send({"order": order.to_plain()})

    def _wait_for(
        self, name: str, nodes: Sequence[int], patience_s: float, requests: StopSignals
    ) -> dict[int, Any]:
        """Return the values of one message of each of ``nodes``; fewer if the user asks to stop meanwhile.

        Raises:
            ConfigError: if a host is lost, refuses, or does not answer in time.
        """
        found: dict[int, Any] = {}
        until_s = time.monotonic() + patience_s
        while len(found) < len(nodes) and not requests.received:
            event = self._next_event()
            if event is None:
                self._check_patience([self.links[node] for node in nodes if node not in found], until_s)
            elif event.name == name:
                found[event.node] = event.value
            elif event.name in ("lost", "refused", "ended"):
                raise self._refusal(event)
            else:
                self._take(event)
        return found

    def _check_patience(self, missing: Sequence[AgentLink], until_s: float) -> None:
        """Raise ConfigError if hosts did not answer in time, or their back end has written why they will not."""
        if not self.launcher.ends_unreached and time.monotonic() > self._began_s + _SPOKEN_S:
            for link in missing:
                if link.words():
                    raise self._refusal(HostEvent(link.node, "lost", link.words()))
        if time.monotonic() > until_s:
            names = ", ".join(link.host.name for link in missing[:_SHOWN])
            raise ConfigError(
                f"launch: {names} did not answer within {time.monotonic() - self._began_s:.0f} s; check that "
                f"`{self.launcher.trial(missing[0].host)}` works"
            )

    def _refusal(self, event: HostEvent) -> ShardwiseError:
        """Return the error for a host whose ranks were not started."""
        name = self.links[event.node].host.name
        match event:
            case HostEvent(_, "refused", [str(sentence), 2]):
                return UsageError(f"{name}: {sentence}")
            case HostEvent(_, "refused", [str(sentence), _]):
                return ConfigError(f"{name}: {sentence}")
        words = event.value if isinstance(event.value, str) and event.value else "it gave no reason"
        return ConfigError(
            f"launch: no agent answers on {name} by {self.launcher.name}: {words}. Nothing runs; check that "
            f"`{self.launcher.trial(self.links[event.node].host)}` works"
        )

    def _check_versions(self, hellos: Sequence[Hello]) -> None:
        for link, hello in zip(self.links, hellos, strict=True):
            if (hello.get("protocol"), hello.get("version")) != (PROTOCOL, shardwise.__version__):
                raise ConfigError(
                    f"launch: {link.host.name} has shardwise {hello.get('version')}, and this host has "
                    f"{shardwise.__version__}; install one version on all hosts"
                )

    # Watching ------------------------------------------------------------------------------------------------------

    def _next_event(self) -> HostEvent | None:
        """Return the next event, or None after a short time; sends pings and finds silent hosts meanwhile."""
        now_s = time.monotonic()
        if now_s > self._pinged_s + PING_S:
            self._pinged_s = now_s
            for link in self.links:
                link.ping()
                if link.is_silent():
                    link.hang_up()
                    self.events.put(HostEvent(link.node, "lost", f"nothing arrived for {SILENCE_S:.1f} s"))
        try:
            return self.events.get(timeout=0.05)
        except queue.Empty:
            return None

    def _take(self, event: HostEvent) -> None:
        """Record one event of a host whose ranks may run."""
        link = self.links[event.node]
        match event:
            case HostEvent(_, "failure", dict(found)):
                try:
                    self.failures.append(link.failure(found))
                except (ValueError, TypeError) as error:
                    self._lose(link, f"its message about a failure cannot be read: {error}")
            case HostEvent(_, "ended", int(code)):
                self.codes[event.node] = code
            case HostEvent(_, "refused", [str(sentence), int(code)]):
                self.codes[event.node] = code
                self._fail(link, code, sentence, is_answer=True)
            case HostEvent(_, "said", [str(text), str(style)]):
                if text not in self._said:
                    self._said.add(text)
                    self.console.print(printable(text), style=style, highlight=False, soft_wrap=True)
            case HostEvent(_, "lost", str(words)):
                self._lose(link, words)

    def _lose(self, link: AgentLink, words: str) -> None:
        link.is_over = True
        self.codes[link.node] = 1
        self._fail(
            link,
            1,
            f"the connection to {link.host.name} is lost ({words or 'it ended'}); its ranks are ended",
        )

    def _fail(self, link: AgentLink, code: int, sentence: str, is_answer: bool = False) -> None:
        first = sum(len(host.slots) for host in self.job.hosts[: link.node])
        failure = RankFailure(
            first, time.monotonic(), code, sentence, is_answer=is_answer, host=link.host.name
        )
        self.failures.append(failure)

    def run(self, requests: StopSignals) -> int:
        """Wait for the ranks of all hosts and return the exit code of the job."""
        passed_on = 0
        while True:
            while (event := self._next_event()) is not None:
                self._take(event)
                if self.failures:
                    break
            if len(requests.received) > 1:
                return _SIGNAL_CODE + requests.received[0]
            for number in requests.received[passed_on:]:
                for link in self.links:
                    link.send({"signal": int(number)})
                passed_on += 1
            if self.failures:
                return self._show(requests)
            if len(self.codes) == len(self.links):
                return next((code for code in self.codes.values() if code), 0)

    def _show(self, requests: StopSignals) -> int:
        """Show the first failure of all hosts and return the exit code of the job."""
        since_s = time.monotonic()
        while len(self.codes) < len(self.links):
            only_effects = all(failure.is_of_peers for failure in self.failures)
            if time.monotonic() > since_s + (_CAUSE_S if only_effects else _SETTLE_S):
                break
            event = self._next_event()
            if event is not None:
                self._take(event)
        asked = requests.received[0] if requests.received else None
        if asked is not None and all(failure.is_of_peers for failure in self.failures):
            # The loss of a rank that stopped on request is not a failure of the others.
            return _SIGNAL_CODE + asked
        logs = self.job.order.logs
        return report.show_failures(self.console, self.failures, lambda rank: _log_of(logs, rank)).code

    # The end -------------------------------------------------------------------------------------------------------

    def end(self, grace_s: float) -> None:
        """End the ranks of every host.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL; 0: every connection is closed, which ends the ranks at once.
        """
        if grace_s:
            for link in self.links:
                link.send({"end": float(grace_s)})
            until_s = time.monotonic() + grace_s + _LEAVE_S
            while not all(link.is_over for link in self.links) and time.monotonic() < until_s:
                event = self._next_event()
                if event is not None and event.name == "lost":
                    self.links[event.node].is_over = True
        for link in self.links:
            link.hang_up()
        until_s = time.monotonic() + (_LEAVE_S if self.are_ordered else _UNUSED_S)
        while not all(link.has_ended() for link in self.links) and time.monotonic() < until_s:
            time.sleep(0.02)
        for link in self.links:
            link.kill()


def _log_of(folder: str | None, rank: int) -> Path | None:
    from shardwise.observe.log import log_path

    path = None if folder is None else log_path(Path(folder), rank)
    return path if path is not None and path.exists() else None


def run_on_hosts(job: ClusterJob, launcher: Launcher, console: Console, grace_s: float = GRACE_S) -> int:
    """Run a job on several hosts and return its exit code; no process of the job is left on any host.

    Args:
        job: The job.
        launcher: Back end that starts the agents.
        console: Console for messages.
        grace_s: Seconds between SIGTERM and SIGKILL.

    Raises:
        ConfigError: if a host is not reached or cannot start its ranks.
        UsageError: if the back end cannot be used here.
    """
    launcher.check()
    requests = StopSignals()
    agents = HostAgents(job, launcher, console)
    with contextlib.ExitStack() as stack:
        stack.enter_context(requests.listening())
        try:
            agents.connect()
            agents.order_all(requests)
            if not agents.are_ordered:
                grace_s = 0
                return _SIGNAL_CODE + requests.received[0]
            return agents.run(requests)
        except BaseException:
            grace_s = 0
            raise
        finally:
            agents.end(0 if len(requests.received) > 1 else grace_s)
