"""One bucket's flat buffers on this rank: weight, gradient, master.

    stage           0        1             2              3
    weight          [P]      [P]           [P]            [P/N] + a slot [P] while gathered
    grad            [P]      [P]           [P/N]
    landing         grad, or a slot [P] during the Unit's backward pass
    master          [P]      [P/N]         [P/N]          [P/N]

A master of the compute dtype is the weight buffer itself or this rank's range of it. The user's parameters are views:
``p.data = view`` leaves the Parameter object, its hooks and its version counter where they are.

[Note: stale memory]
While a cut weight is not gathered its parameters are withheld (memory/absent.py): an operation that takes one is an
error which names it, where shape, dtype and device can be read. Past torch's Python functions they read as NaN of the
right shape. And their version counters stand one above the value under which autograd saved them; gathering restores
both, so a backward pass that reaches a weight which is not there fails in autograd's own check.

[Note: landing]
Autograd hands each gradient to a hook, which copies it into the flat buffer (the first time since the buffer was last
reduced) or adds it, and drops ``p.grad``: no zeroing, no read of old values. What never landed is zeroed just before
the reduction. From the end of the backward pass to the step ``p.grad`` holds a mark that cannot be read
(``taken``).

[Note: gradients between steps]
The gradient buffer lives from the first gradient of a step to its end. When a step's backward pass begins, activations
stand at their peak and gradients take nothing; as they come, activations go.

Shapes: P elements of the bucket with padding, N shard ranks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import DONE, Group, Pending
from shardwise.memory.absent import give, withhold
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.taken import TakenGradient
from shardwise.plan.errors import UsageError
from shardwise.plan.lists import Strategy
from shardwise.plan.unit import Bucket, Slot
from shardwise.precision.policy import Dtypes

Fill = Callable[[Slot, int, int, torch.dtype], Tensor]
"""(slot, first element, end, dtype) -> those elements of the parameter, flat."""

_set_versions: Callable[[Sequence[Tensor], Sequence[int]], None]
_set_versions = torch._C._autograd._unsafe_set_version_counter  # type: ignore[assignment]


@dataclass(frozen=True)
class Surroundings:
    """What all buckets of an engine share."""

    strategy: Strategy
    shard: Group
    replicate: Group
    both: Group
    weights: SlotPool
    gradients: SlotPool
    device: torch.device


class BucketState:
    """See the module's docstring. ``what`` names the bucket in errors."""

    def __init__(
        self, layout: Bucket, dtypes: Dtypes, parameters: list[nn.Parameter], what: str, around: Surroundings
    ):
        self.layout = layout
        self.dtypes = dtypes
        self.parameters = parameters
        self.what = what
        self._around = around
        strategy = around.strategy
        whole, piece = layout.elements, layout.shard_elements
        first = around.shard.index * piece
        self._own = slice(first, first + piece)

        def zeros(dtype: torch.dtype, cut: bool) -> Tensor:
            return torch.zeros(piece if cut else whole, dtype=dtype, device=around.device)

        self.weight = zeros(dtypes.compute, strategy.cuts_weight)
        self.master: Tensor | None = None
        self._grad: Tensor | None = None
        if layout.key.trained:
            same = dtypes.master == dtypes.compute
            if not same:
                self.master = zeros(dtypes.master, strategy.cuts_master)
            else:
                self.master = (
                    self.weight[self._own]
                    if strategy.cuts_master and not strategy.cuts_weight
                    else self.weight
                )
        self._full: Tensor | None = None if strategy.cuts_weight else self.weight
        self._gathering: Pending = DONE
        self._views: dict[int, list[Tensor]] = {}
        self._withheld: dict[type, type] = {}
        self._absent = [absent(slot.shape, dtypes.compute, around.device) for slot in layout.slots]
        self._is_attached = False
        self.is_lent = False
        """Between ``lend`` and ``reclaim``: the parameters are whole."""
        self._lent_versions: list[int] = []
        self._fresh = [parameter._version for parameter in parameters]
        self._stale = [version + 1 for version in self._fresh]
        self._landing: list[Tensor] | None = None
        self._landing_full: Tensor | None = None
        self._landed = [False] * len(parameters)
        self._gaps = _gaps(layout)
        self.used = [False] * len(parameters)
        """Parameters that got a gradient since the last step."""
        self._holds_earlier = False
        self.reduces_alone = True
        """Whether the running microbatch is the only one of its sum. Every rank must say the same, also one on which
        nothing has landed before: it is what decides how the gradient travels."""
        self._awaits_replicas = False
        self.reducing: Pending = DONE
        self._marks = [
            TakenGradient(absent, slot.name) for absent, slot in zip(self._absent, layout.slots, strict=True)
        ]

    # Where things lie ------------------------------------------------------------------------------------------

    @property
    def owned_range(self) -> tuple[int, int]:
        """(index, count): this rank's master is range ``index`` of ``count`` equal ones."""
        if self._around.strategy.cuts_master:
            return self._around.shard.index, self._around.shard.size
        return 0, 1

    @property
    def grad_elements(self) -> int:
        """Elements of the gradient buffer; 0 where the bucket is frozen."""
        if not self.layout.key.trained:
            return 0
        return self.layout.shard_elements if self._around.strategy.cuts_grad else self.layout.elements

    @property
    def grad(self) -> Tensor:
        """The gradient buffer. [Note: gradients between steps]"""
        if self._grad is None:
            assert self.layout.key.trained, f"{self.what} is frozen"
            # Not zeroed, but for the padding: pages that nothing lands in never take memory.
            self._grad = torch.empty(self.grad_elements, dtype=self.dtypes.grad, device=self._around.device)
            for start, stop in () if self._around.strategy.cuts_grad else self._gaps:
                self._grad[start:stop] = 0
        return self._grad

    @property
    def owned_elements(self) -> int:
        """Elements that this rank updates, padding included."""
        return self.layout.elements // self.owned_range[1]

    @property
    def owned_grad(self) -> Tensor:
        """The reduced gradient that belongs to this rank's master."""
        whole = self._around.strategy.cuts_master and not self._around.strategy.cuts_grad
        return self.grad[self._own] if whole else self.grad

    @property
    def is_gathered(self) -> bool:
        """True while the parameters can be read."""
        return self._full is not None

    def fill(self, fill: Fill, wanted: Callable[[Slot], bool] = lambda slot: True) -> None:
        """Write weights from outside, those of ``wanted`` slots: each rank asks for the elements that it owns and no
        others."""
        index, count = self.owned_range
        target = self.weight if self.master is None else self.master
        if self.master is None and not self._around.strategy.cuts_weight:
            index, count = 0, 1  # frozen and kept whole
        for slot, start, stop, local in self.layout.overlaps(index, count):
            if not wanted(slot):
                continue
            target[local : local + stop - start].copy_(fill(slot, start, stop, target.dtype))
        if self.master is None:
            self._bump()
        else:
            self.publish()
            self.gather_update().wait()

    def attach(self) -> None:
        """Make the user's parameters views of the weight; a cut weight starts released."""
        if self._full is None:
            self._withhold()
        else:
            self._point_into(self._full)

    @property
    def in_the_way(self) -> Hashable | None:
        """Name of the bucket that stands in this one's slot."""
        return self._around.weights.holder_in_the_way(self.what) if self._full is None else None

    # Weights ---------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather a cut weight into its slot."""
        if self._full is not None or self.is_lent:
            return
        self._full = self._around.weights.acquire(self._owner, self.layout.elements, self.dtypes.compute)
        self._gathering = self._around.shard.all_gather(self._full, self.weight, self.what)

    def finish_gather(self) -> None:
        """Wait for the weight and let the parameters point at it."""
        if self._full is not None and not self._is_attached:
            self._gathering.wait()
            self._point_into(self._full)
            _set_versions(self.parameters, self._fresh)

    def release(self) -> None:
        """Give the slot back. [Note: stale memory]"""
        if not self._around.strategy.cuts_weight or self._full is None:
            return
        self._gathering.wait()
        self._withhold()
        self._full, self._is_attached = None, False
        self._around.weights.release(self._owner)

    def _withhold(self) -> None:
        """The parameters hold nothing. [Note: stale memory]"""
        give(self.parameters)
        for parameter, absent in zip(self.parameters, self._absent, strict=True):
            parameter.data = absent
        withhold(self.parameters, self._said_of_released, self._withheld)
        _set_versions(self.parameters, self._stale)

    def _said_of_released(self, parameter: nn.Parameter) -> str:
        names = [s.name for s, p in zip(self.layout.slots, self.parameters, strict=True) if p is parameter]
        return (
            f"parameter {names[0] if names else ''!r} of {self.what}, which is released now,\n"
            "At ZeRO stage 3 weights are there while the forward pass of their Unit runs. Call the module's "
            "forward, which gathers them; name one Unit around what belongs together (zero.units); call other "
            "methods through engine.run(...); or look at weights inside engine.full_parameters()"
        )

    def gathered_copy(self, source: Tensor | None = None) -> Tensor:
        """The whole weight (or another tensor that is cut like the master) in new memory; collective."""
        source = self.weight if source is None else source
        if source.numel() == self.layout.elements:
            return source
        full = torch.empty(self.layout.elements, dtype=source.dtype, device=source.device)
        self._around.shard.all_gather(full, source, self.what, purpose="control").wait()
        return full

    def lend(self, full: Tensor) -> None:
        """Let the parameters point into ``full`` until ``reclaim``; gathers and releases do nothing meanwhile."""
        self.release()
        self.is_lent = True
        for parameter, view in zip(self.parameters, self.fresh_views(full), strict=True):
            parameter.data = view
        self._lent_versions = [parameter._version for parameter in self.parameters]

    def reclaim(self, full: Tensor, keep: bool) -> list[str]:
        """End ``lend``; with ``keep`` this rank's range of the edited values becomes weight and master.

        Returns the names of the parameters that were edited.
        """
        edited = [
            slot.name
            for slot, parameter, version in zip(
                self.layout.slots, self.parameters, self._lent_versions, strict=True
            )
            if parameter._version != version
        ]
        if keep:
            if self._around.strategy.cuts_weight:
                self.weight.copy_(full[self._own])
            if self.master is not None and not self.shares_master:
                self.master.copy_(full[self._own] if self._around.strategy.cuts_master else full)
            self._bump()
        self.is_lent = False
        self.attach()
        return edited

    def give_back(self) -> None:
        """The engine ends: the parameters hold their values, whole, in memory of their own. Collective where the weight
        is cut."""
        if self._around.strategy.cuts_weight and not self.is_lent:
            self.lend(self.gathered_copy())

    def publish(self) -> None:
        """After an update of the master: round it into the weight."""
        if self.master is None:
            return
        self._check_attached()
        if not self.shares_master:
            cut = self._around.strategy.cuts_master and not self._around.strategy.cuts_weight
            (self.weight[self._own] if cut else self.weight).copy_(self.master)
        self._bump()

    def _check_attached(self) -> None:
        """What the user did to a parameter behind the engine's back would be lost in silence."""
        if self._full is None or not self._is_attached:
            return
        for slot, parameter, view, version in zip(
            self.layout.slots, self.parameters, self.views(self._full), self._fresh, strict=True
        ):
            if parameter.data_ptr() != view.data_ptr():
                raise UsageError(
                    f"{self.what}: parameter {slot.name} does not lie in the engine's memory any more, so it would not "
                    "train. Move or convert the model (model.to(), .half(), p.data = ...) before initialize()"
                )
            if parameter._version != version and not self.shares_master:
                raise UsageError(
                    f"{self.what}: parameter {slot.name} was changed in place, which its {self.dtypes.master} master "
                    "would overwrite. Edit inside engine.full_parameters(write=True), or load before initialize()"
                )

    def gather_update(self) -> Pending:
        """After ``publish``: gather the other ranks' ranges where the weight is kept whole and the master is not."""
        if not self._around.strategy.cuts_master or self._around.strategy.cuts_weight:
            return DONE
        return self._around.shard.all_gather(self.weight, self.weight[self._own], self.what)

    # Gradients -------------------------------------------------------------------------------------------------

    def land(self, index: int, parameter: nn.Parameter) -> bool:
        """Take over the gradient of parameter ``index``; True for its first in a sum. [Note: landing]"""
        grad = parameter.grad
        if grad is None:
            return False
        if self._landing is None:
            self._open_landing()
        assert self._landing is not None, "the landing was just opened"
        view = self._landing[index]
        first = not self._landed[index]
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if first:
            view.copy_(grad)
            self._landed[index] = self.used[index] = True
        else:
            view.add_(grad)
        parameter.grad = None
        return first

    def mark_gradients(self) -> None:
        """After a backward pass: ``p.grad`` of what has landed since the last step cannot be read."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would answer by way of Python
            for parameter, mark, used in zip(self.parameters, self._marks, self.used, strict=True):
                if used:
                    parameter.grad = mark

    def unmark_gradients(self) -> tuple[list[str], list[str]]:
        """Before anything lands, and in the step. Returns the parameters whose mark was taken away meanwhile, and those
        that were given a gradient in its place."""
        dropped: list[str] = []
        given: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():
            for place, (parameter, mark, used) in enumerate(
                zip(self.parameters, self._marks, self.used, strict=True)
            ):
                if not used:
                    continue
                grad, parameter.grad = parameter.grad, None
                if grad is not mark:
                    (dropped if grad is None else given).append(self.layout.slots[place].name)
        return dropped, given

    @property
    def landed(self) -> int:
        """Parameters whose gradient stands in the landing buffer."""
        return sum(self._landed)

    def reduce(self) -> None:
        """REDUCE: sum the gradients over the ranks, to where the master lies."""
        if self._landing is None:
            self._open_landing()
        assert self._landing is not None and self._landing_full is not None, "the landing was just opened"
        for view, landed in zip(self._landing, self._landed, strict=True):
            if not landed:
                view.zero_()
        strategy, around, full = self._around.strategy, self._around, self._landing_full
        if strategy.cuts_grad:
            around.shard.reduce_scatter(self.grad, full, self.what, accumulate=self._holds_earlier).wait()
            self._holds_earlier = True
            around.gradients.release(self._owner)
        elif full is self.grad:
            owned = self.owned_grad
            self.reducing = (
                self._on_the_wire(full, owned) if strategy.cuts_master else self._sum_over(around.both, full)
            )
        else:
            around.shard.reduce_scatter(self.grad[self._own], full, self.what).wait()
            around.gradients.release(self._owner)
            if not strategy.cuts_master:
                own = self.grad[self._own]
                self.reducing = around.shard.all_gather(self.grad, own, self.what, purpose="gradients")
        self._landing = self._landing_full = None
        self._landed = [False] * len(self.parameters)
        self._awaits_replicas = strategy.cuts_master and around.replicate.size > 1

    def finish_reduce(self) -> None:
        """Before the step: all gradients are there, also over the replicas. A second call does nothing."""
        self.reducing.wait()
        self.reducing = DONE
        if self._awaits_replicas:
            self._awaits_replicas = False
            self._sum_over(self._around.replicate, self.owned_grad).wait()

    def forget_gradients(self) -> None:
        """After the step: what lands next is the first of a new sum."""
        self.reducing.wait()  # a reduction in flight would go on writing into the buffer
        self.reducing = DONE
        self._holds_earlier = self._awaits_replicas = False
        self.used = [False] * len(self.parameters)
        if self._landing_full is not None and self._landing_full is not self._grad:
            self._around.gradients.release(self._owner)
        self._landing = self._landing_full = self._grad = None
        self._landed = [False] * len(self.parameters)

    def _on_the_wire(self, full: Tensor, owned: Tensor) -> Pending:
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

    def _open_landing(self) -> None:
        if not self.layout.key.trained:
            raise UsageError(
                f"{self.what}: a frozen parameter got a gradient; set requires_grad before initialize()"
            )
        if self._lands_in_slot:
            pool = self._around.gradients
            self._landing_full = pool.acquire(
                self._owner, self.layout.elements, self._wire_dtype, movable=True
            )
            if pool.last_tenant(self._owner) != self._owner:
                for start, stop in self._gaps:
                    self._landing_full[start:stop] = 0
            self._landing = self.views(self._landing_full)
        else:
            self._landing_full = self.grad
            self._landing = self.fresh_views(self.grad)

    @property
    def _wire_dtype(self) -> torch.dtype:
        """One microbatch's gradient: autograd's own dtype holds it without loss, and the sum over the ranks is taken in
        the buffer's dtype. A wider wire would carry the same numbers in more bytes."""
        narrower = self.dtypes.reduce.itemsize <= self.dtypes.compute.itemsize
        return self.dtypes.reduce if narrower else self.dtypes.compute

    @property
    def _lands_in_slot(self) -> bool:
        """A gradient that is reduced before anything is added to it needs no whole buffer of its own: it lands in a
        slot that is still in a cache when it travels. Where every rank keeps the whole sum that pays for 16 bits alone.
        """
        around = self._around
        if around.strategy.cuts_grad:
            return True
        if not self.reduces_alone or around.shard.size == 1:
            return False
        if around.strategy.cuts_master:
            return True
        is_narrow = self._wire_dtype.itemsize < self.dtypes.grad.itemsize
        return is_narrow and self.dtypes.reduce == self.dtypes.grad and around.replicate.size == 1

    # Views -----------------------------------------------------------------------------------------------------

    def views(self, full: Tensor) -> list[Tensor]:
        """The parameters as views of a whole flat buffer; kept for buffers whose address stays."""
        key = full.data_ptr()
        if key not in self._views or self._views[key][0].dtype != full.dtype:
            with torch.inference_mode(False):
                self._views[key] = self.fresh_views(full)
        return self._views[key]

    def fresh_views(self, full: Tensor) -> list[Tensor]:
        """As ``views`` for memory that will not be seen again."""
        return [
            full[slot.offset : slot.offset + slot.elements].view(slot.shape) for slot in self.layout.slots
        ]

    @property
    def _owner(self) -> str:
        return self.what

    @property
    def shares_master(self) -> bool:
        """True where the weight is its own master: what is written into it stays."""
        return self.master is None or self.dtypes.master == self.dtypes.compute

    def _point_into(self, full: Tensor) -> None:
        give(self.parameters)
        for parameter, view in zip(self.parameters, self.views(full), strict=True):
            parameter.data = view
        self._is_attached = True

    def _bump(self) -> None:
        """The values changed: what autograd saved before may not be used any more."""
        self._fresh = [version + 2 for version in self._fresh]
        self._stale = [version + 1 for version in self._fresh]
        _set_versions(self.parameters, self._fresh if self._full is not None else self._stale)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape in the memory of one element: NaN, or the lowest number of an integer dtype."""
    value = (
        float("nan") if dtype.is_floating_point else (0 if dtype == torch.bool else torch.iinfo(dtype).min)
    )
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def _gaps(layout: Bucket) -> list[tuple[int, int]]:
    """Ranges of the bucket that belong to no parameter."""
    edges = [(slot.offset, slot.offset + slot.elements) for slot in layout.slots]
    ends = [0, *(stop for _, stop in edges)]
    starts = [*(start for start, _ in edges), layout.elements]
    return [(stop, start) for stop, start in zip(ends, starts, strict=True) if stop < start]
