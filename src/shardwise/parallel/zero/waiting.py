"""Gradients of one bucket that wait until one launch copies all of them into the flat buffer.

A copy of a small gradient takes an accelerator less time than its launch takes the host (about 5 µs, in which 3 TB/s
of memory copy 8 MB). So gradients of up to ``LARGEST_BYTES`` wait for the last gradient of their Unit, and
``torch._foreach_copy_`` copies them together. Larger gradients are copied when they arrive and wait for nothing.

    gradient                             copied or added                            launches
    larger than LARGEST_BYTES            when it arrives                            1 each
    all others                           behind the Unit's last gradient, or when   1 together; 2 if they are added
                                         MOST_BYTES of a bucket wait                and their dtype differs

On a CPU nothing waits: an operation costs little there, and a gradient is still in the cache when it arrives.

Cost: the bytes of the waiting gradients, at most ``MOST_BYTES`` of a bucket; as much again in the buffer's dtype while
gradients of another dtype are added.
"""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST_BYTES = 4 << 20
"""Bytes of the largest gradient that waits."""
MOST_BYTES = 16 << 20
"""Most bytes of a bucket's gradients that wait at once."""


def most_waiting_bytes(gradient_bytes: Iterable[int]) -> int:
    """Return the most bytes of a bucket's gradients that wait at once on an accelerator.

    Args:
        gradient_bytes: Bytes of the gradient of each parameter of the bucket.
    """
    return min(MOST_BYTES, sum(size for size in gradient_bytes if size <= LARGEST_BYTES))


class WaitingGradients:
    """The gradients of one bucket that have arrived and do not lie in the flat buffer yet.

    Args:
        parameters: Number of the bucket's parameters.
    """

    def __init__(self, parameters: int) -> None:
        self.has_come = [False] * parameters
        """For each parameter, True if the buffer holds, or waits for, an addend of its sum."""
        self.nbytes = 0
        """Bytes of the waiting gradients."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """(view of the buffer, gradient) by parameter, for gradients that are copied."""
        self._addends: dict[int, tuple[Tensor, Tensor]] = {}
        """The same for gradients that are added to what the buffer holds."""
        self._arrived: set[int] = set()
        """The parameters whose gradients have arrived since the last ``flush``."""

    def put(self, index: int, view: Tensor, grad: Tensor) -> bool:
        """Take a gradient; it is copied or added into its view of the buffer now or in ``flush``.

        Args:
            index: Index of the parameter in the bucket.
            view: The parameter's view of the buffer.
            grad: The gradient, which nothing else changes any more.

        Returns:
            True for the parameter's first gradient in a sum, which is copied; others are added.
        """
        come = self.has_come
        first = not come[index]
        come[index] = True
        if _is_on_host(view):
            # Written out: a call for each gradient is what the host spends most of its time on here.
            if first:
                view.copy_(grad)
            else:
                view.add_(grad)
            return first
        if index in self._copies or index in self._addends or self.nbytes + grad.nbytes > MOST_BYTES:
            self._move()
        if grad.nbytes > LARGEST_BYTES:
            _put_now(view, grad, first)
        else:
            (self._copies if first else self._addends)[index] = view, grad
            self.nbytes += grad.nbytes
        self._arrived.add(index)
        if len(self._arrived) == len(self.has_come):
            self.flush()
        return first

    def flush(self) -> None:
        """Copy and add the waiting gradients, because no gradient of the pass is to come."""
        if self._arrived:
            self._move()
            self._arrived.clear()

    def drop(self) -> None:
        """Drop the waiting gradients, which are then in no sum."""
        self.nbytes = 0
        for each in (self._copies, self._addends, self._arrived):
            each.clear()

    def _move(self) -> None:
        if self._copies:
            views, grads = map(list, zip(*self._copies.values(), strict=True))
            torch._foreach_copy_(views, grads)
            self._copies.clear()
        if self._addends:
            _add(*map(list, zip(*self._addends.values(), strict=True)))
            self._addends.clear()
        self.nbytes = 0


_is_on_host = operator.attrgetter("is_cpu")
"""Function that returns whether a tensor is in host memory, without a call of Python's own."""


def _put_now(view: Tensor, grad: Tensor, first: bool) -> None:
    if first:
        view.copy_(grad)
    else:
        view.add_(grad)


def _add(views: list[Tensor], grads: list[Tensor]) -> None:
    """Add each gradient to its view, in at most two launches."""
    dtype = views[0].dtype
    if any(grad.dtype != dtype for grad in grads) and len(grads) > 2:
        # torch adds lists of unlike dtypes one tensor at a time, and copies them in one launch.
        flat = torch.empty(sum(grad.numel() for grad in grads), dtype=dtype, device=grads[0].device)
        parts = flat.split([grad.numel() for grad in grads])
        wide = [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)]
        torch._foreach_copy_(wide, grads)
        grads = wide
    torch._foreach_add_(views, grads)
