"""``deepspeed.checkpointing``: activation checkpointing of a single function call.

The function uses torch's checkpoint in its non-reentrant form, which computes every gradient. The recomputation draws
the same random numbers, sends tokens to the same experts, and uses the same autocast and operation dtypes. Models
with repeated blocks need no call: ``recompute: full`` in Shardwise's configuration, or ``activation_checkpointing``
in DeepSpeed's, wraps the blocks.
"""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from shardwise.deepspeed.calls.living import living
from shardwise.precision.operations import running_dtypes_again

_SAID: dict[str, Any] = {}
"""The options that ``configure`` got; ``is_configured`` returns True if there are any."""


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Record the call for ``is_configured``; the engine's configuration determines where activations are."""
    _SAID.update(options, mpu=mpu_)


def is_configured() -> bool:
    """Return whether ``configure`` was called."""
    return bool(_SAID)


def reset() -> None:
    """Do nothing: no state is kept between two steps."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing: activations are not numbered."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing: sequence parallelism (``tensor.sequence_parallel``) cuts activations.

    Activations that are copied to host memory are cut even without sequence parallelism.
    """


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` without keeping its intermediate results, which the backward pass recomputes."""
    for engine in living():
        if engine.ours.is_in_a_pass:
            return engine.ours.recomputed(function)(*args)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=running_dtypes_again
    )


non_reentrant_checkpoint = checkpoint
