"""The optimizers of a table's rows as data: their numbers, and the state that each keeps beside a row's weights.

A row of the slab is (weights [D], state). With g = scale · gradient (+ decay · w if ``weight_decay`` is L2):

    Sgd             w -= lr g
    Momentum        b = momentum b + g;  w -= lr b                        nesterov: w -= lr (g + momentum b)
    Adagrad         s += g²;  w -= lr g / (sqrt(s) + eps)
    RowwiseAdagrad  s += mean over d of g²;  w -= (lr / (sqrt(s) + eps)) g                         one s a row
    Adam            m += (1 - beta1)(g - m);  v += (1 - beta2)(g² - v)
        lazy        w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) · m / (sqrt(v) + eps)
        exact       w -= lr / (1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Ftrl            n' = n + g²;  z += g - (sqrt(n') - sqrt(n)) / lr · w;  n = n'
                    w = 0 if |z| <= l1, else (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + l2)

t counts the steps of the whole table. The effect of a step without gradient on a row is left out, as with torch's
sparse gradients; all equal ``torch.optim`` on the touched rows (lazy Adam: SparseAdam). An ``exact`` Adam is Adam on
the dense table (row_replay.py). ``weight_decay`` of Adam is decoupled (AdamW). With lr = 0 no weight moves; moments
and sums of squares continue, but z and n of FTRL, which are made of parts divided by lr, stay as they are.

Papers: Duchi et al. 2011 (Adagrad); Kingma, Ba 2015, arXiv:1412.6980; McMahan et al. 2013 (FTRL-proximal).
Shapes: D width.
"""

import math
from typing import NamedTuple


class Sgd(NamedTuple):
    """Gradient descent, without state."""

    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return 0

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a new row."""
        return []


class Momentum(NamedTuple):
    """Gradient descent with momentum. State: b [D]."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a new row."""
        return [0.0] * width


class Adagrad(NamedTuple):
    """Adagrad with one sum for each weight. State: s [D]."""

    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return width

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a new row."""
        return [self.initial] * width


class RowwiseAdagrad(NamedTuple):
    """Adagrad with one sum for each row. State: s [1]."""

    eps: float = 1e-8
    initial: float = 0.0
    weight_decay: float = 0.0

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return 1

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a new row."""
        return [self.initial]


class Adam(NamedTuple):
    """Adam on touched rows, or on the whole table if ``exact``.

    State: m [D], v [D]; if exact also the step up to which the row is updated [1], a whole number up to 2^24 in fp32.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    exact: bool = False

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return 2 * width + self.exact

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a row that is made after ``step`` steps."""
        return [0.0] * (2 * width) + [float(step)] * self.exact

    @property
    def horizon(self) -> int | None:
        """Number of missed steps after which moments no longer move a row; None if they always do.

        |m| / sqrt(v) is at most (1 - beta1) / sqrt((1 - beta2) (1 - beta1² / beta2)), whatever the gradients were, and
        falls by beta1 / sqrt(beta2) a step. Two steps more are for rounding.
        """
        ratio = self.beta1 / math.sqrt(self.beta2) if self.beta2 > 0 else math.inf
        if ratio == 0:
            return 1
        if ratio >= 1:
            return None
        most = (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - ratio * ratio))
        return math.ceil((60 * math.log(2) + math.log(max(most, 1))) / -math.log(ratio)) + 2


class Ftrl(NamedTuple):
    """FTRL-proximal. State: z [D], n [D]."""

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial: float = 0.0

    def columns(self, width: int) -> int:
        """Return the number of columns of state."""
        return 2 * width

    def start(self, width: int, step: int = 0) -> list[float]:
        """Return the state of a new row."""
        return [0.0] * width + [self.initial] * width


RowOptimizer = Sgd | Momentum | Adagrad | RowwiseAdagrad | Adam | Ftrl
"""Optimizer rule with ``columns(width)``, the columns of state beside the weights, and ``start(width, step)``, the
state of a row that is made after step ``step``.
"""


def adam_step(optimizer: Adam, lr: float, step: int) -> tuple[float, float, float]:
    """Return the step size, the root of the second moment's correction, and the share of a weight that decay leaves."""
    corrected1, root2 = 1 - optimizer.beta1**step, math.sqrt(1 - optimizer.beta2**step)
    keep = 1 - lr * optimizer.weight_decay
    if optimizer.exact:
        return lr / corrected1, root2, keep
    return lr * root2 / corrected1, 1.0, keep
