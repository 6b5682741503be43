"""Seconds of a model's blocks, measured in one step of a run and kept in a file, by which later runs cut stages.

    {"blocks": {"blocks.0": 0.012, "blocks.1": 0.047}, "front": 0.001, "back": 0.009}

A block's seconds are those of its forward and its backward pass of one microbatch. ``front`` and ``back`` are what the
first and the last stage compute around their blocks: the embedding, the head and the loss. Other differences between
the seconds of a stage and those of its blocks belong to no block, and are left out.

Only the proportions matter, so a file that was measured on one mesh serves others.

Cost: one small file, read once by every rank and written once by rank 0.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from shardwise.base.errors import ConfigError, PlanError
from shardwise.base.policy import Policy
from shardwise.base.regular_files import expanded, read_small_file, write_small_file
from shardwise.base.strict_json import read_object, validated

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_NANOSECONDS = 10**9


class _SecondsFile(Policy):
    """The content of the file."""

    blocks: dict[str, _Seconds]
    front: _Seconds
    back: _Seconds


class BlockSeconds(NamedTuple):
    """Measured seconds of one microbatch, forward and backward."""

    blocks: Mapping[str, float]
    """Seconds of each block, by name."""
    front: float
    """Seconds of the first stage outside its blocks."""
    back: float
    """Seconds of the last stage outside its blocks."""

    def loads(self, blocks: Sequence[str]) -> tuple[list[int], int, int]:
        """Return nanoseconds of each block, in front of the blocks and behind them.

        Args:
            blocks: Names of the blocks, in order.
        """
        each = [round(self.blocks[name] * _NANOSECONDS) for name in blocks]
        return each, round(self.front * _NANOSECONDS), round(self.back * _NANOSECONDS)


def read_seconds(path: str, blocks: Sequence[str]) -> BlockSeconds | None:
    """Return the seconds that a file holds, or None if there is no file.

    Args:
        path: The file, as ``pipeline.seconds`` names it.
        blocks: Names of the model's blocks, in order.

    Raises:
        ConfigError: if the file cannot be read, or holds something else.
        PlanError: if the file holds the seconds of other blocks.
    """
    where = f"pipeline.seconds: {path}"
    try:
        data = read_small_file(expanded(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    found = validated(_SecondsFile, read_object(data, where, kind=ConfigError), where, kind=ConfigError)
    if list(found.blocks) != list(blocks):
        raise PlanError(
            f"{where} holds the seconds of {_named(list(found.blocks))}, but the model has {_named(blocks)}; remove "
            "the file, and the next run measures this model, or name another file"
        )
    return BlockSeconds(found.blocks, found.front, found.back)


def content_of(path: str) -> str:
    """Return a digest of the file's content, which all ranks must read alike, or a word if there is none to read."""
    try:
        return hashlib.blake2b(read_small_file(expanded(path)), digest_size=8).hexdigest()
    except FileNotFoundError:
        return "no file"
    except OSError as error:
        return error.strerror or str(error)


def write_seconds(path: str, measured: BlockSeconds) -> None:
    """Write the file, and the folders that it lies in.

    Raises:
        OSError: if the file cannot be written.
    """
    file: Path = expanded(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = {"blocks": dict(measured.blocks), "front": measured.front, "back": measured.back}
    write_small_file(file, (json.dumps(plain, indent=1) + "\n").encode())


def _named(blocks: Sequence[str]) -> str:
    """Return the number of blocks with the first and the last name, as text for an error."""
    return f"{len(blocks)} blocks, {blocks[0]} to {blocks[-1]}" if blocks else "no blocks"
