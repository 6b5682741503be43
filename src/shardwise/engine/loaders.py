"""Loaders of one engine: each rank's share of the data, and positions that are saved and loaded with the engine."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwise.comm.collectives import Group
from shardwise.comm.watch import END_OF_PASS
from shardwise.config.run import RunConfig
from shardwise.data.adopt import Collate
from shardwise.data.evaluation import Weighted, evaluation_batches
from shardwise.data.loader import Loader, Position
from shardwise.data.passes import Passes
from shardwise.plan.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class Loaders:
    """Those that an engine made, in order. ``dp``: the ranks that get different samples; ``world``: all ranks."""

    def __init__(self, config: RunConfig, dp: Group, microbatches: int, world: Group | None = None) -> None:
        self._config = config
        self._world = world or dp
        self._dp = dp
        self._microbatches = microbatches
        self._made: list[tuple[weakref.ref[Loader], Position]] = []
        """Weakly: one that its user has dropped ends its workers, and its position is saved all the same."""
        self._positions: list[dict[str, Any]] = []
        """Of the step that was loaded, also for loaders that are made later."""

    def make(
        self,
        data: Any,
        batch_size: int | None,
        shuffle: bool,
        collate_fn: Collate | None,
        workers: int,
        epochs: int | None,
    ) -> Passes:
        """See ``Engine.loader``."""
        batch = self._config.batch
        given = batch_size or getattr(data, "batch_size", None)
        micro = batch.micro_size or given
        if micro is None:
            raise ConfigError(
                "engine.loader: no batch size; give batch_size=..., bring a DataLoader that has one, or set "
                "batch.micro_size"
            )
        if batch_size is not None and batch_size != micro:
            raise ConfigError(
                f"engine.loader: batch_size is {batch_size}, but a rank's microbatch is {micro} samples by the "
                f"configuration ({self._why(micro)}); leave batch_size out, or give it as batch.micro_size"
            )
        if given is not None and given != micro:
            _log.info("loader: batches of %d samples a rank, as the configuration says, not %d", micro, given)
        made = Loader(
            data,
            global_batch=micro * self._microbatches * self._dp.size,
            micro_batch=micro,
            dp_index=self._dp.index,
            dp_size=self._dp.size,
            seed=self._config.train.seed,
            shuffle=shuffle,
            collate_fn=collate_fn,
            workers=workers,
            epochs=epochs,
        )
        place = len(self._made)
        self._made.append((weakref.ref(made), made.place))
        if place < len(self._positions):
            made.load_state(self._positions[place])
        return Passes(made, self._at_end())

    def _at_end(self) -> Callable[[int], None]:
        """Return what a pass calls at its end: a rank whose data ends before that of the others is told so, on all
        ranks, and not that the others are gone. Passes that train nothing may be one rank's own."""
        clock = self._world.clock
        began = clock.steps_done

        def at_end(steps: int) -> None:
            nonlocal began
            trained, began = clock.steps_done - began, clock.steps_done
            if 0 < trained <= steps and threading.current_thread() is threading.main_thread():
                with clock.within(f"{END_OF_PASS} after {steps} steps", meets=True):
                    self._world.meet()

        return at_end

    def _why(self, micro: int) -> str:
        """Return the keys that the size of a microbatch follows from."""
        batch = self._config.batch
        if batch.global_size is None:
            return f"batch.micro_size: {micro}"
        ranks = f"{self._dp.size} data-parallel ranks" if self._dp.size > 1 else "1 data-parallel rank"
        return f"batch.global_size: {batch.global_size} over {ranks} and {self._microbatches} accumulated microbatches"

    def set_accumulation(self, microbatches: int) -> None:
        """See ``Engine.set_accumulation``."""
        try:
            for loader in self._alive():
                loader.set_accumulation(microbatches)
        except DataError:  # one is too small
            for loader in self._alive():
                loader.set_accumulation(self._microbatches)
            raise
        self._microbatches = microbatches

    def for_evaluation(
        self, data: Any, batch_size: int | None, collate_fn: Collate | None, workers: int
    ) -> Iterator[Weighted]:
        """See ``Engine.evaluation_loader``."""
        dp = self._dp
        micro = batch_size or getattr(data, "batch_size", None) or self._config.batch.micro_size or 1
        return evaluation_batches(data, dp.index, dp.size, micro, collate_fn=collate_fn, workers=workers)

    def close(self) -> None:
        """Nothing is read ahead any more, until somebody asks for a step."""
        for loader in self._alive():
            loader.close()

    def _alive(self) -> list[Loader]:
        """Return the loaders that somebody still has."""
        found = [made() for made, _ in self._made]
        return [loader for loader in found if loader is not None]

    def positions(self) -> list[dict[str, Any]]:
        """Of each, as JSON."""
        return [place.state() for _, place in self._made]

    def move_to(self, positions: Sequence[dict[str, Any]]) -> None:
        """Go on at ``positions``, in the order in which loaders are made."""
        self._positions = list(positions)
        for (made, _), position in zip(self._made, self._positions, strict=False):
            loader = made()
            if loader is not None:
                loader.load_state(position)
