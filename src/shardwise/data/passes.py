"""Passes: a user's loop over a Loader, in which each ``for`` is one pass over the data.

    loader = engine.loader(DataLoader(dataset, batch_size=8, shuffle=True))
    for epoch in range(3):
        for batch in loader:                       # microbatches of this rank
            engine.backward(engine(batch))
            engine.step()

The samples of all passes form one endless line (sampler.py), and a step takes a whole global batch of it. So a pass
ends with the step that reaches the end of the data. If the global batch does not divide the data, that step also begins
the next pass: no batch is short, no sample is left out or read twice, and a pass may be a step shorter than the one
before. A loop that was left, or a checkpoint that was loaded, continues at its position, also in the middle of a pass.
"""

from collections.abc import Callable, Iterator
from typing import Any

from shardwise.data.loader import Loader


class DataPasses:
    """Loop over a Loader in which each ``for`` is one pass over the data. Made by ``engine.loader``.

    Args:
        loader: the loader.
        at_end: called at the end of a pass with the number of steps of this loop.
    """

    def __init__(self, loader: Loader, at_end: Callable[[int], None] | None = None) -> None:
        self.loader = loader
        """Loader of the microbatches; its ``step_batches``, ``state`` and ``load_state`` may be called as well."""
        self._at_end = at_end
        """Callback at the end of a pass, with the number of steps that this loop has returned."""

    def __iter__(self) -> Iterator[Any]:
        """Yield microbatches until the end of the current pass."""
        epoch, begin = self.loader.epoch, self.loader.step
        for batch in self.loader:
            yield batch
            if self.loader.epoch > epoch:  # the position moves with the last microbatch of a step
                break
        self._ended(begin)

    def steps(self) -> Iterator[list[Any]]:
        """Yield the list of microbatches of each optimizer step until the end of the pass.

        ``engine.train_step`` takes such a list.
        """
        epoch, begin = self.loader.epoch, self.loader.step
        while self.loader.epoch == epoch and self.loader.steps_left != 0:
            yield self.loader.step_batches()
        self._ended(begin)

    def _ended(self, begin: int) -> None:
        if self._at_end is not None:
            self._at_end(self.loader.step - begin)

    def __len__(self) -> int:
        """Return the number of microbatches of a whole pass.

        Raises:
            TypeError: if the data is a stream, whose length is unknown.
        """
        return self.count_steps() * self.loader.share.accumulation

    def count_steps(self, passes: int = 1) -> int:
        """Return the number of optimizer steps of the first ``passes`` passes, for a scheduler that counts steps.

        A step takes a global batch over all ranks and microbatches, and may end one pass and begin the next, so
        ``count_steps(3)`` may be less than ``3 * count_steps()``.

        Raises:
            TypeError: if the data is a stream, whose length is unknown.
        """
        size = self.loader.size
        if size is None:
            raise TypeError("a stream has no length")
        return -(-size * passes // self.loader.share.global_batch)
