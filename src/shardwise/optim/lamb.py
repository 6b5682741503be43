"""LAMB: Adam, with the step of every tensor in proportion to the tensor's norm. For large batches.

    m ← β1 m + (1 - β1) g                     v ← β2 v + (1 - β2) g²
    u = m̂ / (√v̂ + ε) + λ w                    m̂ = m / (1 - β1^t),  v̂ = v / (1 - β2^t)
    w ← w - lr · clamp(‖w‖ / ‖u‖, low, high) · u           (ratio 1 if a norm is 0)

``correct`` sets the place of Adam's bias correction. "moments" is the paper. "step" is DeepSpeed's kernel: moments stay
as they are, so that ‖u‖ differs, and the step is multiplied by √(1 - β2^t) / (1 - β1^t). "none" corrects nothing.

Paper: You et al. 2019, arXiv:1904.00962, algorithm 2; φ is the identity between the bounds.
Cost:  two moments; two norms of every tensor between the halves of the update.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardwise.optim.two_pass import TwoPass, WholeTensor
from shardwise.plan.registry import Needs


class Lamb(TwoPass):
    """LAMB optimizer: Adam with a trust ratio for every tensor.

    Args:
        params: parameters or groups of parameters.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: addend in the denominator.
        weight_decay: weight decay λ, added to the direction.
        trust: False makes steps without the ratio.
        trust_bounds: smallest and largest ratio.
        correct: place of the bias correction: the moments, the step, or none.

    Raises:
        ValueError: if a number is out of range.
    """

    needs: ClassVar[Needs] = "norm"
    moments = ("exp_avg", "exp_avg_sq")
    counts = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: bool = True,
        trust_bounds: tuple[float, float] = (0.01, 10.0),
        correct: Literal["moments", "step", "none"] = "moments",
    ):
        if not all(0 <= beta < 1 for beta in betas) or not 0 <= trust_bounds[0] <= trust_bounds[1]:
            raise ValueError(
                f"Lamb: betas {betas}, trust_bounds {trust_bounds}; expected betas in [0, 1), and bounds of at least 0 "
                "in order"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "trust": trust,
                "trust_bounds": trust_bounds,
                "correct": correct,
            },
        )

    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        """Update the moments and write the direction u into the memory of the gradient."""
        first, second = self._left_of_bias(group, state) if group["correct"] == "moments" else (1.0, 1.0)
        beta1, beta2 = group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # m̂ / (√v̂ + ε) = √second / first · m / (√v + √second ε): few passes over memory.
        below = v.sqrt().add_(group["eps"] * math.sqrt(second))
        torch.mul(weights, group["weight_decay"], out=gradient)
        gradient.addcdiv_(m, below, value=math.sqrt(second) / first)

    def factor(self, group: Mapping[str, Any], whole: WholeTensor) -> float:
        """Return lr times the trust ratio."""
        ratio = 1.0
        if group["trust"] and whole.weight_norm and whole.direction_norm:
            low, high = group["trust_bounds"]
            ratio = min(max(whole.weight_norm / whole.direction_norm, low), high)
        return float(group["lr"]) * ratio

    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        """Update the weights."""
        first, second = self._left_of_bias(group, state) if group["correct"] == "step" else (1.0, 1.0)
        weights.sub_(direction, alpha=math.sqrt(second) / first)

    def _left_of_bias(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[float, float]:
        """Return 1 - β^t of both moments."""
        beta1, beta2 = group["betas"]
        t = float(state["step"])
        return 1 - beta1**t, 1 - beta2**t
