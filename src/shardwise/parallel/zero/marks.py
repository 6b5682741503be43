"""Checks of the user's code between a backward pass and the step, for all buckets of a stage.

Cost: see taken.py.
"""

from collections.abc import Sequence

import torch

from shardwise.base.errors import UsageError
from shardwise.parallel.zero.bucket import BucketState


class GradientSentinels:
    """The sentinels in ``p.grad`` of a stage's buckets, and the check that frozen parameters stay frozen."""

    def __init__(self, buckets: Sequence[BucketState]):
        self._trained = [bucket for bucket in buckets if bucket.layout.key.trained]
        self._frozen = [
            (slot.name, parameter)
            for bucket in buckets
            if not bucket.layout.key.trained
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self._are_set = False

    def check_frozen(self) -> None:
        """Check that no frozen parameter has been thawed since the engine was made.

        Raises:
            UsageError: If a frozen parameter requires a gradient now.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter's Python override is slow
            thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise UsageError(
                f"backward: {thawed[0]} was frozen when the engine was made and requires a gradient now, for which "
                "there is no buffer; set requires_grad before initialize(), or save, make a new engine and load"
            )

    def set(self) -> None:
        """Set the sentinels, so that the user's code cannot read ``p.grad`` until the step."""
        for bucket in self._trained:
            bucket.gradient.mark()
        self._are_set = True

    def clear(self, at_step: bool = False) -> None:
        """Remove the sentinels from ``p.grad``.

        Args:
            at_step: True in the step, where sentinels that the user dropped are an error.

        Raises:
            UsageError: If the user replaced a sentinel by a gradient, or dropped sentinels and ``at_step`` is
                true.
        """
        if not self._are_set:
            return
        changes = self._take()
        given = [name for _, names in changes for name in names]
        dropped = [name for names, _ in changes for name in names]
        if given:
            raise UsageError(
                f"{given[0]}.grad was set after engine.backward(loss), which had taken its gradient over; what is set "
                "there does not reach the optimizer. Change the loss, or add a term to it, before engine.backward"
            )
        if dropped and at_step:
            raise UsageError(
                f"step: {dropped[0]}.grad was set to None since the last engine.backward(loss) (by zero_grad()?), but "
                "the gradients lie in the engine, and step() would use them. Leave zero_grad() out; to drop the "
                "gradients of this step call engine.discard() on all ranks"
            )

    def drop(self) -> None:
        """Remove the sentinels without any check."""
        if self._are_set:
            self._take()

    def _take(self) -> list[tuple[list[str], list[str]]]:
        self._are_set = False
        return [bucket.gradient.unmark() for bucket in self._trained]
