"""The launcher's connection to the agent of one host.

The launcher writes orders and pings to the agent's standard input, and reads messages from its standard output; what
arrives on standard error are the words of ssh, srun or mpirun, or of a shell that found no Python. Both sides take a
connection for lost when nothing arrives for ``SILENCE_S`` seconds.

    offset = clock of the agent - (time of the ping + time of the pong) / 2        from the fastest of all pings

The offset converts the times of failures to the launcher's clock; its error is at most half the time of that ping.

Cost: two threads a host; a ping of 20 bytes twice a second.
"""

import base64
import binascii
import contextlib
import os
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from typing import IO, Any, NamedTuple, Protocol

from shardwise.base.words import printable
from shardwise.launch.failure import RankFailure, of_plain
from shardwise.launch.hosts import Host
from shardwise.launch.messages import SILENCE_S, Message, decoded, encoded, lines, write_all
from shardwise.launch.output import PipeTarget

_WORDS_LINES = 60
"""Lines of the back end's own words that are kept."""
_SHOWN_LINES = 4
_LAST_S = 1.0
_ORDER_S = 10.0
"""Seconds for an agent to read an order."""


class AgentProcess(Protocol):
    """A started agent: its standard streams and its end. A ``subprocess.Popen`` is one."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit status, or None while the agent or the program that reaches it runs."""

    def kill(self) -> None:
        """End the program that reaches the agent."""


class HostEvent(NamedTuple):
    """A message of one host, or the loss of its connection (the name ``"lost"``)."""

    node: int
    name: str
    value: Any


class _ClockOffset:
    """The difference between an agent's monotonic clock and the launcher's."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._fastest_s = float("inf")

    def learn(self, sent_s: float, theirs_s: float, received_s: float) -> None:
        """Take one ping into account."""
        if received_s - sent_s < self._fastest_s:
            self._fastest_s = received_s - sent_s
            self.offset_s = theirs_s - (sent_s + received_s) / 2


class AgentLink:
    """The connection to the agent of one host.

    Args:
        host: The host.
        node: Number of the host in the job.
        process: The started agent.
        events: Queue for the host's messages.
    """

    def __init__(
        self, host: Host, node: int, process: AgentProcess, events: "queue.Queue[HostEvent]"
    ) -> None:
        self.host, self.node = host, node
        self.is_over = False
        """True after the host's last message, or if the connection is lost."""
        self.clock = _ClockOffset()
        self._process, self._events = process, events
        self._heard_s = time.monotonic()
        self._is_showing = False
        """True while output of the host waits for this launcher's own reader."""
        self._has_said_hello = False
        self._words: deque[str] = deque(maxlen=_WORDS_LINES)
        # Whole lines, because the output of several hosts is mixed.
        self._shown = {number: PipeTarget(number, b"") for number in (1, 2)}
        assert process.stdin is not None, "agents are started with pipes"
        self._to = process.stdin.fileno()
        os.set_blocking(self._to, False)
        self._hearing = threading.Thread(target=self._hear_words, name=f"agent-{node}-words", daemon=True)
        self._hearing.start()
        self._reading = threading.Thread(target=self._read, name=f"agent-{node}-messages", daemon=True)
        self._reading.start()

    # Orders --------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send an order; a lost connection is reported as an event, by the reader."""
        if not self.is_over:
            write_all(self._to, encoded(message), _ORDER_S)

    def ping(self) -> None:
        """Send a ping, unless the agent has not read the earlier ones."""
        if not self.is_over:
            write_all(self._to, encoded({"ping": time.monotonic()}), 0.0)

    def is_silent(self) -> bool:
        """Return True if the host has said hello and nothing has arrived for ``SILENCE_S`` seconds."""
        return (
            self._has_said_hello
            and not self.is_over
            and not self._is_showing
            and time.monotonic() > self._heard_s + SILENCE_S
        )

    # Messages ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None, "agents are started with pipes"
        for line in lines(self._process.stdout.fileno()):
            if line is not None:
                now_s = time.monotonic()
                self._heard_s = now_s
                message = decoded(line)
                if message is None:
                    self._words.append(line.decode(errors="replace"))
                else:
                    self._take(message, now_s)
        for target in self._shown.values():
            target.take(b"")
        if not self.is_over:
            self._hearing.join(1.0)  # the last words explain the end
            self._events.put(HostEvent(self.node, "lost", self.words()))

    def _take(self, message: Message, now_s: float) -> None:
        match message:
            case {"pong": [float(sent_s), float(theirs_s)]}:
                self.clock.learn(sent_s, theirs_s, now_s)
            case {"output": [1 | 2 as number, str(text)]}:
                self._is_showing = True
                with contextlib.suppress(binascii.Error):
                    self._shown[number].take(base64.b64decode(text, validate=True))
                self._heard_s = time.monotonic()
                self._is_showing = False
            case _:
                name, value = next(iter(message.items()))
                self._has_said_hello = True
                if name in ("ended", "refused"):
                    self.is_over = True
                self._events.put(HostEvent(self.node, name, value))

    def _hear_words(self) -> None:
        assert self._process.stderr is not None, "agents are started with pipes"
        for line in self._process.stderr:
            self._words.append(line.decode(errors="replace").rstrip())

    def words(self) -> str:
        """Return the last words of the back end's program as one line; those of ssh itself if there are any.

        Open MPI adds a page of advice to the words of its ssh.
        """
        said = [word.strip() for word in list(self._words) if word.strip()]
        of_ssh = [word for word in said if word.startswith("ssh: ")]
        return printable("; ".join((of_ssh or said)[-_SHOWN_LINES:]))

    def failure(self, found: Message) -> RankFailure:
        """Return a failure that the agent reported, with its host, and its time by the launcher's clock.

        Raises:
            ValueError: if a field has another type, or a number is out of range.
            TypeError: if a field is unknown or missing.
        """
        failure = of_plain(found)
        return replace(failure, host=self.host.name, time_s=failure.time_s - self.clock.offset_s)

    # The end -------------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close the agent's standard input, which ends the agent and its ranks at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.is_over = True

    def kill(self) -> None:
        """End the program that reaches the agent, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            until_s = time.monotonic() + _LAST_S
            while self._process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.01)
        self._reading.join(_LAST_S)  # the last output of the ranks
        self._hearing.join(_LAST_S)
        for thread, pipe in ((self._reading, self._process.stdout), (self._hearing, self._process.stderr)):
            if pipe is not None and not thread.is_alive():
                pipe.close()

    def has_ended(self) -> bool:
        """Return True if the program that reaches the agent has ended."""
        return self._process.poll() is not None
