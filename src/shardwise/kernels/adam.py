"""One step of Adam or AdamW on a flat shard: unscaling, clipping, moments, decay and the 16-bit weight in one pass.

    g  = grad / divisor                                   the sum's weight, the loss scale and the clip in one number
    g += decay · w                     (Adam)             w -= lr · decay · w                   (AdamW), before the step
    m  = m + (1 - beta1)(g - m)        v = beta2 v + (1 - beta2) g²
    w -= lr/(1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    cast = w, rounded

torch's fused Adam needs the gradient in the master's dtype and leaves the rounding to another pass: with 16-bit
gradients and weights 40 bytes an element go through memory, with this kernel 28. Masters and moments are fp32,
gradients of any dtype; ``t`` lies on the device and is read there.

The plain form is the reference, and equal to ``torch.optim`` up to the last bits of fp32. Triton's form computes what
depends on t in fp64 and the rest in fp32 without contraction; roots and quotients are rounded correctly.

Papers: Kingma, Ba 2015, arXiv:1412.6980; Loshchilov, Hutter 2019, arXiv:1711.05101.
Shapes: N elements.
"""

from typing import NamedTuple

from torch import Tensor

from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation


class AdamRule(NamedTuple):
    """Numbers of a step."""

    lr: float
    """Learning rate of this step."""
    beta1: float
    """Decay rate of the first moment."""
    beta2: float
    """Decay rate of the second moment."""
    eps: float
    """Addend in the denominator."""
    weight_decay: float
    decoupled: bool
    """True for AdamW, whose weight decay is decoupled."""


def adam_step(
    rule: AdamRule,
    w: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    divisor: float = 1.0,
    cast: Tensor | None = None,
) -> None:
    """Update ``w``, ``m`` and ``v`` [N] from ``grad`` [N], in place, and add 1 to ``step`` [].

    Args:
        rule: numbers of the step.
        w: master.
        grad: gradient, of any dtype.
        m: first moment.
        v: second moment.
        step: number of steps before this one.
        divisor: divisor of the gradient.
        cast: receives the new ``w``, rounded; may be None.

    Raises:
        ValueError: if the tensors differ in size or are not contiguous.
    """
    given = [each for each in (w, grad, m, v, cast) if each is not None]
    if any(each.shape != w.shape or not each.is_contiguous() for each in given):
        sizes = [list(each.shape) for each in given]
        raise ValueError(
            f"master, gradient, moments and weight are {sizes}; expected dense tensors of one size"
        )
    step += 1
    form = _adam_step if fused(w, grad, m, v) else plain_adam_step
    form(w, grad, m, v, step, cast, divisor, *rule)


def plain_adam_step(
    w: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    cast: Tensor | None,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Run the step in plain torch operations, with ``step`` already counted: the reference."""
    count = step.double()
    size, root = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
    g = grad.to(w.dtype) * (1 / divisor)
    if decoupled:
        w *= 1 - lr * weight_decay
    else:
        g = g + w * weight_decay
    m += (g - m) * (1 - beta1)
    v.mul_(beta2).add_(g * g * (1 - beta2))
    w -= size.to(w.dtype) * m / (v.sqrt() / root.to(w.dtype) + eps)
    if cast is not None:
        cast.copy_(w)


@device_operation(
    "adam_step(Tensor(a!) w, Tensor grad, Tensor(b!) m, Tensor(c!) v, Tensor step, Tensor(d!)? cast, float divisor, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled) -> ()",
    lambda *arguments: None,
)
def _adam_step(
    w: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, cast: Tensor | None, *numbers: float
) -> None:
    if not fused(w):
        return plain_adam_step(w, grad, m, v, step, cast, *numbers)  # type: ignore[arg-type]
    from shardwise.kernels.fused import adam as kernels

    return kernels.adam_step(w, grad, m, v, step, cast, *numbers)  # type: ignore[arg-type]
