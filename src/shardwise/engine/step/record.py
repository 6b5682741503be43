"""The record of the running step's inputs, for errors, for a repeated pass, and to compare ranks.

passes        arguments of each microbatch's pass, to weigh its loss and to find the origin of a NaN
fingerprint   of the first step's batches: ranks along dp must differ, those of one model must not   (alike.py)
check         of a cut model's first step, beside the uncut model                                    (check.py)
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.base.pytree import part_named
from shardwise.engine.step.alike import BatchFingerprint
from shardwise.engine.step.check import FirstStepCheck

_log = logging.getLogger(__name__)


class StepInputs:
    """The inputs of one engine's running step.

    Args:
        check: The comparison with the uncut model in the first step, if any.
        compares: True if there are other ranks with which batches are compared.
        shares_sequences: True if other ranks have other tokens of the same sequences.
    """

    def __init__(self, check: FirstStepCheck | None, compares: bool, shares_sequences: bool = False) -> None:
        self.passes: dict[int, tuple[Any, Any]] = {}
        """(args, kwargs) of the running step's passes, by microbatch."""
        self.check = check
        """The comparison with the uncut model; None after the first step."""
        self.loss_node: Any = None
        """The graph node of the loss that the last pass returned, in the first step."""
        self._compares = compares
        self._shares_sequences = shares_sequences
        self._fingerprint: BatchFingerprint | None = BatchFingerprint()
        """The fingerprint of this rank's batches; None after the first step."""
        self._since: list[Any] = []
        """Inputs of the passes since the last backward pass, in the first step; several passes may make one loss."""
        self._own_passes = 0
        """Backward passes of the running microbatch that had a forward pass of their own, in the first step."""

    def sees(self, microbatch: int, args: Any, kwargs: Any) -> None:
        """Record the arguments of a forward pass with gradients that begins."""
        self.passes[microbatch] = (args, kwargs)
        if self._fingerprint is not None:
            self._since.append((args, kwargs))
        if self.check is not None:
            self.check.sees(args, kwargs)

    def before_pass(self) -> None:
        """Notify the check that the engine's own model is called."""
        if self.check is not None:
            self.check.meets_the_cut_model()

    def batch(self, microbatch: int) -> Any:
        """Return the input of a microbatch's forward pass, as the user has passed it.

        Returns:
            The keyword arguments, or else the only positional argument, or all of them.
        """
        args, kwargs = self.passes.get(microbatch, ((), {}))
        return kwargs or (args[0] if len(args) == 1 else args)

    def counts(self, weight: float | Tensor | None, batches: Sequence[Any] | None = None) -> None:
        """Record that a microbatch counts in the step.

        Args:
            weight: Weight of the microbatch; one with weight 0 does not enter the fingerprint.
            batches: Inputs of the microbatch (default: those of the passes since the last microbatch).
        """
        if self._fingerprint is not None and self._compares:
            if weight != 0:
                self._fingerprint.add(self._since if batches is None else batches)
            elif self._shares_sequences:  # ranks with other tokens may have targets in this microbatch
                self._fingerprint.drop()
        self._own_passes += bool(self._since)
        self._since, self.loss_node = [], None

    def end_microbatch(self, accumulation: int) -> None:
        """Warn, at a ``step()`` that does not end the step, of a script that calls it once for several microbatches."""
        if self._own_passes >= accumulation > 1 and self._fingerprint is not None:
            _log.warning(
                "step: %d forward and backward passes since the last step(), and batch.accumulation is %d. step() "
                "counts microbatches, and what comes between two of its calls adds up as one: call it after each "
                "microbatch, or say engine.set_boundary(True) before the last one",
                self._own_passes,
                accumulation,
            )
        self._own_passes = 0

    def returned(self, output: Any) -> None:
        """Record the loss in the ``output`` of a forward pass with gradients, in the first step."""
        if self.is_first_step:
            loss = part_named(output, "loss")
            is_loss = isinstance(loss, Tensor) and loss.numel() == 1
            self.loss_node = loss.grad_fn if is_loss else None

    @property
    def is_first_step(self) -> bool:
        """True until the ranks have compared their first batches."""
        return self._fingerprint is not None

    @property
    def fingerprint(self) -> int | None:
        """The fingerprint of the first step's batches; None later."""
        return None if self._fingerprint is None else self._fingerprint.value

    def compared(self) -> None:
        """Drop the fingerprint after the ranks have compared their first batches."""
        self._fingerprint = None

    def end_check(self) -> None:
        """Drop the check after the first step was compared."""
        if self.check is not None:
            self.check.forget()
        self.check = None

    def end_step(self) -> None:
        """Drop the inputs of the step that has ended; the check starts again if the step was skipped."""
        self._own_passes = 0
        self.passes.clear()
        if self.check is not None:
            self.check.forget()

    def close(self) -> None:
        """Drop all inputs when the engine closes."""
        self.passes.clear()
        self.end_check()

    def discard(self) -> None:
        """Drop the inputs of a step that starts again."""
        self.end_step()
        if self._fingerprint is not None:
            self._fingerprint, self._since = BatchFingerprint(), []
