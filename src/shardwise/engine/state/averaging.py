"""The weights' moving average (``ema:``) in the place of the weights, between two steps.

Each rank swaps its own pieces of masters and averages, and the weights are rounded from the masters again. At the end
of the context the same swap restores every bit. The swap needs the extra memory of one chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.base.errors import ConfigError, UsageError
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.away import StateOffload
from shardwise.engine.state.state import finish_updates, settle


def check_tables(averages: bool, has_tables: bool) -> None:
    """Raise ConfigError for an average beside embedding tables, because the rows of tables have no average."""
    if averages and has_tables:
        raise ConfigError(
            "ema: the rows of embedding tables have no average, and an evaluation with averaged layers on rows of the "
            "last step would be of no model; leave ema out, or train tables as parameters (nn.Embedding)"
        )


@contextmanager
def averaged(parts: EngineParts, away: StateOffload) -> Iterator[None]:
    """Replace the weights by their moving average inside the context; see ``Engine.ema``."""
    if parts.config.ema is None:
        raise UsageError("ema: this engine keeps no average of its weights; set ema: {decay: 0.999}")
    if away.is_averaged:
        yield
        return
    away.check("ema")
    if parts.accumulation.passes:
        raise UsageError(
            "ema: in the middle of a step, whose gradients are those of the weights as they are; use the average "
            "between two steps, or call engine.discard() first"
        )
    settle(parts, "ema")
    finish_updates(parts)
    _swap(parts)
    away.is_averaged = True
    try:
        yield
    finally:
        away.is_averaged = False
        _swap(parts)


def _swap(parts: EngineParts) -> None:
    """Swap masters and averages. Collective.

    Before the first update they are equal, and nothing is swapped.
    """
    for bucket, optimizer in parts.trained if parts.progress.applied_steps else ():
        with bucket.opened(changes=True):
            optimizer.state.swap_average()
        bucket.settle()
