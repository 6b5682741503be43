"""ZeroPolicy: how model state is cut along the data-parallel axes."""

from typing import Literal

from pydantic import Field, NonNegativeInt

from shardwise.plan.policy import Policy


class ZeroPolicy(Policy):
    """Keys under ``zero:``."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is cut along "dp_shard": 1 the optimizer's state, 2 also gradients, 3 also weights."""
    units: Literal["auto"] | list[str] = "auto"
    """Modules whose parameters move together: ``auto`` takes the repeated blocks; or patterns of module names, in which
    ``*`` stands for one part of the name (``blocks.*``)."""
    whole_pass: list[str] = Field(default_factory=list)
    """Stage 3: patterns of parameter names that are gathered for the whole pass and not with their Unit, because code
    outside their own module uses them (``blocks.0.weight``; ``*`` stands for one part of the name)."""
    methods: list[str] = Field(default_factory=list)
    """Stage 3: methods of Units beside ``forward`` that are called from outside, as patterns (``encoder.encode``,
    ``blocks.*.step``): the Unit's weights are gathered for them too."""
    prefetch_units: Literal["auto"] | NonNegativeInt = "auto"
    """Units gathered ahead of their use at stage 3; ``auto`` is 1 where a collective runs beside the computation
    (GPUs), else 0."""
    reduce: Literal["auto", "microbatch", "step"] = "auto"
    """When gradients travel under accumulation: every microbatch (gradients stay cut in between, less memory) or once
    per step (less traffic); ``auto`` is microbatch at stages 2 and 3."""
    share_memory: bool = True
    """Gathered Units of equal size take turns in a few slots; false gives each its own."""
    debug: bool = Field(default=False)
    """Released memory is filled with NaN, so that a gather that was missed cannot pass for a right number."""
    regather: Literal["microbatch", "step"] = "microbatch"
    """Stage 3 in a pipeline: whether weights are gathered for every microbatch's passes, or once for a step, at the
    memory of stage 2's weights."""
