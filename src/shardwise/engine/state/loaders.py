"""Loaders of one engine: each rank's share of the data, and the positions that are saved and loaded."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.base.errors import ConfigError, DataError
from shardwise.comm.collectives import Group
from shardwise.comm.watching.waits import END_OF_PASS
from shardwise.config.run import RunConfig
from shardwise.data.adopt import Collate
from shardwise.data.batched import CPU
from shardwise.data.evaluation import WeightedBatch, evaluation_batches
from shardwise.data.loader import Loader, LoaderPosition
from shardwise.data.passes import DataPasses

_log = logging.getLogger(__name__)


class EngineLoaders:
    """The loaders that one engine has made, in order.

    Args:
        config: the resolved configuration.
        dp: the ranks that get different samples.
        microbatches: number of microbatches of a step.
        world: all ranks; None: those of ``dp``.
        device: the device of this rank, for which the loaders' threads pin batches.
    """

    def __init__(
        self,
        config: RunConfig,
        dp: Group,
        microbatches: int,
        world: Group | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._config = config
        self._device = device
        self._world = world or dp
        self._dp = dp
        self._microbatches = microbatches
        self._made: list[tuple[weakref.ref[Loader], LoaderPosition]] = []
        """Weak references to the loaders, with their positions. A loader that the user has dropped can end its workers,
        and its position is still saved."""
        self._positions: list[dict[str, Any]] = []
        """Positions of the step that was loaded, also for loaders that are made later."""

    def make(
        self,
        data: Any,
        batch_size: int | None,
        shuffle: bool,
        collate_fn: Collate | None,
        workers: int,
        epochs: int | None,
    ) -> DataPasses:
        """Make a loader for this rank; see ``Engine.loader``."""
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
            device=self._device,
        )
        place = len(self._made)
        self._made.append((weakref.ref(made), made.place))
        if place < len(self._positions):
            made.load_state(self._positions[place])
        return DataPasses(made, self._at_end())

    def _at_end(self) -> Callable[[int], None]:
        """Return the callback for the end of a pass, which reports a rank whose data ends before that of the others.

        The error is then the end of the data, on all ranks, and not a lost rank. Passes without training may run on
        one rank only.
        """
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
        """Return the keys of the configuration that determine the size of a microbatch."""
        batch = self._config.batch
        if batch.global_size is None:
            return f"batch.micro_size: {micro}"
        ranks = f"{self._dp.size} data-parallel ranks" if self._dp.size > 1 else "1 data-parallel rank"
        return f"batch.global_size: {batch.global_size} over {ranks} and {self._microbatches} accumulated microbatches"

    def set_accumulation(self, microbatches: int) -> None:
        """Change the number of microbatches of a step in all loaders; see ``Engine.set_accumulation``."""
        try:
            for loader in self._alive():
                loader.set_accumulation(microbatches)
        except DataError:  # the data of one loader is too small: restore the others
            for loader in self._alive():
                loader.set_accumulation(self._microbatches)
            raise
        self._microbatches = microbatches

    def for_evaluation(
        self, data: Any, batch_size: int | None, collate_fn: Collate | None, workers: int
    ) -> Iterator[WeightedBatch]:
        """Return the batches of an evaluation; see ``Engine.evaluation_loader``."""
        dp = self._dp
        micro = batch_size or getattr(data, "batch_size", None) or self._config.batch.micro_size or 1
        return evaluation_batches(data, dp.index, dp.size, micro, collate_fn=collate_fn, workers=workers)

    def close(self) -> None:
        """Stop reading ahead until the next step is requested."""
        for loader in self._alive():
            loader.close()

    def _alive(self) -> list[Loader]:
        """Return the loaders that are still in use."""
        found = [made() for made, _ in self._made]
        return [loader for loader in found if loader is not None]

    def positions(self) -> list[dict[str, Any]]:
        """Return the position of each loader, as JSON data."""
        return [place.state() for _, place in self._made]

    def move_to(self, positions: Sequence[dict[str, Any]]) -> None:
        """Set the positions of the loaders, in the order in which loaders are made."""
        self._positions = list(positions)
        for (made, _), position in zip(self._made, self._positions, strict=False):
            loader = made()
            if loader is not None:
                loader.load_state(position)
