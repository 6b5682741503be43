"""``deepspeed.git_version_info``: DeepSpeed's facts about its build, with the values of the installed torch."""

from typing import Any

import torch

from shardwise.deepspeed.calls.builders import __compatible_ops__, __installed_ops__
from shardwise.deepspeed.names import FOLLOWED_VERSION

version = FOLLOWED_VERSION
git_hash = git_branch = "shardwise"
accelerator_name = "cpu" if not torch.accelerator.is_available() else "cuda"
torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
    "bf16_support": True,
}
compatible_ops = __compatible_ops__
installed_ops = __installed_ops__
