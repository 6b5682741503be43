"""Replay: the microbatch that is running, so that its random numbers can be drawn again.

Random numbers that are a function of their position (``kernels.dropout``) need the position: optimizer step and first
sample of this rank's rows. The engine sets the position around every forward pass. Code that runs a piece of that pass
again, possibly in the backward pass of another microbatch, restores it:

    with replay.at(BatchPosition(step, first_sample=8)):   engine, around one microbatch
        loss = model(batch)
    again = replay.again()                                 recomputation, where a block begins
    with again:                                            ... and later, any number of times
        block(x)

Other values that a pass decides once and a repeated piece must find again are stored here too: whether the pass left
the sequence whole, and the values of ``keep``. An example is the choice of experts for a token: a second choice may
differ, by the last bit of a sum or by a bias that has changed since, and would send rows that no rank waits for.

A layer that runs twice in one pass must not drop the same features twice: ``next_call`` numbers its calls, and
``again`` restores the numbers too. The context that passes run in (``inside``) is entered again around their pieces,
for the same reason. There is one object per engine, passed to the code that needs it; nothing is global.

Cost: a dictionary with one entry per layer that drew; kept values live as long as the graph that will run again.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.passes.draws import PassDraws

T = TypeVar("T")


@dataclass(frozen=True)
class BatchPosition:
    """Position of the rows of one forward pass in the run."""

    step: int
    """Optimizer step."""
    first_sample: int = 0
    """Index of this rank's first row in the step's global batch."""
    samples: int | None = None
    """Number of this rank's rows, or None if the first dim of every tensor counts samples."""


class DrawReplay:
    """The position at which random numbers are drawn. Outside ``at`` there is none.

    Args:
        inside: Function that returns the context in which passes run.
        has_numbers: False if tensors have only shapes (simulate/passes.py): nothing is drawn or counted.
    """

    def __init__(
        self, inside: Callable[[], AbstractContextManager[Any]] = nullcontext, has_numbers: bool = True
    ) -> None:
        self.inside = inside
        """Function that returns the context in which passes run, for example one that chooses the dtype of each
        operation."""
        self.has_numbers = has_numbers
        """False if tensors have only shapes (simulate/passes.py): nothing is drawn or counted."""
        self._place: BatchPosition | None = None
        self._calls: dict[str, int] = {}
        self.whole_sequence = False
        """True if the last pass with gradients did not cut the sequence, though the model is made for a cut."""
        self.stays_whole = False
        """True while no pass may cut the sequence."""
        self.ran_again = ""
        """Name of the piece that ran again last."""
        self.runs_again = 0
        """Number of pieces that run again now, which may be nested."""
        self.scale: float | Tensor = 1.0
        """Factor of the loss of the microbatch whose backward pass runs; 1 outside of backward passes. A layer
        that adds a term directly to the gradients, and not to the loss, multiplies the term by this factor."""
        self.draws = PassDraws()
        """Random numbers that passes draw from generators that are not keyed."""
        self._runs: list[_RunningPiece] = []
        """Pieces that run now, for the first time or again, each inside the pieces before it."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep the sequence whole in all passes inside the context."""
        before = self.stays_whole, self.whole_sequence
        self.stays_whole = self.whole_sequence = True
        try:
            yield
        finally:
            self.stays_whole, self.whole_sequence = before

    @contextmanager
    def scaled(self, scale: float | Tensor) -> Iterator[None]:
        """Set the factor of the loss during a backward pass."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before

    @property
    def is_running(self) -> bool:
        """True if a microbatch runs now."""
        return self._place is not None

    @property
    def place(self) -> BatchPosition:
        """Position of the running microbatch.

        Raises:
            UsageError: If no microbatch runs. Every pass would then draw the same numbers, which would look
                random.
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
        """Return how often ``layer`` was called in this pass before, and count this call."""
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        return call

    @contextmanager
    def at(self, place: BatchPosition) -> Iterator[None]:
        """Run a forward pass of the microbatch at ``place`` inside the context.

        The former position is restored afterwards.
        """
        before = self._place, self._calls
        self._place, self._calls = place, {}
        try:
            with self.inside():
                yield
        finally:
            self._place, self._calls = before

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make``, or the result of the first run if the piece runs again.

        ``make`` runs without gradients, because the second run saves nothing in its place. ``make`` must not
        compute matrix products, which selective recomputation counts.

        Args:
            key: Key of the value. Repeated requests of a piece under one key are numbered.
            make: Function that computes the value, which may not change later.

        Returns:
            The value.

        Raises:
            UsageError: If the second run requests the key more often than the first.
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

    def again(self, name: str = "") -> "ReplayContext":
        """Return a context that restores the present state, and that can be entered many times.

        ``first`` of the context goes around the first run, if that run is to ``keep`` values.

        Args:
            name: Name of the piece in errors.

        Returns:
            The context.
        """
        return ReplayContext(self, name)


@dataclass
class _RunningPiece:
    """A running piece. ``taken`` counts the kept values that a repeated piece has used; it is None in the first run."""

    kept: dict[Hashable, list[Any]]
    taken: dict[Hashable, int] | None = None

    def take(self, key: Hashable) -> Any:
        """Return the next value that was kept under ``key``."""
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


class ReplayContext(AbstractContextManager[None]):
    """The context that ``DrawReplay.again`` returns.

    Args:
        replay: The replay whose state is restored.
        name: Name of the piece in errors.
    """

    def __init__(self, replay: DrawReplay, name: str = ""):
        self._replay = replay
        self._name = name
        self._kept: dict[Hashable, list[Any]] = {}
        self._then = replay._place, dict(replay._calls), replay.whole_sequence
        self._before: list[tuple[BatchPosition | None, dict[str, int], bool]] = []
        self._inside: list[AbstractContextManager[Any]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Record the values that the piece keeps in its first run, inside the context."""
        self._replay._runs.append(_RunningPiece(self._kept))
        try:
            yield
        finally:
            self._replay._runs.pop()

    def __enter__(self) -> None:
        self._replay.runs_again += 1
        self._replay.ran_again = self._name
        self._replay._runs.append(_RunningPiece(self._kept, {}))
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
