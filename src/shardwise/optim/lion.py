"""Lion: every element moves by the learning rate, along the sign of its momentum.

    u = sign(β1 m + (1 - β1) g)
    w ← w - lr (u + λ w)
    m ← β2 m + (1 - β2) g

One moment instead of Adam's two. Steps are larger than Adam's at the same rate: use a third to a tenth of the rate, and
as many times the weight decay λ.

Paper: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
Cost:  one moment of P elements; elementwise, so any cut of the tensors is allowed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT


class Lion(optim.Optimizer):
    """Lion optimizer: the sign of a momentum, with decoupled weight decay.

    Args:
        params: parameters or groups of parameters.
        lr: learning rate.
        betas: decay rates of the direction and of the momentum.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: lr {lr}, weight_decay {weight_decay}, betas {betas}; expected lr and weight_decay of at least "
                "0, and betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (weights, gradient, momentum) of every parameter that has a gradient; make missing momenta."""
        found = []
        for weights in group["params"]:
            if weights.grad is not None:
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
                found.append((weights, weights.grad, state["exp_avg"]))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again; may be None.

        Returns:
            The result of ``closure``, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (step_beta, keep_beta) = group["lr"], group["betas"]
            for weights, gradient, momentum in self._init_group(group):
                weights.mul_(1 - lr * group["weight_decay"])
                weights.add_(momentum.lerp(gradient, 1 - step_beta).sign_(), alpha=-lr)
                momentum.lerp_(gradient, 1 - keep_beta)
        return loss
