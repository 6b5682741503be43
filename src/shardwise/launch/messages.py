"""Messages between the launcher of a job on several hosts and the agent on each host: lines of JSON.

    agent ──► launcher   hello        the agent's version, the name of its host, its addresses
    launcher ──► agent   order        ranks, program, folder, exported variables, secret: once
    agent ──► launcher   listens_at   the store's port, from the host of rank 0
    launcher ──► agent   ping         twice a second; a silent launcher ends the ranks
    agent ──► launcher   pong         the agent's monotonic clock, from which the launcher derives the clocks' offset
    launcher ──► agent   signal       a request to stop, or ``end``: stop at once
    agent ──► launcher   output       bytes that ranks wrote to standard output or standard error
                         failure      one rank's failure, when it is found
                         said         a sentence for the terminal
                         ended        the exit code of the host's ranks; the last message

The order travels on the agent's standard input, so that neither the secret nor an argument is on a command line: no
shell of the other host parses an argument, and no list of processes shows the secret.

Cost: some 60 bytes a ping, and 4/3 of the ranks' output.
"""

import json
import os
import select
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.launch.hosts import HostRanks
from shardwise.launch.local import RankProgram

PROTOCOL = 1
"""Number of this form of the messages; launcher and agents must agree."""
PING_S = 0.5
"""Seconds between two pings."""
SILENCE_S = 4.5
"""Seconds without a message after which launcher and agent take their connection for lost."""
_LINE_BYTES = 256 << 20
"""Most bytes of one message."""
_READ_BYTES = 1 << 16

Message = dict[str, Any]
"""One message: an object of JSON with one key, the message's name."""


class AgentOrder(NamedTuple):
    """Everything that an agent needs to start the ranks of its host."""

    here: HostRanks
    """Position of the host's ranks in the job."""
    program: RankProgram
    folder: str
    """Working folder of the ranks."""
    secret: str
    """Secret of the job."""
    exports: Mapping[str, str]
    """Environment variables for every rank."""
    logs: str | None = None
    """Folder of the ranks' logs on the agent's host."""
    binds_cores: bool = False
    """True if each rank gets cores of its own."""
    core_list: str | None = None
    """The cores to share out; None: all cores that the agent may use."""
    as_deepspeed: bool = False

    def to_plain(self) -> Message:
        """Return the order as values of JSON."""
        return self._asdict() | {"here": self.here._asdict(), "program": self.program._asdict()}

    @classmethod
    def from_plain(cls, found: Message) -> "AgentOrder":
        """Return the order that :meth:`to_plain` made.

        Raises:
            TypeError: if a field is missing or unknown.
        """
        here, program = HostRanks(**found["here"]), RankProgram(**found["program"])
        return cls(
            **found
            | {
                "here": here._replace(slots=None if here.slots is None else tuple(here.slots)),
                "program": program._replace(arguments=tuple(program.arguments)),
            }
        )


def encoded(message: Message) -> bytes:
    """Return a message as one line. Bytes of file names that are not UTF-8 pass unchanged, as escapes."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def lines(descriptor: int, limit_bytes: int = _LINE_BYTES) -> Iterator[bytes | None]:
    """Yield the lines that arrive at a descriptor, and None after each ``PING_S`` without one, until the end.

    Args:
        descriptor: Descriptor to read.
        limit_bytes: Most bytes of a line; a longer one ends the iteration.
    """
    rest: list[bytes] = []
    size = 0
    while True:
        if not select.select([descriptor], [], [], PING_S)[0]:
            yield None
            continue
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except OSError:
            return
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line])
            rest, size = [], 0
        rest.append(last)
        size += len(last)
        if not chunk or size > limit_bytes:
            return


def decoded(line: bytes) -> Message | None:
    """Return the message of a line; None if the line is no message, such as a banner that a login shell prints."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and len(found) == 1 else None


def write_all(descriptor: int, data: bytes, patience_s: float) -> bool:
    """Write to a descriptor that does not block; return False if the reader is gone or does not read.

    Args:
        descriptor: Descriptor to write to.
        data: Bytes to write.
        patience_s: Seconds to wait for the reader.
    """
    until_s = time.monotonic() + patience_s
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            select.select([], [descriptor], [], left_s)
        except OSError:
            return False
    return True
