"""OffloadPolicy: the state that lies elsewhere than on the device. The mechanisms are in tier.py and activations.py.

CPU ranks have all state in host memory, so ``host`` changes nothing on CPU ranks.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwise.base.policy import Policy
from shardwise.plan.placement import Tier
from shardwise.plan.state_form import StateForm


class OffloadPolicy(Policy):
    """Keys under ``offload:``, which place state in host memory or on a disk."""

    optimizer: Tier = "device"
    """Tier of masters and moments, where the optimizer steps: ``device``, ``host`` memory, or files on a ``disk``."""
    parameters: Tier = "device"
    """Tier of weights between their uses: the device, or the tier of masters and moments."""
    activations: Literal["device", "host"] = "device"
    """Place in which the tensors that a block saves wait for its backward pass: on the device, or in ``host``
    memory."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the Units whose state moves. The first Units stay on the device, so that the updates of the others
    overlap with the first Units' computation."""
    disk_path: Path | None = None
    """Folder for the files of ``disk``, which are scratch and removed at the end. Choose a fast disk of this host."""
    buffers: Annotated[int, Field(ge=1)] = 2
    """Number of Units whose state is read from a disk ahead of their update, and of Units whose state is being
    written."""
    state: StateForm = "fp32"
    """Form in which the optimizer's moments are kept, on every tier: as the masters (``fp32``), ``bf16`` rounded
    at random, or ``int8`` with a scale for each 16. Masters and weights do not change."""
    step: Literal["before_use", "at_end", "delayed"] = "before_use"
    """Time at which an update off the device is waited for. ``before_use``: before the next use of its Unit;
    ``at_end``: at the step's end; ``delayed``: after the next step's backward pass, which runs on the weights
    before the update (other numbers: each update counts one step late)."""

    @property
    def leaving(self) -> int:
        """Most Units whose state or gradients are on their way to or from a disk at once."""
        return 2 * self.buffers

    @model_validator(mode="after")
    def _has_folder(self) -> "OffloadPolicy":
        if self.optimizer == "disk" and self.disk_path is None:
            raise ValueError("optimizer: disk needs offload.disk_path, a folder on that disk")
        if self.parameters not in ("device", self.optimizer):
            raise ValueError(
                f"parameters: {self.parameters} with optimizer: {self.optimizer}; weights lie on the device or where "
                f"masters and moments lie: set optimizer: {self.parameters} too"
            )
        if self.step == "delayed" and self.optimizer == "device":
            raise ValueError(
                "step: delayed without optimizer: host or disk; an update on the device stands in nobody's way"
            )
        if self.step == "delayed" and (self.parameters != "device" or self.fraction < 1):
            raise ValueError(
                f"step: delayed with parameters: {self.parameters} and fraction: {self.fraction:g}; the weights of all "
                "Units stay on the device while their updates run beside a step: set parameters: device, fraction: 1"
            )
        return self
