"""The optimizers of a table's rows as data: their numbers, and the state that each keeps beside a row's weights.

A row of the slab is (weights [D], state). With g = scale · gradient (+ decay · w where ``weight_decay`` is L2):

    Sgd             w -= lr g
    Momentum        b = momentum b + g;  w -= lr b                        nesterov: w -= lr (g + momentum b)
    Adagrad         s += g²;  w -= lr g / (sqrt(s) + eps)
    RowwiseAdagrad  s += mean over d of g²;  w -= (lr / (sqrt(s) + eps)) g                         one s a row
    Adam            m += (1 - beta1)(g - m);  v += (1 - beta2)(g² - v)
        lazy        w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) · m / (sqrt(v) + eps)
        exact       w -= lr / (1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Ftrl            n' = n + g²;  z += g - (sqrt(n') - sqrt(n)) / lr · w;  n = n'
                    w = 0 where |z| <= l1, else (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + l2)

t counts the steps of the whole table. What a step without gradient would do to a row is left out, as torch's sparse
gradients have it; all equal ``torch.optim`` on the touched rows (lazy Adam: SparseAdam). An ``exact`` Adam is Adam on
the dense table (row_replay.py). ``weight_decay`` of Adam is decoupled (AdamW). With lr = 0 no weight moves; moments
and sums of squares go on, but z and n of FTRL, which are made of parts divided by lr, stay as they are.

Papers: Duchi et al. 2011 (Adagrad); Kingma, Ba 2015, arXiv:1412.6980; McMahan et al. 2013 (FTRL-proximal).
Shapes: D width.
"""

import math
from typing import NamedTuple


class Sgd(NamedTuple):
    """No state."""

    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return 0

    def start(self, width: int, step: int = 0) -> list[float]:
        return []


class Momentum(NamedTuple):
    """State: b [D]."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * width


class Adagrad(NamedTuple):
    """State: s [D]."""

    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [self.initial] * width


class RowwiseAdagrad(NamedTuple):
    """State: s [1]."""

    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        return 1

    def start(self, width: int, step: int = 0) -> list[float]:
        return [self.initial]


class Adam(NamedTuple):
    """State: m [D], v [D]; when exact also the step at which the row stands [1], whole up to 2^24 in fp32."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    exact: bool = False

    def columns(self, width: int) -> int:
        return 2 * width + self.exact

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * (2 * width) + [float(step)] * self.exact

    @property
    def horizon(self) -> int | None:
        """Missed steps after which a row no longer moves for its moments; None where it never stops."""
        ratio = self.beta1 / math.sqrt(self.beta2) if self.beta2 > 0 else math.inf
        if ratio == 0:
            return 1
        return math.ceil(-60 * math.log(2) / math.log(ratio)) if ratio < 1 else None


class Ftrl(NamedTuple):
    """State: z [D], n [D]."""

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial: float = 0.0

    def columns(self, width: int) -> int:
        return 2 * width

    def start(self, width: int, step: int = 0) -> list[float]:
        return [0.0] * width + [self.initial] * width


RowOptimizer = Sgd | Momentum | Adagrad | RowwiseAdagrad | Adam | Ftrl
"""Each has ``columns(width)``, the columns of state beside the weights, and ``start(width, step)``, their content in
a row that is made after step ``step``."""


def adam_step(optimizer: Adam, lr: float, step: int) -> tuple[float, float, float]:
    """Step size, root of the second moment's correction, share that decay leaves."""
    corrected1, root2 = 1 - optimizer.beta1**step, math.sqrt(1 - optimizer.beta2**step)
    keep = 1 - lr * optimizer.weight_decay
    if optimizer.exact:
        return lr / corrected1, root2, keep
    return lr * root2 / corrected1, 1.0, keep
