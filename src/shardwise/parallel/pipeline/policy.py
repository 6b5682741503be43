"""PipelinePolicy: the cut of a model along "pp" and the order in which its stages run."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from shardwise.base.policy import Policy, nearest

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved_1f1b")

OF_TYPE = "type:"
"""Prefix of a ``partition`` by classes."""


class PipelinePolicy(Policy):
    """Keys under ``pipeline:``. The number of microbatches is the accumulation."""

    schedule: ScheduleName = "1f1b"
    """Order of the passes. ``gpipe``: all forwards, then all backwards; ``1f1b``: the same time with activations
    of at most "pp" microbatches; ``interleaved_1f1b``: several stages per rank, less idle time, more messages."""
    virtual_stages: PositiveInt = 1
    """Stages per rank (Megatron's virtual pipeline size); more than 1 only with ``interleaved_1f1b``."""
    partition: (
        Literal["uniform", "parameters"] | Annotated[str, Field(pattern="^type:.")] | tuple[str, ...]
    ) = "parameters"
    """Distribution of the blocks over the stages. ``uniform``: about the same number of blocks in each stage;
    ``parameters``: about the same number of parameters in each stage; ``type:REGEX``: about the same number of
    those blocks whose class name contains the expression, in any case. A list names the block that begins each
    stage but the first."""
    shapes: Literal["agreed", "described"] = "agreed"
    """Protocol for the shapes of messages between devices. ``agreed``: shapes are sent once for each shape of a
    microbatch and checked, so that no host waits for them. ``described``: shapes are sent with every message,
    for models whose activations may have other shapes for batches of the same shapes. Messages on the CPU are
    always described."""

    @property
    def keeps_one_pass(self) -> bool:
        """True if the last stage runs each microbatch's backward pass before the next one's forward pass."""
        return self.schedule == "1f1b"

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_is_known(cls, given: Any) -> Any:
        if given not in SCHEDULES:
            raise ValueError(f"{given!r} is no schedule{nearest(str(given), SCHEDULES)}")
        return given

    @field_validator("partition", mode="before")
    @classmethod
    def _partition_is_known(cls, given: Any) -> Any:
        words = ("uniform", "parameters", "type:REGEX")
        if isinstance(given, str) and given.startswith(OF_TYPE):
            try:
                re.compile(given.removeprefix(OF_TYPE))
            except re.error as error:
                raise ValueError(f"{given!r} is no regular expression of class names: {error}") from error
        elif isinstance(given, str) and given not in words[:2]:
            raise ValueError(
                f"{given!r} is no way to cut a model{nearest(given, words)}; to cut by name, give a list: [{given}]"
            )
        if isinstance(given, list | tuple):
            twice = [name for i, name in enumerate(given) if name in given[:i]]
            if twice:
                raise ValueError(f"{twice[0]!r} begins two stages; name every block once")
            if not given:
                raise ValueError('names no block; leave it out, or say "parameters" or "uniform"')
        return given

    @model_validator(mode="after")
    def _virtual_stages_fit_the_schedule(self) -> Self:
        if self.virtual_stages > 1 and self.schedule != "interleaved_1f1b":
            raise ValueError(
                f"schedule {self.schedule!r} has one stage per rank, but virtual_stages is {self.virtual_stages}; "
                "set schedule: interleaved_1f1b, or virtual_stages: 1"
            )
        if self.virtual_stages == 1 and self.schedule == "interleaved_1f1b":
            raise ValueError(
                "schedule 'interleaved_1f1b' needs several stages per rank, but virtual_stages is 1; "
                "set virtual_stages: 2, or schedule: 1f1b"
            )
        return self
