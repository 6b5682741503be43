"""Adam and AdamW without the correction of their bias, as BERT was trained.

    m ← β1 m + (1 - β1) g         v ← β2 v + (1 - β2) g²
    w ← w - lr · m / (√v + ε)

The moments begin at 0 and are too small at first. In the beginning steps are larger than Adam's by
(1 - β1^t) / √(1 - β2^t), so these rules need a warmup. Weight decay is decoupled (``UncorrectedAdamW``) or part of the
gradient (``UncorrectedAdam``).

Paper: Devlin et al. 2018, arXiv:1810.04805 (its code); Mosbach et al. 2020, arXiv:2006.04884, on the effect.
Cost:  two moments of P elements; elementwise, so any cut of the tensors is allowed.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT


class UncorrectedAdam(optim.Optimizer):
    """Adam without bias correction; weight decay is part of the gradient.

    Args:
        params: parameters or groups of parameters.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: addend in the denominator.
        weight_decay: weight decay.

    Raises:
        ValueError: if a number is out of range.
    """

    decouples: ClassVar[bool] = False
    """True if weight decay acts on the weights themselves."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"{type(self).__name__}: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}; expected lr "
                "and weight_decay of at least 0, eps above 0, and betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Return (weights, gradient, state) of every parameter with a gradient; make the state that is missing."""
        found = []
        for weights in group["params"]:
            if weights.grad is not None:
                state = self.state[weights]
                if not state:
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = torch.zeros_like(weights, memory_format=torch.preserve_format)
                found.append((weights, weights.grad, state))
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for weights, gradient, state in self._init_group(group):
                if decay and self.decouples:
                    weights.mul_(1 - lr * decay)
                elif decay:
                    gradient = gradient.add(weights, alpha=decay)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(gradient, 1 - beta1)
                v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                weights.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-lr)
        return loss


class UncorrectedAdamW(UncorrectedAdam):
    """AdamW without bias correction; weight decay acts on the weights themselves."""

    decouples: ClassVar[bool] = True
