"""Replay: which microbatch is running, so that its random numbers can be drawn again.

Random numbers that are a function of their place (``kernels.dropout``) need the place: optimizer step and first
sample of the rows here. The engine sets it around every forward pass; whatever runs a piece of that pass again,
out of its turn, in the backward pass of another microbatch perhaps, puts it back:

    with replay.at(BatchPosition(step, first_sample=8)):   engine, around one microbatch
        loss = model(batch)
    again = replay.again()                                 recomputation, where a block begins
    with again:                                            ... and later, as often as it likes
        block(x)

What else a pass decides once and a piece of it must find again stands here too: whether it left the sequence whole, and
what ``keep`` was given to keep (which experts a token goes to: a second choice may fall otherwise, by the last bit of a
sum or by a bias that has moved since, and would send rows that nobody waits for).

A layer that runs twice in one pass must not drop the same features twice: ``next_call`` numbers its calls, and
``again`` takes the numbers back too. What passes run in (``inside``) is entered around their pieces again, for the same
reason. One object per engine, handed to those who need it; nothing is global.

Cost: a dictionary with one entry per layer that drew; what is kept lives as long as the graph that will run again.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.memory.draws import PassDraws
from shardwise.plan.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class BatchPosition:
    """Where the rows of one forward pass stand in the run."""

    step: int
    """Optimizer step."""
    first_sample: int = 0
    """Index of the first row here in the step's global batch."""
    samples: int | None = None
    """Rows here; None where the first dim of every tensor counts samples."""


class Replay:
    """The place that random numbers are drawn at. Outside ``at`` there is none."""

    def __init__(
        self, inside: Callable[[], AbstractContextManager[Any]] = nullcontext, has_numbers: bool = True
    ) -> None:
        self.inside = inside
        """What passes run in: a context that chooses the dtype of each operation, say."""
        self.has_numbers = has_numbers
        """False where tensors have shapes alone (simulate/passes.py): nothing is drawn or counted there."""
        self._place: BatchPosition | None = None
        self._calls: dict[str, int] = {}
        self.whole_sequence = False
        """True where the last pass with gradients did not cut the sequence, though the model is made for it."""
        self.stays_whole = False
        """True while no pass shall cut the sequence."""
        self.ran_again = ""
        """The piece that ran again last, in words."""
        self.runs_again = 0
        """Pieces of passes that run again now, one in another perhaps."""
        self.scale: float | Tensor = 1.0
        """What the loss of the microbatch was multiplied by whose backward pass runs; 1 where none does. A term that a
        layer adds to the gradients by itself, and not to the loss, is multiplied by it there."""
        self.draws = PassDraws()
        """What passes draw from generators that are not keyed."""
        self._runs: list[_Run] = []
        """Pieces that run now, for the first time or again, each inside of those before it."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What runs inside leaves the sequence whole."""
        before = self.stays_whole, self.whole_sequence
        self.stays_whole = self.whole_sequence = True
        try:
            yield
        finally:
            self.stays_whole, self.whole_sequence = before

    @contextmanager
    def scaled(self, scale: float | Tensor) -> Iterator[None]:
        """A backward pass from a loss that was multiplied by ``scale``."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before

    @property
    def is_running(self) -> bool:
        """Whether a microbatch runs now."""
        return self._place is not None

    @property
    def place(self) -> BatchPosition:
        """The running microbatch.

        Errors: UsageError where none runs: the same numbers in every pass would pass for random ones.
        """
        if self._place is None:
            raise UsageError(
                "dropout: no microbatch is running, so there is no place to draw at; call the model through the engine "
                "(engine(batch), engine.run(...)), or put it in evaluation mode with model.eval(); a piece under "
                "torch's own checkpoint runs again when its pass is over: take engine.recomputed(piece), or recompute: "
                "full"
            )
        return self._place

    def next_call(self, layer: str) -> int:
        """How often ``layer`` was called in this pass before, counting this call."""
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        return call

    @contextmanager
    def at(self, place: BatchPosition) -> Iterator[None]:
        """A forward pass of the microbatch at ``place``; what ran before comes back afterwards."""
        before = self._place, self._calls
        self._place, self._calls = place, {}
        try:
            with self.inside():
                yield
        finally:
            self._place, self._calls = before

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns; in a piece that runs again what it returned in the first run, by ``key`` and by how
        often the piece asked for it before.

        ``make`` runs without gradients, for the second run saves nothing in its place, and computes no product of
        matrices, which selective recomputation counts. What it returns may not change later.
        """
        firsts = []
        for run in reversed(self._runs):
            if run.taken is not None:
                value = run.take(key)
                break
            firsts.append(run)
        else:
            with torch.no_grad():
                value = make()
        for run in firsts:
            run.kept.setdefault(key, []).append(value)
        return value  # type: ignore[no-any-return]

    def again(self, name: str = "") -> "Again":
        """A context that brings back what is now; it can be entered many times. ``first`` of it goes around the first
        run, where that is to ``keep``. ``name``: the piece, in words."""
        return Again(self, name)


@dataclass
class _Run:
    """A piece that runs: for the first time, or again, and then it has ``taken`` so many of what was kept."""

    kept: dict[Hashable, list[Any]]
    taken: dict[Hashable, int] | None = None

    def take(self, key: Hashable) -> Any:
        """The next that was kept under ``key``."""
        assert self.taken is not None, "a piece that runs for the first time has nothing to take"
        place, kept = self.taken.get(key, 0), self.kept.get(key, [])
        if place >= len(kept):
            raise UsageError(
                f"recompute: {key!r} was asked for {len(kept)} times where the piece ran first, and once more where "
                "it runs again, so it takes another path the second time; leave it out of recompute.blocks, or set "
                "recompute: none"
            )
        self.taken[key] = place + 1
        return kept[place]


class Again(AbstractContextManager[None]):
    """See ``Replay.again``."""

    def __init__(self, replay: Replay, name: str = ""):
        self._replay = replay
        self._name = name
        self._kept: dict[Hashable, list[Any]] = {}
        self._then = replay._place, dict(replay._calls), replay.whole_sequence
        self._before: list[tuple[BatchPosition | None, dict[str, int], bool]] = []
        self._inside: list[AbstractContextManager[Any]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run."""
        self._replay._runs.append(_Run(self._kept))
        try:
            yield
        finally:
            self._replay._runs.pop()

    def __enter__(self) -> None:
        self._replay.runs_again += 1
        self._replay.ran_again = self._name
        self._replay._runs.append(_Run(self._kept, {}))
        self._before.append((self._replay._place, self._replay._calls, self._replay.whole_sequence))
        place, calls, self._replay.whole_sequence = self._then
        self._replay._place, self._replay._calls = place, dict(calls)
        self._inside.append(self._replay.inside())
        self._inside[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inside.pop().__exit__(*exception)
        self._replay._runs.pop()
        self._replay.runs_again -= 1
        self._replay._place, self._replay._calls, self._replay.whole_sequence = self._before.pop()
