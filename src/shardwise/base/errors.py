"""The tree of all errors that Shardwise raises on purpose.

    ShardwiseError
    ├── ConfigError        a key, a value or a combination in the configuration      (also a ValueError)
    ├── MeshError          axes that do not cover the ranks
    ├── PlanError          a model that cannot be planned: no Units, a tensor without a placement
    ├── UsageError         a call that cannot work where it was made
    ├── TableFullError     an embedding table that received more keys than it may hold
    ├── DataError          a missing, empty or damaged source of data
    │   └── SourceError    ... because the configuration names a source that does not exist  (also a ConfigError)
    ├── NonFiniteError     a NaN or an infinity in loss or gradients
    ├── DivergedError      copies of the same state that differ between ranks, or state that changed while it lay still
    ├── CommError          a collective that failed, by rank, operation, Unit and step
    │   └── DeadlineError  ... because another rank did not arrive in time
    ├── OutOfMemoryError   memory exhausted while an engine was built or computed       (also a MemoryError and a
    │                      RuntimeError, as torch's own is)
    ├── RankError          a failure of a rank that ``launch`` started, with its traceback
    ├── TierError               state on disk (``offload``) that cannot be read or written
    │   └── DamagedStateError   ... because its bytes changed                         (also a DamagedError)
    └── CheckpointError         a checkpoint that cannot be written or read
        ├── MismatchError       ... because it belongs to another model
        └── DamagedError        ... because its bytes changed: names the file and the tensor

A message contains the place, the given value, the expected value and a suggested repair.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ShardwiseError(Exception):
    """The base class of every error that Shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A key, a value or a combination in the configuration."""


class MeshError(ShardwiseError):
    """Axes that do not cover the ranks."""


class PlanError(ShardwiseError):
    """A model that cannot be planned."""


class UsageError(ShardwiseError):
    """A call that cannot work at the place or time of the call."""


class TableFullError(ShardwiseError):
    """An embedding table that received more keys than it may hold."""


class DataError(ShardwiseError):
    """A missing, empty or damaged source of data."""


class SourceError(DataError, ConfigError):
    """A source of data or a tokenizer that the configuration names and that does not exist or cannot be used."""


class NonFiniteError(ShardwiseError):
    """A NaN or an infinity in the loss or in the gradients."""


class DivergedError(ShardwiseError):
    """Copies of the same state that differ between ranks, or state that changed between two steps.

    Attributes:
        last_good_step: Last step after whose update all copies were seen to be equal; None if there was none.
        restored_step: Step that the engine has loaded with ``guard.on_alarm: restore``; None: nothing was loaded.
        trainer: What ``save`` was given as ``trainer`` with the loaded step.
    """

    last_good_step: int | None = None
    restored_step: int | None = None
    trainer: "Mapping[str, Any] | None" = None


class CommError(ShardwiseError):
    """A collective that failed."""


class DeadlineError(CommError):
    """A collective in which another rank did not arrive in time."""


class OutOfMemoryError(ShardwiseError, MemoryError, RuntimeError):
    """Memory that was exhausted while an engine was built or computed."""


class RankError(ShardwiseError):
    """A failure of a rank that ``shardwise.launch`` started."""


class TierError(ShardwiseError):
    """State on disk that cannot be read or written; the last checkpoint is unaffected."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written or read."""


class MismatchError(CheckpointError):
    """A checkpoint of another model.

    Args:
        what: Difference between the checkpoint and the model.
        way: Suggested repair for a Python program.
        missing: Names in the model that the checkpoint lacks, or stores in another shape.
        unexpected: Names in the checkpoint that the model lacks.
    """

    def __init__(
        self, what: str, way: str = "", missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{what}. {way}" if way else what)
        self.what, self.missing, self.unexpected = what, tuple(missing), tuple(unexpected)


class DamagedError(CheckpointError):
    """A checkpoint, or state on disk, whose bytes changed after it was written."""


class DamagedStateError(TierError, DamagedError):
    """State on disk whose bytes changed after they were written; the last checkpoint is unaffected."""
