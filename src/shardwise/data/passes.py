"""A user's loop over a Loader: each ``for`` is one pass over the data.

    loader = engine.loader(DataLoader(dataset, batch_size=8, shuffle=True))
    for epoch in range(3):
        for batch in loader:                       # microbatches of this rank
            engine.backward(engine(batch))
            engine.step()

The samples of all passes form one endless line (sampler.py), and a step takes a whole global batch of it. So a pass
ends with the step that reaches the end of the data, and where the data does not divide, that step begins the next pass:
no batch is short, no sample is left out or read twice, and a pass may be a step shorter than the one before.
A loop that is left, or a checkpoint that is loaded, goes on where it stood, in the middle of a pass too.
"""

from collections.abc import Callable, Iterator
from typing import Any

from shardwise.data.loader import Loader


class Passes:
    """See the module's docstring. Made by ``engine.loader``."""

    def __init__(self, loader: Loader, at_end: Callable[[int], None] | None = None) -> None:
        self.loader = loader
        """What reads; its ``step_batches``, ``state`` and ``load_state`` may be used as well."""
        self._at_end = at_end
        """Called at the end of a pass, with the number of steps that were handed out in this loop."""

    def __iter__(self) -> Iterator[Any]:
        """Microbatches until the end of the pass that the position is in."""
        epoch, begin = self.loader.epoch, self.loader.step
        for batch in self.loader:
            yield batch
            if self.loader.epoch > epoch:  # the position moves with the last microbatch of a step
                break
        self._ended(begin)

    def steps(self) -> Iterator[list[Any]]:
        """The same, the microbatches of an optimizer step together, for ``engine.train_step``."""
        epoch, begin = self.loader.epoch, self.loader.step
        while self.loader.epoch == epoch and self.loader.steps_left != 0:
            yield self.loader.step_batches()
        self._ended(begin)

    def _ended(self, begin: int) -> None:
        if self._at_end is not None:
            self._at_end(self.loader.step - begin)

    def __len__(self) -> int:
        """Return the microbatches of a whole pass: how often a ``for`` over it goes round.

        Raises:
            TypeError: if the data is a stream, whose length nobody knows.
        """
        return self.count_steps() * self.loader.share.accumulation

    def count_steps(self, passes: int = 1) -> int:
        """Return the optimizer steps of the first ``passes`` passes, for a scheduler that counts steps.

        A step takes a global batch over all ranks and microbatches, and may end one pass and begin the next, so
        ``count_steps(3)`` may be less than ``3 * count_steps()``.

        Raises:
            TypeError: if the data is a stream, whose length nobody knows.
        """
        size = self.loader.size
        if size is None:
            raise TypeError("a stream has no length")
        return -(-size * passes // self.loader.share.global_batch)
