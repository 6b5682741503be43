"""Checkpoints that any number of ranks can save and any other number can load, and that survive a kill."""

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.checkpoint.inspect import FolderSummary, StepSummary, describe
from shardwise.checkpoint.load import FileDamage, LoadedCheckpoint
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.peers import JobRanks, SingleRank
from shardwise.checkpoint.piece import FlatSlice, TensorPieces
from shardwise.checkpoint.policy import CheckpointPolicy
from shardwise.checkpoint.verify import verify

__all__ = [
    "CheckpointPolicy",
    "Checkpoints",
    "FileDamage",
    "FolderSummary",
    "TensorPieces",
    "LoadedCheckpoint",
    "Manifest",
    "JobRanks",
    "FlatSlice",
    "SingleRank",
    "StepSummary",
    "describe",
    "verify",
]
