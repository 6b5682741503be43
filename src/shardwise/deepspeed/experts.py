"""Questions about experts, for scripts that ask them of every model: there are none here yet."""

from torch import Tensor, nn


def is_moe_param(param: Tensor) -> bool:
    """False."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether ``m`` has layers of experts, how many experts)."""
    return False, 0
