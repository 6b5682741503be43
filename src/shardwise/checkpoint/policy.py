"""Keys under ``checkpoint:``: when and how the model state is saved."""

from typing import Literal

from pydantic import Field

from shardwise.base.policy import Policy

HIGHER_IS_BETTER = {"loss": False, "log_loss": False, "auc": True, "accuracy": True}
"""True for the metrics of evaluations of which a higher value is better."""


class CheckpointPolicy(Policy):
    """Times of saves, number of steps kept, and whether training waits for a save."""

    every: int | None = Field(default=None, ge=1)
    """Steps between two saves. If left out, the run saves only on request, at its end and on SIGTERM."""
    keep_last: int | None = Field(default=2, ge=1)
    """Steps kept, newest first; ``null`` keeps all. The newest is never removed before a newer one is verified."""
    keep_every: int | None = Field(default=None, ge=1)
    """Steps between saved steps that are kept in addition: every step whose number is a multiple of this."""
    keep_best: int = Field(default=0, ge=0)
    """Steps kept for their evaluation, in addition: the run saves after every evaluation that is among this many best.

    ``true`` is 1. The best steps stay whatever comes after them, also when the run is resumed; ``--step best`` is the
    first of them. An evaluation whose result is not a number makes no step the best.
    """
    best_metric: str | None = None
    """Metric of an evaluation that says which steps are the best: ``loss``; of clicks ``auc`` or ``log_loss``; of
    pictures ``accuracy``, ``loss`` or a metric of ``train.metrics``. Left out: ``auc``, ``accuracy``, or else ``loss``.
    """
    best_is: Literal["higher", "lower"] | None = None
    """Better values of ``best_metric``, which a metric of ``train.metrics`` needs; the other metrics have theirs."""
    tables_full_every: int | None = Field(default=None, ge=1)
    """Saves after which the rows of embedding tables are saved in full again. The saves between hold only the rows that
    changed since the last full one, which is kept as long as a later step needs it. Rows take 4 bytes more. Left out,
    every save holds all rows. The first save after a load is full."""
    asynchronous: bool = True
    """Copy to host memory, then write while training continues; costs one host copy of this rank's state."""
    read_back: bool = True
    """Read each save back before it is committed; catches file systems that lose writes."""
    tolerate_failures: int = Field(default=3, ge=0)
    """Saves in a row that may fail, because the disk is full or has an error, while training continues.

    Each failure is logged, and the next save is tried when it is due. One more failure ends the run, and so does the
    last save of a run if it fails twice.
    """
    timeout_s: float = Field(default=900.0, gt=0)
    """Seconds that a rank waits for the other ranks within one phase of a save or load."""
