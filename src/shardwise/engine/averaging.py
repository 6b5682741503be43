"""The weights' moving average (``ema:``) in the place of the weights, between two steps.

Masters and averages exchange their numbers, each rank its own pieces, and the weights are the masters' again, rounded;
at the end of the context the same exchange brings every bit back. No memory is taken beyond a chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.engine.away import Away
from shardwise.engine.parts import Parts
from shardwise.engine.state import finish_updates, settle
from shardwise.plan.errors import ConfigError, UsageError


def check_tables(averages: bool, has_tables: bool) -> None:
    """Raise ConfigError for an average beside embedding tables, whose rows have none."""
    if averages and has_tables:
        raise ConfigError(
            "ema: the rows of embedding tables have no average, and an evaluation with averaged layers on rows of the "
            "last step would be of no model; leave ema out, or train tables as parameters (nn.Embedding)"
        )


@contextmanager
def averaged(parts: Parts, away: Away) -> Iterator[None]:
    """See ``Engine.ema``."""
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


def _swap(parts: Parts) -> None:
    """Exchange masters and averages; before the first update they are equal. Collective."""
    for bucket, optimizer in parts.trained if parts.progress.applied_steps else ():
        with bucket.opened(changes=True):
            optimizer.state.swap_average()
        bucket.settle()
