"""Adam on a flat shard in one launch; the kernel reads the count of steps on the device."""

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def adam_step(
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
    """Run the step of ``kernels.adam.plain_adam_step``, all in fp32, whatever the gradient's dtype."""
    if w.numel():
        _adam[(triton.cdiv(w.numel(), _BLOCK),)](
            w,
            grad,
            m,
            v,
            step,
            w if cast is None else cast,
            w.numel(),
            1 / divisor,
            lr,
            _log2(beta1),
            _log2(beta2),
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            1 - lr * weight_decay if decoupled else weight_decay,
            DECOUPLED=decoupled,
            CAST=cast is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def _log2(beta: float) -> float:
    """Return log2 of beta, so that 2 to the power of t times the result is beta^t.

    For beta 0 the result is -10,000, whose power is 0, also in fp32.
    """
    return math.log2(beta) if beta > 0 else -1e4


@triton.jit(
    do_not_specialize=["scale", "lr", "log_beta1", "log_beta2", "rest1", "beta2", "rest2", "eps", "decay"]
)
def _adam(
    w,
    grad,
    m,
    v,
    step,
    cast,
    elements,
    scale,
    lr,
    log_beta1,
    log_beta2,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    DECOUPLED: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < elements
    count = tl.load(step).to(tl.float64)
    size = (lr / (1 - tl.exp2(count * log_beta1))).to(tl.float32)
    root = tl.sqrt(1 - tl.exp2(count * log_beta2)).to(tl.float32)
    held = tl.load(w + at, here, other=0.0)
    first = tl.load(m + at, here, other=0.0)
    second = tl.load(v + at, here, other=0.0)
    g = tl.load(grad + at, here, other=0.0).to(tl.float32) * scale
    if DECOUPLED:
        held = held * decay
    else:
        g += held * decay
    first += (g - first) * rest1
    second = second * beta2 + g * g * rest2
    below = tl.div_rn(tl.sqrt_rn(second), tl.zeros([BLOCK], tl.float32) + root) + eps
    held = held - tl.div_rn(size * first, below)
    tl.store(w + at, held, here)
    tl.store(m + at, first, here)
    tl.store(v + at, second, here)
    if CAST:
        tl.store(cast + at, held.to(cast.dtype.element_ty), here)
