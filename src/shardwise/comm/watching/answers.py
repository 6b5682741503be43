"""Answers: what the watch's thread of a rank says about its rank, to other ranks over the store and to files."""

from pydantic import Field

from shardwise.base.strict_json import Count, StrictModel


class StartedCall(StrictModel):
    """A collective or a message that a rank has started."""

    group: str = ""
    """Name of the group, the same on all members."""
    number: Count = 0
    """Number of the call in the group; equal calls of all members have equal numbers."""
    operation: str = ""
    what: str = ""
    """Name of the tensor."""
    dtype: str = ""
    elements: Count = 0
    site: str = ""
    """Place in the code that called."""

    @property
    def likeness(self) -> tuple[object, ...]:
        """The parts of the call that must be equal on all members of the group."""
        if self.operation in ("send", "receive"):
            return "message", self.what
        # Each rank sends as much as its data needs.
        return self.operation, self.what, self.dtype, -1 if self.operation == "all_to_all" else self.elements

    def __str__(self) -> str:
        size = f" ({self.elements} elements of {self.dtype})" if self.dtype else ""
        return f"{self.operation} of {self.what}{size}" + (f", called at {self.site}" if self.site else "")


class OwnWork(StrictModel):
    """Work that one thread of a rank does while other ranks wait for it."""

    key: str
    """Beginning of the keys at which the others wait."""
    what: str
    seconds: float
    is_main: bool
    """True if the watched thread does it."""
    stack: str


class AwaitedCall(StrictModel):
    """The collective, message or meeting that a rank waits for."""

    group: str = ""
    """Group of the collective or message in the records."""
    number: Count = 0
    members: list[int] = []
    """Ranks of the job that take part."""


class SlowRank(StrictModel):
    """A rank whose own work has become slower than that of the others (observe/stragglers.py)."""

    rank: int
    phase: str
    words: str
    time_ns: Count
    """Time at which that was found, by the monotonic clock of the host."""


class RankAnswer(StrictModel):
    """A rank's waits, work and place, as the watch's thread sees them."""

    time_ns: Count = 0
    """Time of the answer, by the monotonic clock of the host."""
    question: str = ""
    """Question that is answered, if it came by a file."""
    waits: str = ""
    """What the watched thread waits for; "" if it waits for nobody."""
    waited_s: float = 0.0
    awaited: AwaitedCall = AwaitedCall()
    call: str = ""
    """Call of the engine in which the thread waits."""
    key: str = ""
    """Key of the texts that are waited for."""
    is_flying: bool = False
    """True if the wait is of a device, and the host goes on."""
    works: list[OwnWork] = []
    unmoved_s: float = 0.0
    """Seconds since the stack changed, or the process computed, read or wrote."""
    stack: str = ""
    story: str = ""
    """Result of the rank's last question to the others."""
    verdict: str = ""
    """Reason why the job ends, if the watch has found one."""
    slow: SlowRank | None = None
    """Rank that was last found to be slow."""
    starts: list[StartedCall] = Field(default=[], max_length=1024)
    """The last collectives and messages that the rank has started, oldest first."""
