"""ZeroPolicy: the cut of model state along the data-parallel axes."""

from typing import Literal

from pydantic import Field, NonNegativeInt

from shardwise.base.policy import Policy


class ZeroPolicy(Policy):
    """Keys under ``zero:``, which set how model state is cut along the data-parallel axes."""

    stage: Literal[0, 1, 2, 3] = 0
    """State that is cut along "dp_shard": 1 cuts the optimizer's state, 2 also the gradients, 3 also the weights."""
    units: Literal["auto"] | list[str] = "auto"
    """Modules whose parameters move together, which FSDP wraps: ``auto`` takes the repeated blocks; a list gives
    patterns of module names, in which ``*`` stands for one part of the name (``blocks.*``)."""
    external_parameters: list[str] = Field(default_factory=list)
    """Stage 3: patterns of the names of parameters that code outside their own module uses (DeepSpeed's external
    parameters). These parameters are gathered for the whole pass and not with their Unit (``blocks.0.weight``;
    ``*`` stands for one part of the name)."""
    forward_methods: list[str] = Field(default_factory=list)
    """Stage 3: patterns of the methods of Units that are called from outside like ``forward`` (``encoder.encode``,
    ``blocks.*.step``). The Unit's weights are gathered for these methods too (FSDP's
    ``register_fsdp_forward_method``)."""
    reshard_after_forward: bool = True
    """Stage 3: true frees the gathered weights of a Unit after its forward pass and gathers the weights again for
    its backward pass, as in FSDP. False, which only pipelines accept, gathers the weights once a step and keeps
    them through all microbatches; the weights then take as much memory as at stage 2. Without a pipeline use
    stage 2 instead."""
    prefetch_bytes: Literal["auto"] | NonNegativeInt = "auto"
    """Bytes of weights gathered ahead of their use at stage 3: many small Units, or a single larger Unit. ``auto``
    is 64 MiB where a collective runs beside the computation (GPUs) or weights lie on a disk
    (``offload.parameters``), else 0, which gathers nothing ahead. A shard that lies on another tier is brought
    as far ahead of its gather. Above 0 the gathers of stages 1 and 2, which follow an update, run beside the
    next forward pass; code that reads a parameter before its gather ends waits for the gather."""
    reductions_under_way: Literal["auto"] | NonNegativeInt = "auto"
    """Units whose gradients may still be in transfer while the backward pass goes on, at stages 2 and 3; each Unit
    takes a further buffer of a Unit's size. ``auto`` is 1 where a collective runs beside the computation
    (GPUs), else 0."""
    reduce: Literal["auto", "microbatch", "step"] = "auto"
    """Time at which gradients are reduced under accumulation: every microbatch (gradients stay cut in between,
    less memory) or once per step (less traffic). ``auto`` is microbatch at stages 2 and 3 and if a step has a
    single microbatch."""
    exchange: Literal["auto", "sum", "all_to_all", "two_level"] = "auto"
    """The way in which ranks that each keep one range of a gradient sum it, at stages 1 to 3. ``sum`` casts to the
    dtype of the sum and calls the backend's own reduce-scatter; ``all_to_all`` sends ranges in the gradient's dtype and
    adds them where they arrive; ``two_level`` does so inside each host first and then across hosts, in the dtype
    ``precision.reduce``. ``auto`` takes, where the ranks lie on several hosts, the way with the fewest bytes on the
    link of a host, and inside one host ``all_to_all`` for gradients narrower than their sum."""
    reuse_buffers: bool = True
    """True lets gathered Units of equal size take turns in a few buffers; false gives each Unit its own buffer."""
    debug: bool = Field(default=False)
    """True fills released memory with NaN, so that a missed gather cannot give plausible numbers."""
