"""CheckpointPolicy: when and how the model state is saved."""

from pydantic import Field

from shardwise.plan.policy import Policy


class CheckpointPolicy(Policy):
    """When the model state is saved, how much of the past is kept, and whether training waits."""

    every: int | None = Field(default=None, ge=1)
    """Steps between two saves; left out, the run saves on request, at its end and on SIGTERM alone."""
    keep_last: int | None = Field(default=2, ge=1)
    """Steps kept, newest first; ``null`` keeps all. The newest is never removed before a newer one is verified."""
    keep_every: int | None = Field(default=None, ge=1)
    """Steps whose number divides by this are kept besides."""
    keep_best: bool = False
    """Save after every evaluation that is the best so far (validation loss, or AUC of clicks), and keep that step
    besides, whatever comes after it; a run that is resumed goes on keeping it."""
    asynchronous: bool = True
    """Copy to host memory, then write behind training; costs one host copy of this rank's state."""
    read_back: bool = True
    """Read each save back before it is committed; catches file systems that lose writes."""
    tolerate_failures: int = Field(default=3, ge=0)
    """Saves in a row that may fail, because the disk is full or has an error, while training continues: each failure is
    logged, and the next save is tried when it is due. One more ends the run, and so does the last save of a run if it
    fails twice."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Seconds that a rank waits for the others within one phase of a save or load."""
