"""PipelinePolicy: the cut of a model along "pp" and the order in which its stages run."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from shardwise.base.policy import Policy, nearest
from shardwise.parallel.pipeline.foreign_schedules import ours_for

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "zb_greedy"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SPLIT: tuple[ScheduleName, ...] = ("zb_h1", "zb_v", "dualpipe_v", "zb_greedy")
"""Schedules that compute the gradients of weights apart from those of inputs."""
FOLDED: tuple[ScheduleName, ...] = ("zb_v", "dualpipe_v", "zb_greedy")
"""Schedules that place two stages on each rank, in a V (plan/stage_places.py)."""

OF_TYPE = "type:"
"""Prefix of a ``partition`` by classes."""


class PipelinePolicy(Policy):
    """Keys under ``pipeline:``. The number of microbatches is the accumulation."""

    schedule: ScheduleName = "1f1b"
    """Order of the passes. ``gpipe``: all forwards, then all backwards; ``1f1b``: the same time with activations
    of at most "pp" microbatches; ``interleaved_1f1b``: several stages per rank, less idle time, more messages;
    ``zb_h1``: 1f1b that computes the gradients of weights later, when a rank would be idle; ``zb_v`` and
    ``dualpipe_v``: the same with two stages per rank in a V, where rank 0 has the first and the last stage;
    ``zb_greedy``: a V whose order is made from the seconds of each stage's passes, which the second step measures."""
    virtual_stages: PositiveInt = 1
    """Stages per rank (Megatron's virtual pipeline size); more than 1 only with ``interleaved_1f1b``. A schedule in a V
    has 2, which need not be given."""
    live: Annotated[float, Field(ge=1)] | None = None
    """Most microbatches whose activations a rank of ``zb_greedy`` keeps at a time, each on both of its stages; None:
    "pp" + 1/2."""
    wgrad_delay: NonNegativeInt | None = None
    """Most microbatches by which a rank of ``zb_h1`` computes the gradients of weights behind those of inputs. With
    fewer, less memory is held by what waits; 0: a rank sends the gradient of the input, and then computes those of the
    weights. None: 0 under ``recompute: full``, because what waits are the inputs of layers that recomputation frees;
    otherwise as many as make the step shortest, up to "pp" - 1 on the last rank."""
    partition: (
        Literal["uniform", "parameters", "measured"]
        | Annotated[str, Field(pattern="^type:.")]
        | tuple[str, ...]
    ) = "parameters"
    """Distribution of the blocks over the stages. ``uniform``: about the same number of blocks in each stage;
    ``parameters``: about the same number of parameters in each stage; ``measured``: about the same seconds in each
    stage, as ``seconds`` has them; ``type:REGEX``: about the same number of those blocks whose class name contains the
    expression, in any case. Under a schedule in a V these balance the two stages of each rank together, except
    ``uniform``. A list names the block that begins each stage but the first."""
    seconds: Annotated[str, Field(min_length=1)] | None = None
    """File of the seconds of each block, for ``partition: measured``. The first run finds no file: it cuts by
    parameters, measures its second step and writes the file. Later runs cut by the file and leave it as it is; remove
    it to measure anew. All ranks must read the same content."""
    shapes: Literal["agreed", "described"] = "agreed"
    """Protocol for the shapes of messages between devices. ``agreed``: shapes are sent once for each shape of a
    microbatch and checked, so that no host waits for them. ``described``: shapes are sent with every message,
    for models whose activations may have other shapes for batches of the same shapes. Messages on the CPU are
    always described."""

    @property
    def keeps_one_pass(self) -> bool:
        """True if the last stage runs each microbatch's backward pass before the next one's forward pass."""
        return self.schedule == "1f1b"

    @property
    def folded(self) -> bool:
        """True if the schedule places its stages on the ranks in a V."""
        return self.schedule in FOLDED

    @property
    def splits_backward(self) -> bool:
        """True if the schedule computes the gradients of weights apart from those of inputs."""
        return self.schedule in SPLIT

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of each rank along "pp"."""
        return 2 if self.folded else self.virtual_stages

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_is_known(cls, given: Any) -> Any:
        if given not in SCHEDULES and (ours := ours_for(str(given))) is not None:
            raise ValueError(f"{given!r} is another tool's name of a schedule; here it is {ours}")
        if given not in SCHEDULES:
            raise ValueError(f"{given!r} is no schedule{nearest(str(given), SCHEDULES)}")
        return given

    @field_validator("partition", mode="before")
    @classmethod
    def _partition_is_known(cls, given: Any) -> Any:
        words = ("uniform", "parameters", "measured", "type:REGEX")
        if isinstance(given, str) and given.startswith(OF_TYPE):
            try:
                re.compile(given.removeprefix(OF_TYPE))
            except re.error as error:
                raise ValueError(f"{given!r} is no regular expression of class names: {error}") from error
        elif isinstance(given, str) and given not in words[:3]:
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
        if self.folded and self.virtual_stages > 2:
            raise ValueError(
                f"schedule {self.schedule!r} has two stages per rank, but virtual_stages is {self.virtual_stages}; "
                "leave virtual_stages out"
            )
        if self.virtual_stages > 1 and not self.folded and self.schedule != "interleaved_1f1b":
            raise ValueError(
                f"schedule {self.schedule!r} has one stage per rank, but virtual_stages is {self.virtual_stages}; "
                "set schedule: interleaved_1f1b, or virtual_stages: 1"
            )
        if self.virtual_stages == 1 and self.schedule == "interleaved_1f1b":
            raise ValueError(
                "schedule 'interleaved_1f1b' needs several stages per rank, but virtual_stages is 1; "
                "set virtual_stages: 2, or schedule: 1f1b"
            )
        if (self.partition == "measured") != (self.seconds is not None):
            raise ValueError(
                "partition: measured and seconds belong together: seconds names the file in which the first run writes "
                f"the seconds of each block, by which later runs cut; partition is {self.partition!r} and seconds is "
                f"{self.seconds!r}; set both, as {{partition: measured, seconds: blocks.json}}, or neither"
            )
        if self.live is not None and self.schedule != "zb_greedy":
            raise ValueError(
                f"live is {self.live}, but schedule {self.schedule!r} has a limit of its own; leave live out, or set "
                "schedule: zb_greedy"
            )
        if self.wgrad_delay is not None and self.schedule != "zb_h1":
            raise ValueError(
                f"wgrad_delay is {self.wgrad_delay}, but only schedule 'zb_h1' has such a limit, given "
                f"{self.schedule!r}; leave wgrad_delay out, or set schedule: zb_h1"
            )
        return self

    def beside_recomputation(self, is_full: bool) -> Self:
        """Return the policy with the ``wgrad_delay`` that suits recomputation, if none was given.

        Args:
            is_full: True if whole blocks recompute.
        """
        follows = is_full and self.schedule == "zb_h1" and self.wgrad_delay is None
        return self.model_copy(update={"wgrad_delay": 0}) if follows else self
