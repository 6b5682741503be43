"""LARS: SGD with momentum, with the step of every tensor in proportion to the tensor's norm. For large batches.

    ratio = η ‖w‖ / (‖g‖ + λ ‖w‖)             (1 if a norm is 0)
    v ← μ v + lr · ratio · (g + λ w)
    w ← w - v

Paper: You, Gitman, Ginsburg 2017, arXiv:1708.03888, algorithm 1.
Cost:  one moment; two norms of every tensor between the halves of the update.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardwise.optim.two_pass import TwoPass, WholeTensor
from shardwise.plan.registry import Needs


class Lars(TwoPass):
    """LARS optimizer: SGD with momentum and a trust ratio for every tensor.

    Args:
        params: parameters or groups of parameters.
        lr: learning rate.
        momentum: momentum factor μ.
        weight_decay: weight decay λ.
        trust: False makes steps without the ratio.
        trust_coefficient: factor η of the ratio.

    Raises:
        ValueError: if a number is out of range.
    """

    needs: ClassVar[Needs] = "norm"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: bool = True,
        trust_coefficient: float = 1e-3,
    ):
        if not 0 <= momentum < 1 or trust_coefficient <= 0:
            raise ValueError(
                f"Lars: momentum {momentum}, trust_coefficient {trust_coefficient}; expected momentum in [0, 1) and a "
                "coefficient above 0"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust": trust,
                "trust_coefficient": trust_coefficient,
            },
        )

    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        """Keep the gradient, which is the direction whose norm is needed."""

    def factor(self, group: Mapping[str, Any], whole: WholeTensor) -> float:
        """Return lr times the ratio."""
        ratio = 1.0
        if group["trust"] and whole.weight_norm and whole.direction_norm:
            below = whole.direction_norm + group["weight_decay"] * whole.weight_norm
            ratio = group["trust_coefficient"] * whole.weight_norm / below
        return float(group["lr"]) * ratio

    def scale(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, factor: float) -> None:
        """Add the weight decay to the direction and multiply both by ``factor``."""
        direction.add_(weights, alpha=group["weight_decay"]).mul_(factor)

    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        """Update the momentum v and the weights."""
        momentum = state["momentum_buffer"]
        momentum.mul_(group["momentum"]).add_(direction)
        weights.sub_(momentum)
