"""Muon: SGD with momentum, whose direction is replaced by the nearest semi-orthogonal matrix. For hidden matrices.

    b ← μ b + (1 - μ) g                       d = (1 - μ) g + μ b with ``nesterov``, else b
    o = NS(d)                                 five rounds of Newton-Schulz: singular values near 1, U and V kept
    w ← w (1 - lr λ) - lr · a · o             a by ``adjust_lr_fn``, from the shape (rows, columns):
                                              original          √max(1, rows/columns)
                                              match_rms_adamw   0.2 √max(rows, columns): steps as large as AdamW's

    NS: x = d / ‖d‖, then five times  x ← a x + (b s + c s²) x  with s = x xᵀ, on the side that is shorter

Embeddings, the head and vectors have no such geometry and use AdamW. Numbers are those of ``torch.optim.Muon``.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982.
Cost:   one moment; NS is 10 · 2 · rows · columns · min(rows, columns) operations and some; whole matrices to one rank
        each and back, in ``ns_dtype`` (engine/step/whole_matrices.py).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardwise.optim.two_pass import TwoPass, WholeTensor
from shardwise.plan.registry import Needs

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Muon(TwoPass):
    """Muon optimizer: SGD with momentum and orthogonalized directions, for matrices.

    Parameters may also be flat pieces of matrices. Another component then gathers whole matrices between the two
    halves.

    Args:
        params: parameters or groups of parameters.
        lr: learning rate.
        weight_decay: decoupled weight decay λ.
        momentum: momentum factor μ.
        nesterov: True uses Nesterov's form.
        ns_coefficients: coefficients a, b, c of Newton-Schulz.
        eps: smallest norm by which a direction is divided.
        ns_steps: rounds of Newton-Schulz.
        adjust_lr_fn: scale of the step by the shape; None is ``original``.
        ns_dtype: dtype in which Newton-Schulz computes and directions travel.

    Raises:
        ValueError: if a number is out of range.
    """

    needs: ClassVar[Needs] = "matrix"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        ns_dtype: Literal["bf16", "fp32", "fp64"] = "bf16",
    ):
        if not 0 <= momentum < 1 or not 0 < ns_steps < 100 or ns_dtype not in _DTYPES:
            raise ValueError(
                f"Muon: momentum {momentum}, ns_steps {ns_steps}, ns_dtype {ns_dtype!r}; expected momentum in [0, 1), "
                f"1 to 99 steps, and one of {', '.join(_DTYPES)}"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "ns_dtype": ns_dtype,
            },
        )

    def direct_part(
        self, group: Mapping[str, Any], weights: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        """Update the momentum and write the direction d into the memory of the gradient."""
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            gradient.lerp_(momentum, group["momentum"])
        else:
            gradient.copy_(momentum)

    def look(self, group: Mapping[str, Any], weights: Tensor, direction: Tensor) -> WholeTensor:
        """Replace the direction of a whole matrix by NS of it."""
        direction.copy_(orthogonal(direction.to(dtype_of(group)), group))
        return WholeTensor(tuple(weights.shape))

    def factor(self, group: Mapping[str, Any], whole: WholeTensor) -> float:
        """Return lr times a."""
        rows, columns = whole.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
        return float(group["lr"]) * math.sqrt(max(1.0, rows / columns))

    def apply_part(
        self, group: Mapping[str, Any], weights: Tensor, direction: Tensor, state: dict[str, Any]
    ) -> None:
        """Update the weights."""
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction)


def dtype_of(group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which directions travel and Newton-Schulz computes."""
    return _DTYPES[group.get("ns_dtype", "bf16")]


def orthogonal(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return NS of a matrix of two dims, in its own dtype. The content of ``matrix`` is overwritten."""
    coefficients: Sequence[float] = group["ns_coefficients"]
    a, b, c = coefficients
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x.div_(x.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if rows > columns else x
