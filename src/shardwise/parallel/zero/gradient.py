"""The gradient of one bucket on this rank: accumulated, reduced, finished, dropped.

    stage           0        1             2              3
    buffer          [P]      [P] or [P/N]  [P/N]          [P/N]      (stage 1: cut if a step has one microbatch)
    staging         the buffer itself, or a slot [P] during the Unit's backward pass

    EMPTY          between steps: no memory
    ACCUMULATING   gradients arrive in the buffer or in staging memory
    REDUCED        the sum over the shard ranks is in flight to the place of the master; a slot is held until the sum
                   has arrived
    FINISHED       the sum has arrived, over the replicas too

             a gradient arrives, or reduce             reduce             finish_reduce
    EMPTY ------------------------------> ACCUMULATING ------> REDUCED -----------------> FINISHED
      ^                                        ^---------------- ^  a further backward pass   |
      |                                                          +------- of one that has left
      +---- drop_gradients, from every state

[Note: accumulation]
Autograd passes each gradient to a hook, which copies it into the flat buffer (the first time since the buffer was last
reduced) or adds it, and drops ``p.grad``: no zeroing, no read of old values. On an accelerator small gradients wait for
the last gradient of their Unit and are copied together (``waiting``). Ranges without a gradient are zeroed just before
the reduction. From the end of the backward pass to the step ``p.grad`` holds a sentinel that cannot be read
(``taken``).

[Note: further backward passes]
A cut buffer accumulates one reduced sum after another, one for every microbatch. A full buffer holds the sum over the
ranks once it was reduced; a cut buffer holds the sum over the replicas once the last reduction of the step was assumed
to be over. If one more backward pass follows in the step all the same (the loop did not announce another loss), that
sum becomes an addend again: one rank keeps each element of the sum, the other ranks set it to zero, and all is reduced
once more.

[Note: reductions under way]
``reduce`` only begins a reduction. Where a collective runs beside the computation, the Units behind use other slots,
and ``arrive`` is called before the slot is used again: with one reduction in flight two slots of a size serve all
Units.

[Note: gradients between steps]
The gradient buffer exists from the first gradient of a step to the step's end. When a step's backward pass begins,
activations are at their peak and gradients take no memory; as gradients arrive, activations are freed. Where
activations are small the memory is kept between steps (memory/gradient_memory.py), except if an update that runs beside
the next step still reads it.

[Note: gradients that leave]
If the master lies on another tier, the gradient follows the master when it is reduced: memory then holds the gradients
of a few Units. The next microbatch brings the gradient back when it begins to add its own, from the Unit's first
gradient on, so that sums have the same order as in memory. Before the last gradient leaves, its squares are summed for
the norm.

Shapes: P elements of the bucket with padding, N shard ranks.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.taken import TakenGradient
from shardwise.parallel.zero.views import ParameterViews
from shardwise.parallel.zero.waiting import WaitingGradients
from shardwise.plan.unit import Bucket
from shardwise.precision.policy import BucketDtypes
from shardwise.tiers.tier import TierState


class GradientState(Enum):
    """State of a bucket's gradient; the module's docstring draws the transitions."""

    EMPTY = "empty"
    ACCUMULATING = "accumulating"
    REDUCED = "reduced"
    FINISHED = "finished"

    __hash__ = object.__hash__  # Enum's own runs in Python


_EMPTY, _ACCUMULATING, _REDUCED, _FINISHED = GradientState

_NEXT: dict[GradientState, tuple[GradientState, ...]] = {
    _EMPTY: (_EMPTY, _ACCUMULATING),
    _ACCUMULATING: (_EMPTY, _REDUCED),
    _REDUCED: (_EMPTY, _ACCUMULATING, _FINISHED),
    _FINISHED: (_EMPTY, _REDUCED),
}


class Gradient:
    """The gradient of one bucket on this rank.

    Args:
        layout: The bucket.
        dtypes: The dtypes of the bucket.
        views: The user's parameters of the bucket.
        what: Name of the bucket in errors and of its slots.
        around: The groups, slots and ledger of the bucket's Unit.
        state: The state that lies on another tier than the device, or None.
    """

    def __init__(
        self,
        layout: Bucket,
        dtypes: BucketDtypes,
        views: ParameterViews,
        what: str,
        around: BucketContext,
        state: TierState | None = None,
    ):
        self.dtypes = dtypes
        self.views = views
        self.what = what
        self.state = _EMPTY
        self.used: list[bool | Tensor] = [False] * len(views.parameters)
        """For each parameter, whether it got a gradient since the last step."""
        self.reduces_alone = True
        """True if the running microbatch is the only one of its sum.

        The value selects the collective, so it must be the same on every rank, also on a rank that has no
        gradients yet."""
        self._around = around
        self._home = state if state is not None and "grad" in state.kinds else None
        """The tier state that holds the gradient from the last reduction of a step to the update, or None for the
        device."""
        if layout.key.trained and self._home is None:
            around.ledger.take("gradients", what, self.elements * dtypes.grad.itemsize, "step")
        self._buffer: Tensor | None = None
        self._holds_earlier = False
        """True if the buffer holds the sum of earlier microbatches of the step."""
        self._staging: Tensor | None = None
        self._into: list[Tensor] | None = None
        """Views of the staging memory, or of the buffer, by parameter."""
        self._waiting = WaitingGradients(len(views.parameters))
        around.ledger.take("staging", f"{what}: gradients that wait", lambda: self._waiting.nbytes)
        self._reducing: PendingCollective = DONE
        self._marks = [
            TakenGradient(nothing, slot.name)
            for nothing, slot in zip(views.absent, layout.slots, strict=True)
        ]

    def _enter(self, state: GradientState) -> None:
        assert state in _NEXT[self.state], f"{self.what}: {self.state.value} does not become {state.value}"
        self.state = state

    @property
    def layout(self) -> Bucket:
        """The layout of the bucket."""
        return self.views.layout

    # Memory ----------------------------------------------------------------------------------------------------

    @property
    def elements(self) -> int:
        """Number of elements of the buffer; 0 if the bucket is frozen."""
        if not self.layout.key.trained:
            return 0
        return self.layout.shard_elements if self._around.strategy.cuts_grad else self.layout.elements

    @property
    def buffer(self) -> Tensor:
        """The gradient buffer, made on first use. See [Note: gradients between steps]."""
        if self._buffer is None:
            self._begin_buffer()()
            assert self._buffer is not None, "it was just made"
        return self._buffer

    def _begin_buffer(self) -> Callable[[], object]:
        """Make the buffer and return the call that waits for its content.

        A gradient that has left for another tier begins to come back.
        """
        assert self.layout.key.trained, f"{self.what} is frozen"
        # Only the padding is zeroed: pages that no gradient is written to never take memory.
        if self._around.strategy.tier == "device":
            self._buffer = self._around.gradient_memory.take(self.what, self.elements, self.dtypes.grad)
        else:
            self._buffer = torch.empty(self.elements, dtype=self.dtypes.grad, device=self._around.device)
        if not self._around.strategy.cuts_grad:
            _zero([self._buffer[start:stop] for start, stop in self.layout.gaps])
        if self._home is None or not self._home.has_gradient:
            return lambda: None
        self._home.has_gradient = False
        return self._home.bring("grad", self.owned)

    @property
    def has_left(self) -> bool:
        """True if the gradient lies on the master's tier and not on the device."""
        return self._home is not None and self._home.has_gradient

    @property
    def leaves(self) -> bool:
        """True if the gradient is reduced and is to move to the master's tier."""
        return self._home is not None and self.state is _REDUCED and not self.has_left

    def leave(self) -> None:
        """Move the gradient to the master's tier; any later use brings it back. See [Note: gradients that leave]."""
        assert self._home is not None, f"{self.what}: its master lies on the device"
        self._home.leave(self.owned)
        self._buffer = None

    @property
    def owned(self) -> Tensor:
        """The range of the reduced gradient that belongs to this rank's master."""
        whole = self._around.strategy.cuts_master and not self._around.strategy.cuts_grad
        return self.buffer[self._around.own_range(self.layout)] if whole else self.buffer

    @property
    def staging(self) -> Tensor | None:
        """The full gradients of the running microbatch, or None if there are none."""
        return self._staging

    # Accumulate ------------------------------------------------------------------------------------------------

    def accumulate(self, index: int, parameter: nn.Parameter) -> bool:
        """Take over the gradient of a parameter and set ``p.grad`` to None. See [Note: accumulation].

        Args:
            index: Index of the parameter in the bucket.
            parameter: The parameter.

        Returns:
            True for the parameter's first gradient in a sum.
        """
        grad = parameter.grad
        if grad is None:
            return False
        parameter.grad = None
        return self.take(index, grad)

    def take(self, index: int, grad: Tensor) -> bool:
        """Add the gradient of a parameter to its sum. See [Note: accumulation].

        Args:
            index: Index of the parameter in the bucket.
            grad: The gradient, which nothing else changes any more.

        Returns:
            True for the parameter's first gradient in a sum.
        """
        into = self._into
        if into is None:
            into = self._open()
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        first = self._waiting.put(index, into[index], grad)
        if first:
            self.used[index] = True
        return first

    def flush(self) -> None:
        """Copy the gradients that wait into the buffer. See [Note: accumulation]."""
        self._waiting.flush()

    def mark(self) -> None:
        """Put a sentinel that cannot be read into ``p.grad`` of every parameter with a gradient since the last step."""
        with torch._C.DisableTorchFunctionSubclass():  # a withheld parameter's Python override is slow
            for parameter, mark, used in zip(self.views.parameters, self._marks, self.used, strict=True):
                if used:
                    parameter.grad = mark

    def unmark(self) -> tuple[list[str], list[str]]:
        """Remove the sentinels from ``p.grad``, before new gradients arrive and in the step.

        Returns:
            The names of the parameters whose sentinel was removed meanwhile, and the names of those whose
            ``p.grad`` was replaced.
        """
        dropped: list[str] = []
        given: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():
            for place, (parameter, mark, used) in enumerate(
                zip(self.views.parameters, self._marks, self.used, strict=True)
            ):
                if not used:
                    continue
                grad, parameter.grad = parameter.grad, None
                if grad is not mark:
                    (dropped if grad is None else given).append(self.layout.slots[place].name)
        return dropped, given

    def _open(self) -> list[Tensor]:
        """Take memory for gradients, and return its views by parameter."""
        if not self.layout.key.trained:
            raise UsageError(
                f"{self.what}: a frozen parameter got a gradient; set requires_grad before initialize()"
            )
        self.arrive()  # a slot of its own is given back before another is taken
        is_cut = self._around.strategy.cuts_grad
        is_finished = self.state is _FINISHED and self.has_left
        if is_finished:
            self._enter(_REDUCED)
        is_further = self.state is _REDUCED and not is_cut
        if is_further or is_finished:
            self._become_addend()
        elif is_cut and self.has_left:
            arrive = self._begin_buffer()

            def come() -> None:
                arrive()

            self._reducing = PendingCollective(come)
        self._enter(_ACCUMULATING)
        if self._is_staged:
            pool = self._around.gradients
            self._staging = pool.acquire(self.what, self.layout.elements, self._wire_dtype, movable=True)
            if pool.change_zeros(self.what, self.layout.gaps):
                _zero([self._staging[start:stop] for start, stop in self.layout.gaps])
            self._into = self.views.of(self._staging)
        else:
            self._staging = self.buffer
            self._into = self.views.fresh(self.buffer)
            self._waiting.has_come = [is_further] * len(self.used)
        return self._into

    def _become_addend(self) -> None:
        """Turn a reduced sum into an addend again. See [Note: further backward passes]."""
        around = self._around
        self._reducing.wait()
        self._reducing = DONE
        if around.strategy.cuts_grad:
            if around.replicate.index:
                self.buffer.zero_()
        elif around.strategy.cuts_master:
            own = around.own_range(self.layout)
            self.buffer[: own.start].zero_()
            self.buffer[own.stop :].zero_()
        elif around.dp.index:
            self.buffer.zero_()

    @property
    def _wire_dtype(self) -> torch.dtype:
        """Dtype of one microbatch's gradient on the wire.

        Autograd's own dtype holds the gradient without loss, and the sum over the ranks is accumulated in the
        buffer's dtype. A wider wire would carry the same numbers in more bytes.
        """
        narrower = self.dtypes.reduce.itemsize <= self.dtypes.compute.itemsize
        return self.dtypes.reduce if narrower else self.dtypes.compute

    @property
    def _is_staged(self) -> bool:
        """True if gradients arrive in a slot and not in the buffer.

        A gradient that is reduced before anything is added to it needs no full buffer of its own: it arrives in
        a slot that is still in a cache when it is sent. If every rank stores the full sum, a slot pays only for
        16-bit gradients.
        """
        around = self._around
        if around.strategy.cuts_grad:
            return True
        if not self.reduces_alone or around.shard.size == 1 or around.strategy.cuts_master:
            return False
        is_narrow = self._wire_dtype.itemsize < self.dtypes.grad.itemsize
        return is_narrow and self.dtypes.reduce == self.dtypes.grad and around.replicate.size == 1

    # Reduce ----------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Run REDUCE: begin to sum the gradients over the ranks into the range of the master."""
        into = self._into
        if into is None:
            into = self._open()
        assert self._staging is not None, "the staging memory was just opened"
        self._waiting.flush()
        come = self._waiting.has_come
        if not all(come):
            _zero([view for view, has_come in zip(into, come, strict=True) if not has_come])
        strategy, around, full = self._around.strategy, self._around, self._staging
        self._reducing.wait()  # the buffer may still be filled from its tier, and the reduction adds to it
        if strategy.cuts_grad:
            self._reducing = self._reduce_scatter(self.buffer, full, self._holds_earlier)
            self._holds_earlier = True
        elif full is self.buffer:
            owned = self.owned
            self._reducing = (
                self._scatter(full, owned) if strategy.cuts_master else self._sum_over(around.dp, full)
            )
        else:
            owned = self.buffer[around.own_range(self.layout)]
            self._reducing = self._reduce_scatter(owned, full)
        self._close()
        self._enter(_REDUCED)

    @property
    def _leaves_slot(self) -> bool:
        """True if ``_reducing`` reads a slot whose accumulation is closed. See [Note: reductions under way]."""
        return self._staging is None and self._around.gradients.holder_in_the_way(self.what) == self.what

    def arrive(self) -> None:
        """Wait until the reduction has read its slot, and release the slot; a second call does nothing."""
        if not self._leaves_slot:
            return
        self._reducing.wait()
        around = self._around
        around.gradients.release(self.what)
        self._reducing = DONE
        if not around.strategy.cuts_grad:  # each rank has summed its range; every rank stores the full sum
            owned = self.buffer[around.own_range(self.layout)]
            self._reducing = around.shard.all_gather(self.buffer, owned, self.what, purpose="gradients")

    def settle(self) -> None:
        """Wait for the reduction in flight; another backward pass may still follow."""
        self.arrive()
        self._reducing.wait()
        self._reducing = DONE

    def finish_reduce(self) -> None:
        """Wait for the sum before the step and add the replicas' sums; a second call does nothing."""
        if self.state is not _REDUCED:
            return
        self.settle()
        if self._around.strategy.cuts_master and self._around.replicate.size > 1:
            self._sum_over(self._around.replicate, self.owned).wait()
        self._enter(_FINISHED)

    def drop_gradients(self) -> None:
        """Drop all gradients, after the step or after an error; the next gradient begins a new sum."""
        self._reducing.wait()  # a reduction under way would go on writing into the buffer
        self._reducing = DONE
        self._waiting.drop()
        if self._leaves_slot:
            self._around.gradients.release(self.what)
        if self._staging is not None and self._staging is not self._buffer:
            self._around.gradients.release(self.what)
        self._close()
        self._buffer = None
        self._around.gradient_memory.give(self.what)
        self._holds_earlier = False
        if self._home is not None:
            self._home.has_gradient = False
        self.used = [False] * len(self.used)
        self._enter(_EMPTY)

    def give_memory_back(self) -> None:
        """Release the gradient memory that is kept between steps."""
        self._around.gradient_memory.empty()

    def _close(self) -> None:
        self._staging = self._into = None
        self._waiting.has_come = [False] * len(self.used)

    def _scatter(self, full: Tensor, owned: Tensor) -> PendingCollective:
        return self._reduce_scatter(owned, full.to(self.dtypes.reduce))

    def _reduce_scatter(self, into: Tensor, full: Tensor, accumulate: bool = False) -> PendingCollective:
        strategy, shard = self._around.strategy, self._around.shard
        return shard.reduce_scatter(
            into,
            full,
            self.what,
            accumulate=accumulate,
            exchange=strategy.exchange,
            between=self.dtypes.reduce,
        )

    def _sum_over(self, group: Group, flat: Tensor) -> PendingCollective:
        if self.dtypes.reduce == flat.dtype:
            return group.all_reduce(flat, self.what)
        wire = flat.to(self.dtypes.reduce)
        pending = group.all_reduce(wire, self.what)

        def finish() -> None:
            pending.wait()
            flat.copy_(wire)

        return PendingCollective(finish)


def _zero(views: list[Tensor]) -> None:
    """Fill tensors of one device with zeros; on an accelerator in one launch."""
    if views and views[0].device.type != "cpu":
        torch._foreach_zero_(views)
        return
    for view in views:
        view.zero_()
