"""OffloadPolicy: what lies elsewhere than on the device. The mechanisms are in tier.py and activations.py.

CPU ranks have all state in host memory: there ``host`` asks for nothing that is not so.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwise.plan.placement import Tier
from shardwise.plan.policy import Policy
from shardwise.plan.state_form import StateForm


class OffloadPolicy(Policy):
    """Keys under ``offload:``."""

    optimizer: Tier = "device"
    """Where masters and moments lie and the optimizer steps: ``device``, ``host`` memory, or files on a ``disk``."""
    parameters: Tier = "device"
    """Where weights lie between their uses: on the device, or where masters and moments lie."""
    activations: Literal["device", "host"] = "device"
    """Where what a block saves for its backward pass waits for it: on the device, or in ``host`` memory."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the Units whose state moves; the first ones stay, so that the others' updates hide behind them."""
    disk_path: Path | None = None
    """Folder of the files of ``disk``: scratch, removed at the end. A fast disk of this host."""
    buffers: Annotated[int, Field(ge=1)] = 2
    """Units whose state is read from a disk ahead of their update, and as many that are being written."""
    state: StateForm = "fp32"
    """In which form the optimizer's moments are kept, wherever they lie: as the masters (``fp32``), ``bf16`` rounded at
    random, or ``int8`` with a scale for each 16. Masters and weights stay what they are."""
    step: Literal["before_use", "at_end", "delayed"] = "before_use"
    """When an update off the device is waited for: where its Unit is used next, or at the step's end; ``delayed``:
    after the next step's backward pass, which runs on the weights before it (other numbers: each update counts one
    step late)."""

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
