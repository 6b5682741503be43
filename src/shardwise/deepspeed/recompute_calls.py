"""``deepspeed.checkpointing``: a function whose activations are computed again in the backward pass.

torch's own checkpoint, in its form without reentrance, which knows every gradient. What runs again draws the same
random numbers, sends tokens to the same experts and sees the same autocast and dtypes of operations. Models whose
blocks are alike need no call: ``recompute: full`` in our configuration, ``activation_checkpointing`` in DeepSpeed's,
wraps the blocks.
"""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from shardwise.deepspeed.living import living
from shardwise.precision.operations import running_dtypes_again

_SAID: dict[str, Any] = {}
"""What ``configure`` was told: scripts ask ``is_configured``."""


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Nothing but that ``is_configured`` is true: where activations lie follows from the engine's configuration."""
    _SAID.update(options, mpu=mpu_)


def is_configured() -> bool:
    """After ``configure``."""
    return bool(_SAID)


def reset() -> None:
    """Nothing is kept between two steps."""


def set_num_layers(nlayers: int) -> None:
    """Nothing: activations are not numbered."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing: sequence parallelism (``tensor.sequence_parallel``) cuts activations, on their way to host memory they
    are cut without it."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns; what it computes on the way is not kept."""
    for engine in living():
        if engine.ours.is_in_a_pass:
            return engine.ours.recomputed(function)(*args)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=running_dtypes_again
    )


non_reentrant_checkpoint = checkpoint
