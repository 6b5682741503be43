"""OffloadPolicy: which state lies in host memory instead of on the device.

On CPU ranks all state lies there already, so ``host`` asks for nothing that is not so; on an accelerator this version
keeps state on the device and refuses it (``config/auto.py``, which knows the device).
"""

from typing import Literal

from shardwise.plan.policy import Policy


class OffloadPolicy(Policy):
    """Keys under ``offload:``."""

    optimizer: Literal["none", "host"] = "none"
    """Where masters and moments lie and the optimizer steps: ``host`` for CPU ranks alone, which have them there."""
    parameters: Literal["none", "host"] = "none"
    """Where weights lie between their uses: ``host`` for CPU ranks alone, which have them there."""
