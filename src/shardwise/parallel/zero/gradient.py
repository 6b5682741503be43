"""The gradient of one bucket on this rank: accumulated, reduced, finished, dropped.

    stage           0        1             2              3
    buffer          [P]      [P] or [P/N]  [P/N]          [P/N]      (stage 1: cut where a step has one microbatch)
    staging         the buffer itself, or a slot [P] during the Unit's backward pass

    EMPTY          between steps: no memory
    ACCUMULATING   gradients come, into the buffer or into staging memory
    REDUCED        the sum over the shard ranks is on its way to where the master lies; a slot is held until it has
                   arrived there
    FINISHED       it is there, over the replicas too

             a gradient comes, or reduce               reduce             finish_reduce
    EMPTY ------------------------------> ACCUMULATING ------> REDUCED -----------------> FINISHED
      ^                                        ^---------------- ^  a further backward pass   |
      |                                                          +------- of one that has left
      +---- drop_gradients, from everywhere

[Note: accumulation]
Autograd hands each gradient to a hook, which copies it into the flat buffer (the first time since the buffer was last
reduced) or adds it, and drops ``p.grad``: no zeroing, no read of old values. What never got a gradient is zeroed just
before the reduction. From the end of the backward pass to the step ``p.grad`` holds a mark that cannot be read
(``taken``).

[Note: further backward passes]
A cut buffer takes sum after sum: that is what happens with every microbatch. A whole one holds the sum over the ranks
once it was reduced, and a cut one that over the replicas once that was thought to be the last time. Where one more
backward pass comes in the step all the same (nobody knew that another loss would follow), that sum becomes an addend
again, one rank's for each element, and the others' are zero; then all is reduced once more.

[Note: reductions under way]
``reduce`` only begins. Where a collective runs beside the computation, the Units behind go on
in other slots, and ``arrive`` is called when the slot is to be used again: with one reduction under way two slots of a
size serve all Units.

[Note: gradients between steps]
The gradient buffer lives from the first gradient of a step to its end. When a step's backward pass begins, activations
stand at their peak and gradients take nothing; as they come, activations go. Where activations are small the memory is
kept all the same (memory/gradient_memory.py), but not where an update beside the next step still reads it.

[Note: gradients that leave]
Where the master lies on another tier the gradient follows it when it is reduced: memory then holds those of a few
Units. The next microbatch has it back where its own are to be added, from the Unit's first gradient on, so that sums
have the order that they have in memory. Of the last one the squares are summed first, for the norm.

Shapes: P elements of the bucket with padding, N shard ranks.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import DONE, Group, Pending
from shardwise.memory.tier import TierState
from shardwise.parallel.zero.context import BucketContext
from shardwise.parallel.zero.taken import TakenGradient
from shardwise.parallel.zero.views import ParameterViews
from shardwise.plan.errors import UsageError
from shardwise.plan.unit import Bucket
from shardwise.precision.policy import Dtypes


class GradientState(Enum):
    """Where a gradient is in its life: see the module's docstring."""

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
    """See the module's docstring. ``what`` names the bucket in errors."""

    def __init__(
        self,
        layout: Bucket,
        dtypes: Dtypes,
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
        """Parameters that got a gradient since the last step."""
        self.reduces_alone = True
        """Whether the running microbatch is the only one of its sum. Every rank must say the same, also one on which
        nothing has come before: it is what decides how the gradient travels."""
        self._around = around
        self._home = state if state is not None and "grad" in state.kinds else None
        """Where it goes from its last reduction in a step to the update, if not on the device."""
        if layout.key.trained and self._home is None:
            around.ledger.take("gradients", what, self.elements * dtypes.grad.itemsize, "step")
        self._buffer: Tensor | None = None
        self._holds_earlier = False
        """Whether the buffer holds the sum of earlier microbatches of the step."""
        self._staging: Tensor | None = None
        self._into: list[Tensor] | None = None
        """The staging memory, or the buffer, by parameter."""
        self._has_come = [False] * len(views.parameters)
        """Parameters whose gradient stands in the staging memory."""
        self._reducing: Pending = DONE
        self._marks = [
            TakenGradient(nothing, slot.name)
            for nothing, slot in zip(views.absent, layout.slots, strict=True)
        ]

    def _enter(self, state: GradientState) -> None:
        assert state in _NEXT[self.state], f"{self.what}: {self.state.value} does not become {state.value}"
        self.state = state

    @property
    def layout(self) -> Bucket:
        """That of the bucket."""
        return self.views.layout

    # Memory ----------------------------------------------------------------------------------------------------

    @property
    def elements(self) -> int:
        """Elements of the buffer; 0 where the bucket is frozen."""
        if not self.layout.key.trained:
            return 0
        return self.layout.shard_elements if self._around.strategy.cuts_grad else self.layout.elements

    @property
    def buffer(self) -> Tensor:
        """[Note: gradients between steps]"""
        if self._buffer is None:
            self._begin_buffer()()
            assert self._buffer is not None, "it was just made"
        return self._buffer

    def _begin_buffer(self) -> Callable[[], object]:
        """Make it. What has left begins to come back; the call that is returned waits for it."""
        assert self.layout.key.trained, f"{self.what} is frozen"
        # Not zeroed, but for the padding: pages that nothing comes into never take memory.
        if self._around.strategy.tier == "device":
            self._buffer = self._around.gradient_memory.take(self.what, self.elements, self.dtypes.grad)
        else:
            self._buffer = torch.empty(self.elements, dtype=self.dtypes.grad, device=self._around.device)
        for start, stop in () if self._around.strategy.cuts_grad else self.layout.gaps:
            self._buffer[start:stop] = 0
        if self._home is None or not self._home.has_gradient:
            return lambda: None
        self._home.has_gradient = False
        return self._home.bring("grad", self.owned)

    @property
    def has_left(self) -> bool:
        """Whether it lies where the master does, and not here."""
        return self._home is not None and self._home.has_gradient

    @property
    def leaves(self) -> bool:
        """Whether it goes there, now that it is reduced."""
        return self._home is not None and self.state is _REDUCED and not self.has_left

    def leave(self) -> None:
        """It goes where the master lies; whoever asks for it brings it back. [Note: gradients that leave]"""
        assert self._home is not None, f"{self.what}: its master lies on the device"
        self._home.leave(self.owned)
        self._buffer = None

    @property
    def owned(self) -> Tensor:
        """The reduced gradient that belongs to this rank's master."""
        whole = self._around.strategy.cuts_master and not self._around.strategy.cuts_grad
        return self.buffer[self._around.own_range(self.layout)] if whole else self.buffer

    @property
    def staging(self) -> Tensor | None:
        """Where the running microbatch's gradients stand, whole; None where there are none."""
        return self._staging

    # Accumulate ------------------------------------------------------------------------------------------------

    def accumulate(self, index: int, parameter: nn.Parameter) -> bool:
        """Take over the gradient of parameter ``index``; True for its first in a sum. [Note: accumulation]"""
        grad = parameter.grad
        if grad is None:
            return False
        if self._into is None:
            self._open()
        assert self._into is not None, "the staging memory was just opened"
        view = self._into[index]
        first = not self._has_come[index]
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if first:
            view.copy_(grad)
            self._has_come[index] = self.used[index] = True
        else:
            view.add_(grad)
        parameter.grad = None
        return first

    def mark(self) -> None:
        """After a backward pass: ``p.grad`` of what has come since the last step cannot be read."""
        with torch._C.DisableTorchFunctionSubclass():  # a withheld parameter would answer by way of Python
            for parameter, mark, used in zip(self.views.parameters, self._marks, self.used, strict=True):
                if used:
                    parameter.grad = mark

    def unmark(self) -> tuple[list[str], list[str]]:
        """Before any gradient comes, and in the step. Returns the parameters whose mark was taken away meanwhile, and
        those that were given a gradient in its place."""
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

    def _open(self) -> None:
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

            self._reducing = Pending(come)
        self._enter(_ACCUMULATING)
        if self._is_staged:
            pool = self._around.gradients
            self._staging = pool.acquire(self.what, self.layout.elements, self._wire_dtype, movable=True)
            if pool.last_tenant(self.what) != self.what:
                for start, stop in self.layout.gaps:
                    self._staging[start:stop] = 0
            self._into = self.views.of(self._staging)
        else:
            self._staging = self.buffer
            self._into = self.views.fresh(self.buffer)
            self._has_come = [is_further] * len(self._has_come)

    def _become_addend(self) -> None:
        """[Note: further backward passes]"""
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
        """One microbatch's gradient: autograd's own dtype holds it without loss, and the sum over the ranks is taken in
        the buffer's dtype. A wider wire would carry the same numbers in more bytes."""
        narrower = self.dtypes.reduce.itemsize <= self.dtypes.compute.itemsize
        return self.dtypes.reduce if narrower else self.dtypes.compute

    @property
    def _is_staged(self) -> bool:
        """A gradient that is reduced before anything is added to it needs no whole buffer of its own: it comes into a
        slot that is still in a cache when it travels. Where every rank keeps the whole sum that pays for 16 bits alone.
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
        """REDUCE: begin to sum the gradients over the ranks, to where the master lies."""
        if self._into is None:
            self._open()
        assert self._into is not None and self._staging is not None, "the staging memory was just opened"
        for view, has_come in zip(self._into, self._has_come, strict=True):
            if not has_come:
                view.zero_()
        strategy, around, full = self._around.strategy, self._around, self._staging
        self._reducing.wait()  # for what comes back to be added to
        if strategy.cuts_grad:
            self._reducing = around.shard.reduce_scatter(
                self.buffer, full, self.what, accumulate=self._holds_earlier
            )
            self._holds_earlier = True
        elif full is self.buffer:
            owned = self.owned
            self._reducing = (
                self._scatter(full, owned) if strategy.cuts_master else self._sum_over(around.dp, full)
            )
        else:
            owned = self.buffer[around.own_range(self.layout)]
            self._reducing = around.shard.reduce_scatter(owned, full, self.what)
        self._close()
        self._enter(_REDUCED)

    @property
    def _leaves_slot(self) -> bool:
        """Whether what ``_reducing`` waits for reads a slot, which is closed here. [Note: reductions under way]"""
        return self._staging is None and self._around.gradients.holder_in_the_way(self.what) == self.what

    def arrive(self) -> None:
        """What was reduced out of a slot has left it, and the slot is free. A second call does nothing."""
        if not self._leaves_slot:
            return
        self._reducing.wait()
        around = self._around
        around.gradients.release(self.what)
        self._reducing = DONE
        if not around.strategy.cuts_grad:  # each rank has summed its range, and every rank keeps the whole
            owned = self.buffer[around.own_range(self.layout)]
            self._reducing = around.shard.all_gather(self.buffer, owned, self.what, purpose="gradients")

    def settle(self) -> None:
        """The reduction that is under way is over; another backward pass may still come."""
        self.arrive()
        self._reducing.wait()
        self._reducing = DONE

    def finish_reduce(self) -> None:
        """Before the step: the sum is there, over the replicas too. A second call does nothing."""
        if self.state is not _REDUCED:
            return
        self.settle()
        if self._around.strategy.cuts_master and self._around.replicate.size > 1:
            self._sum_over(self._around.replicate, self.owned).wait()
        self._enter(_FINISHED)

    def drop_gradients(self) -> None:
        """After the step, or after an error: what comes next is the first of a new sum."""
        self._reducing.wait()  # a reduction under way would go on writing into the buffer
        self._reducing = DONE
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
        """Between steps: none of it waits for the next one."""
        self._around.gradient_memory.empty()

    def _close(self) -> None:
        self._staging = self._into = None
        self._has_come = [False] * len(self._has_come)

    def _scatter(self, full: Tensor, owned: Tensor) -> Pending:
        if self.dtypes.reduce == full.dtype:
            return self._around.shard.reduce_scatter(owned, full, self.what)
        return self._around.shard.reduce_scatter(owned, full.to(self.dtypes.reduce), self.what)

    def _sum_over(self, group: Group, flat: Tensor) -> Pending:
        if self.dtypes.reduce == flat.dtype:
            return group.all_reduce(flat, self.what)
        wire = flat.to(self.dtypes.reduce)
        pending = group.all_reduce(wire, self.what)

        def finish() -> None:
            pending.wait()
            flat.copy_(wire)

        return Pending(finish)
