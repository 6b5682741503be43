"""The agent of one host: starts the host's ranks for a launcher on another host, and ends them with the connection.

    python -m shardwise.launch.agent          standard input: orders; standard output: messages (``messages.py``)

Every back end starts this module on each host, by ssh, srun, mpirun or an actor. The agent reads one order from its
standard input, runs the launcher of one host (``local.py``), and reports each failure as soon as it is found. It ends
its ranks at once when its standard input ends, or when the launcher is silent for ``SILENCE_S`` seconds, as after a
cable was pulled. The kernel ends the ranks if the agent itself is killed.

Cost: three threads, and one for each of the two streams of output.
"""

import base64
import contextlib
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import shardwise
from shardwise.base.errors import ConfigError, ShardwiseError
from shardwise.base.words import in_words
from shardwise.comm.rendezvous.address import interface_of, own_address
from shardwise.launch.environment import SECRET
from shardwise.launch.failure import RankFailure, exit_code, first, headline
from shardwise.launch.hosts import cores_of_ranks
from shardwise.launch.local import JobChannel, StopSignals, run
from shardwise.launch.meeting import addresses_here
from shardwise.launch.messages import PROTOCOL, SILENCE_S, AgentOrder, Message, decoded, encoded, lines
from shardwise.launch.report import JobReporter
from shardwise.launch.terminal import lasting_console

_FLUSH_S = 2.0
"""Seconds for the last messages to leave."""
_CHUNK_BYTES = 1 << 15
_WAIT_S = 0.1
_OF_THE_BACK_END = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_")
"""Beginnings of the names of variables that describe the agent as a rank of MPI or SLURM, which its ranks are not."""
_QUEUED_MESSAGES = 256
"""Most messages that wait to be written; more output then waits in its pipe, which stops the ranks that write it."""


class AgentChannel:
    """The agent's connection to the launcher, over the standard streams with which the agent was started."""

    def __init__(self) -> None:
        self.requests = StopSignals()
        self.orders: queue.Queue[AgentOrder | None] = queue.Queue()
        """The order; None if the connection ends before it."""
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_QUEUED_MESSAGES)
        self._in, self._out = os.dup(0), os.dup(1)
        _replace_stream(0, os.open(os.devnull, os.O_RDONLY))
        self._writer = threading.Thread(target=self._write, name="agent-writer", daemon=True)
        self._pumps = [self._pump(number) for number in (1, 2)]

    def start(self) -> None:
        """Send the hello and start the threads."""
        for thread in (self._writer, *self._pumps):
            thread.start()
        threading.Thread(target=self._read, name="agent-reader", daemon=True).start()
        self.send({"hello": _hello()})

    def send(self, message: Message) -> None:
        """Queue a message for the launcher, or drop it if the queue is full and the job has to end."""
        line = encoded(message)
        while True:
            try:
                return self._waiting.put(line, timeout=_WAIT_S)
            except (
                queue.Full
            ):  # the launcher does not read, or the connection is lost, which the reader notices
                if self.requests.end_within_s is not None:
                    return None

    def _write(self) -> None:
        is_open = True
        while (line := self._waiting.get()) is not None:
            try:
                while line and is_open:
                    line = line[os.write(self._out, line) :]
            except OSError:  # the launcher is gone, which the reader notices too
                is_open = False

    def _read(self) -> None:
        heard_s = time.monotonic()
        try:
            for line in lines(self._in):
                now_s = time.monotonic()
                if line is not None:
                    heard_s = now_s
                    self._take(decoded(line))
                elif now_s > heard_s + SILENCE_S:
                    break
        finally:
            self.requests.end_within_s = 0.0
            self.orders.put(None)

    def _take(self, message: Message | None) -> None:
        """Handle one message of the launcher.

        Raises:
            ValueError: if the message is none that this agent handles.
        """
        match message:
            case {"ping": number}:
                with contextlib.suppress(
                    queue.Full
                ):  # other messages show the launcher that this host is there
                    self._waiting.put_nowait(encoded({"pong": [number, time.monotonic()]}))
            case {"order": dict(found)}:
                self.orders.put(AgentOrder.from_plain(found))
            case {"signal": int(number)}:
                self.requests.received.append(signal.Signals(number))
            case {"end": float(grace_s)}:
                self.requests.end_within_s = grace_s
            case _:
                raise ValueError(f"unknown message {message}")

    def _pump(self, number: int) -> threading.Thread:
        """Replace standard output or standard error by a pipe, and return the thread that sends its bytes."""
        source, sink = os.pipe()
        _replace_stream(number, sink)

        def run() -> None:
            while chunk := os.read(source, _CHUNK_BYTES):
                self.send({"output": [number, base64.b64encode(chunk).decode("ascii")]})
            os.close(source)

        return threading.Thread(target=run, name=f"agent-output-{number}", daemon=True)

    def close(self, last: Message) -> None:
        """Send the rest of the output and one last message."""
        until_s = time.monotonic() + _FLUSH_S
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        for number in (1, 2):  # the pipes end with their last writer
            _replace_stream(number, os.open(os.devnull, os.O_WRONLY))
        for thread in self._pumps:
            thread.join(max(0.0, until_s - time.monotonic()))
        for each in (encoded(last), None):
            with contextlib.suppress(queue.Full):
                self._waiting.put(each, timeout=max(0.01, until_s - time.monotonic()))
        self._writer.join(max(0.0, until_s - time.monotonic()))


class AgentReporter(JobReporter):
    """Receiver of what happens to the ranks of this host; sends it to the launcher."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(lasting_console(stderr=True))
        self._send = send

    def say(self, text: str, style: str) -> None:
        """Send a sentence for the launcher's terminal."""
        self._send({"said": [text, style]})

    def listens_at(self, port: int) -> None:
        """Send the port of the store, which this host has bound."""
        self._send({"listens_at": port})

    def failed(self, failure: RankFailure) -> None:
        """Send the failure of one rank."""
        self._send({"failure": asdict(failure)})

    def show(self, failures: Iterable[RankFailure], log_of: Callable[[int], Path | None]) -> RankFailure:
        """Return the first failure of this host; the launcher shows the first of all hosts."""
        return first(failures)


def _replace_stream(number: int, descriptor: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)


def _hello() -> Message:
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "protocol": PROTOCOL,
        "version": shardwise.__version__,
        "python": platform.python_version(),
        "name": platform.node(),
        # The addresses of ssh's two ends: they are numeric, and a connection between them works.
        "client": connection[0] if len(connection) == 4 else "",
        "server": connection[2] if len(connection) == 4 else "",
        "addresses": addresses_here(),
    }


def _obey(order: AgentOrder, channel: AgentChannel) -> int:
    """Run the ranks of an order and return their exit code."""
    try:
        os.chdir(order.folder)
    except OSError as error:
        raise ConfigError(
            f"launch: the working folder {order.folder} cannot be entered on this host: {in_words(error)}; every host "
            "needs the same folders, as on a shared file system"
        ) from None
    here = order.here
    if not here.is_one_host:
        here = here._replace(interface=interface_of(own_address(here.address)))
    for name in [name for name in os.environ if name.startswith(_OF_THE_BACK_END)]:
        del os.environ[name]
    os.environ[SECRET] = order.secret
    cores_of = cores_of_ranks(order.core_list, here.local) if order.binds_cores or order.core_list else ()
    return run(
        order.program,
        here,
        order.logs,
        cores_of=cores_of,
        exports=order.exports,
        as_deepspeed=order.as_deepspeed,
        channel=JobChannel(channel.requests, AgentReporter(channel.send), has_terminal=here.first == 0),
    )


def main() -> None:
    """Run the ranks that the launcher orders, and end this process."""
    channel = AgentChannel()
    channel.start()
    order = channel.orders.get()
    last: Message = {"ended": 1}
    if order is not None:
        try:
            last = {"ended": _obey(order, channel)}
        except ShardwiseError as error:
            last = {"refused": [headline(error), exit_code(error)]}
    channel.close(last)
    os._exit(0)  # threads may still wait for a connection that is gone


if __name__ == "__main__":
    main()
