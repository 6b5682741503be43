"""One tensor of a layout beside that of the reference, with its place in the causal order."""

from typing import NamedTuple

from torch import Tensor


class ComparedTensor(NamedTuple):
    """One tensor of the layout beside the reference's, with its place in the causal order."""

    kind: str
    """The kind in counts: one of KINDS of compare.py."""
    what: str
    """The kind in a verdict: weight, replica, activation, activation gradient, gradient, norm, moment, loss."""
    name: str
    step: int
    got: Tensor
    wanted: Tensor
    scale: float
    module: str = ""
    ranks: tuple[int, ...] = ()
    key: str = ""
    """The key under which the tensor was recorded, if it is one of a pass."""
    pieces: tuple[Tensor, ...] = ()
    """What each of the ranks along "tp" holds, if each holds a tensor of the whole shape."""
    said: str = ""
    """The explanation, if it is known without a search."""

    @property
    def error(self) -> float:
        """The relative L2 error; infinity if shapes differ or an element is not a number."""
        if self.got.shape != self.wanted.shape:
            return float("inf")
        difference = float((self.got.double() - self.wanted.double()).norm())
        found = difference / self.scale if self.scale else difference
        return found if found == found else float("inf")


def module_of(parameter: str) -> str:
    """Return the name of the module that holds ``parameter``."""
    return parameter.rpartition(".")[0]
