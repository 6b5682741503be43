"""The executor: module hooks that walk the Plan's list of Actions.

In a user's own loop the order of Units belongs to the user's Python. So the hooks are the loop: each asks for its
Unit's next Actions, and a cursor runs everything in the list up to there.

    forward hook before Unit u      run the list up to F(u)          hook on the outputs of u    ... up to B(u)
    forward hook after Unit u       run what closes u                last gradient of u landed   run what closes u
    end of the forward pass         run the rest                     end of the backward pass    run the rest

A Unit that this rank skips is gathered and reduced when the cursor passes it, so the ranks issue the same collectives
in the same order whatever their data made them do. What the list cannot serve (a Unit used a second time, or out of
order) is gathered on the spot and appended to ``departures``; the backward pass then mirrors what the forward pass did.
All ranks must depart alike: the names of their collectives are compared in each step.

The order starts as the order of registration. Every forward pass writes down its own; when all ranks have seen the same
one (their hashes travel with the gradient norm) the lists are made anew from it.

[Note: deferred gathers]
An UNSHARD ahead of its use finds its memory taken where the order changed since memory was given out. It then waits for
the F or B of its Unit, or for the cursor to pass that: at a point of the list, again, and so on every rank alike.

[Note: forced closing]
A Unit's backward window is over when all its gradients have landed. Where some never will (unused, frozen), the window
ends when the next Unit of the list opens: autograd runs later calls first, so everything that needs the Unit has run.
In a graph where that is not so, the version check of [Note: stale memory] or the late gradient below stops the step.

[Note: recomputing]
Activation checkpointing runs forward passes inside the backward pass. Such a Unit is gathered for its forward alone and
opens its backward window like any other. Where one checkpoint spans several Units, the last of them has opened already
and stands where an earlier one must: it makes way, and comes back when its own turn to recompute comes. autograd's
version check does not see what a checkpoint saved, so a gradient that lands in between is an error of our own.

[Note: side losses]
A block may keep a tensor for the loss beside what it returns, in an attribute of its own or of a module inside (a
router's loss). Its gradient may come before that of any output, so it opens the backward window as one of those does.
Where the tensor went another way (a list that blocks share) nobody opens it: a released weight is used then.

[Note: foreign backward]
A loss of another engine may pass through this model (a generator's loss through the discriminator). Its Units are then
gathered and released as ever, but nothing may land: its parameters must not require gradients meanwhile.

[Note: second derivatives]
``autograd.grad(..., create_graph=True)`` before ``engine.backward`` (a gradient penalty, a force) is a foreign backward
whose own graph is walked again in the step's backward pass. That graph saved weights in the order of a backward pass,
and no output says when it will be needed. So after it all Units are gathered for the whole of the step's backward pass,
which needs memory of their own (zero.reuse_buffers: false).

Cost: two hooks per Unit and pass, one per parameter.
"""

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.action import Action, Kind
from shardwise.plan.errors import UsageError
from shardwise.plan.lists import (
    Bracket,
    Strategy,
    backward_actions,
    forward_actions,
    is_inside,
    registration_brackets,
    with_absent,
)
from shardwise.plan.pytree import tensors_in
from shardwise.plan.unit import Unit


@dataclass
class UnitState:
    """One Unit on this rank."""

    unit: Unit
    module: nn.Module
    buckets: list[BucketState]
    trained_parameters: int
    has_frozen: bool
    missing: int = 0
    """Gradients that have not landed in this backward pass."""
    is_reduced: bool = False
    in_forward: int = 0
    """Calls of its forward that are under way: more than one where it calls itself."""
    in_backward: bool = False
    recomputes: bool = False
    """Gathered by a forward pass inside the backward pass. [Note: recomputing]"""
    made_way: bool = False
    """Its backward window is open, but its memory is lent to a Unit that recomputes."""

    def gather(self) -> None:
        """UNSHARD, finished."""
        for bucket in self.buckets:
            bucket.weight.start_unshard()
        for bucket in self.buckets:
            bucket.weight.finish_unshard()

    @property
    def is_complete(self) -> bool:
        """True when nothing of the Unit's backward pass can be outstanding."""
        return self.missing == 0 and self.trained_parameters > 0 and not self.has_frozen


_MODULE_STATE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class _Hook(partial[Any]):
    """A method of the executor on a module. A copy of the module has nothing to do with the executor."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return unhooked

    def __reduce__(self) -> Any:
        raise UsageError(
            "torch.save(model), pickle: the engine's hooks hang on the model, and a pickle would be code. Save "
            "engine.state_dict(), or call engine.close() first"
        )


def _own_modules(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in units:
            yield from _own_modules(child, units)


class _Method(NamedTuple):
    """A method that was wrapped on its module."""

    module: nn.Module
    name: str

    def remove(self) -> None:
        """What the class defines counts again."""
        vars(self.module).pop(self.name, None)


def unhooked(*args: Any, **kwargs: Any) -> None:
    """What stands in a copied module where the engine's hooks were."""


class Executor:
    """Runs the lists of one engine. ``states`` are the Units in order of registration, the root first."""

    def __init__(self, states: Sequence[UnitState], strategy: Strategy, prefetch_units: int = 0):
        self.states = list(states)
        self.strategy = strategy
        self.departures: list[str] = []
        """What departed from the Plan, newest last."""
        self.prefetch_units = prefetch_units
        self._trained = [state.trained_parameters > 0 for state in self.states]
        units = {id(state.module) for state in self.states}
        self._inside = [list(_own_modules(state.module, units)) for state in self.states]
        """Modules of each Unit, those of Units inside it left out."""
        self.brackets: tuple[Bracket, ...] = tuple(registration_brackets([s.unit.name for s in self.states]))
        """The order that the lists follow."""
        self._seen: list[Bracket] = []
        self._departed = False
        self._deferred: set[int] = set()
        self._skipped: list[int] = []
        """Units whose passes lay between the last two that the cursor stopped at."""
        self._current = 0
        """Unit of the pass at which the cursor stopped last."""
        self._forward = forward_actions(self.brackets, strategy, prefetch_units)
        self._backward: dict[tuple[tuple[Bracket, ...], bool], list[Action]] = {}
        self._list: list[Action] = []
        self._cursor = 0
        self.microbatch = -1
        """The microbatch that runs; in a pipeline others are under way beside it."""
        self._passes: dict[int, list[tuple[Bracket, ...]]] = {}
        """By microbatch the order of each forward pass whose backward pass has not been: the agreed one, or its own
        where it departed."""
        self._is_held = False
        self._is_backward = False
        self._is_foreign = False
        self._is_last = True
        self._adds_up = False
        """Whether earlier microbatches of the step wait for this one."""
        self._is_differentiated_twice = False
        """[Note: second derivatives]"""
        self._interrupted: tuple[list[Action], int, list[int]] | None = None
        """List, cursor and open Units of a forward pass in whose middle a foreign backward pass runs."""
        self._root_is_open = False
        self._root_is_held = False
        self._holders: dict[Hashable, UnitState] = {
            bucket.what: state for state in self.states for bucket in state.buckets
        }
        self._frozen = [
            (slot.name, parameter)
            for state in self.states
            for bucket in state.buckets
            if not bucket.layout.key.trained
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self._trained_buckets = [
            bucket for state in self.states for bucket in state.buckets if bucket.layout.key.trained
        ]
        self._is_marked = False
        """Whether marks stand in ``p.grad``."""
        self._handles: list[Any] = []
        self._run: dict[Kind, Callable[[UnitState], None]] = {
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.REDUCE: self._reduce,
        }
        self._install()

    # The list and its cursor -----------------------------------------------------------------------------------

    def run(self, action: Action) -> None:
        """Do one Action."""
        self._run[action.kind](self.states[action.unit])

    def _advance_to(self, kind: Kind, unit: int) -> bool:
        """Run the list up to the compute Action ``kind`` of ``unit``; False where it does not come any more."""
        actions = self._list
        for position in range(self._cursor, len(actions)):
            if actions[position][0] is kind and actions[position][1] == unit:
                break
        else:
            return False
        self._skipped = [action[1] for action in actions[self._cursor : position] if action[0].computes]
        self._pass_by(self._cursor, position)
        self._cursor, self._current = position + 1, unit
        return True

    def _finish_list(self) -> None:
        self._pass_by(self._cursor, len(self._list))
        self._cursor = len(self._list)

    def _pass_by(self, start: int, stop: int) -> None:
        """Run what serves the passes in between, and these not: this rank's data skipped them."""
        for action in self._list[start:stop]:
            if not action[0].computes:
                self._run[action[0]](self.states[action[1]])
            elif action[1] in self._deferred:
                self._need(self.states[action[1]])

    def _unshard(self, state: UnitState) -> None:
        if any(bucket.weight.in_the_way is not None for bucket in state.buckets):
            self._deferred.add(state.unit.index)  # [Note: deferred gathers]
            return
        for bucket in state.buckets:
            bucket.weight.start_unshard()

    def _need(self, state: UnitState) -> None:
        """The Unit's weights are needed now. Who was gathered ahead into its memory makes way."""
        for bucket in state.buckets:
            holder_name = bucket.weight.in_the_way
            if holder_name is None:
                continue
            holder = self._holders[holder_name]
            if holder.in_forward or (holder.in_backward and not state.recomputes):
                break  # the slot itself will complain
            for other in holder.buckets:
                other.weight.reshard()
            holder.made_way = holder.in_backward
            if not holder.in_backward:
                self._deferred.add(holder.unit.index)
        state.gather()
        self._deferred.discard(state.unit.index)

    def _reshard(self, state: UnitState) -> None:
        if not self._is_held:
            for bucket in state.buckets:
                bucket.weight.reshard()
        state.in_forward = 0
        state.in_backward = state.recomputes = state.made_way = False

    def _reduce(self, state: UnitState) -> None:
        for bucket in state.buckets:
            if bucket.layout.key.trained:
                bucket.gradient.reduce()
        state.is_reduced = True

    # Forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, index: int, module: nn.Module, inputs: Any) -> None:
        state = self.states[index]
        if self._root_is_held and index == 0:
            return
        if self._is_backward:
            if self.strategy.cuts_weight and (state.made_way or not state.in_backward):
                state.recomputes = True
                self._need(state)
                state.recomputes, state.made_way = not state.in_backward, False
            return
        if index == 0:
            self.unmark_gradients()
            self._release_all()  # what an exception in the last pass left behind
            self._begin(self._forward)
            self._seen, self._departed = [], False
            self._root_is_open = True
        if self._root_is_open:
            self._seen.append(Bracket(True, index))
        is_next = self._advance_to(Kind.F, index)
        if self.strategy.cuts_weight:
            if not is_next:
                self._depart(f"forward of {state.unit.title} is not next in the list")
                self._departed = True
            self._need(state)
            state.in_forward += 1

    def _after_forward(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        state = self.states[index]
        if self._root_is_held and index == 0:
            return
        if self._is_backward:
            if state.recomputes and not state.in_backward:
                self._reshard(state)
                self._watch(index, output)
            return
        if self._root_is_open:
            self._seen.append(Bracket(False, index))
        if self.strategy.cuts_weight:
            state.in_forward -= 1
            if state.in_forward <= 0:
                self._close_forward(state)
            self._watch(index, output)
        if index == 0:
            self._finish_list()
            self._root_is_open = False
            if torch.is_grad_enabled():
                order = self._completed(self._seen) if self._departed else self.brackets
                self._passes.setdefault(self.microbatch, []).append(order)

    def _watch(self, index: int, output: Any) -> None:
        """Whichever output's gradient comes first opens the Unit's backward window."""
        if torch.is_grad_enabled():
            for tensor in (*tensors_in(output), *self._kept(index)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, index))

    def _kept(self, index: int) -> Iterator[Tensor]:
        """What the Unit's modules hold in attributes and has a graph. [Note: side losses]"""
        for module in self._inside[index]:
            for name, value in vars(module).items():
                if isinstance(value, Tensor | tuple | list | dict) and name not in _MODULE_STATE:
                    yield from (tensor for tensor in tensors_in(value) if tensor.grad_fn is not None)

    def _close_forward(self, state: UnitState) -> None:
        index, actions = state.unit.index, self._list
        if self._cursor < len(actions) and actions[self._cursor] == Action(Kind.RESHARD, index):
            self._cursor += 1
            self._reshard(state)
        elif Action(Kind.RESHARD, index) not in actions[self._cursor :]:
            self._reshard(state)

    def _release_all(self) -> None:
        if self.strategy.cuts_weight:
            for state in self.states:
                self._reshard(state)

    def _begin(self, actions: list[Action]) -> None:
        self._list, self._cursor, self._skipped = actions, 0, []
        self._deferred.clear()

    def hold(self) -> None:
        """Gather every Unit and keep it through all microbatches of a step; memory must not be shared then."""
        self._gather_all()
        self._is_held = True

    def _gather_all(self) -> None:
        for state in self.states:
            state.gather()

    def let_go(self) -> None:
        """End of ``hold``."""
        self._is_held = False
        self._release_all()

    def run_as_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``function`` inside the root's window, as if it were the model's forward (which it may call)."""
        root = self.states[0].module
        self._before_forward(0, root, args)
        self._root_is_held = True
        try:
            output = function(*args, **kwargs)
        finally:
            self._root_is_held = False
        self._after_forward(0, root, args, output)
        return output

    # Backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, last: bool) -> None:
        """Before autograd runs. ``last``: the last microbatch of the step."""
        self.unmark_gradients()
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would answer by way of Python
            unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            raise UsageError(
                f"backward: {unfrozen[0]} was frozen when the engine was made and requires a gradient now, for which "
                "there is no buffer; set requires_grad before initialize(), or save, make a new engine and load"
            )
        order = self._order_of_passes()
        if (order, last) not in self._backward:
            if len(self._backward) > 8:
                self._backward.clear()
            self._backward[order, last] = backward_actions(
                order, self.strategy, self._trained, last, self.prefetch_units
            )
        self._begin(self._backward[order, last])
        self._is_backward, self._is_foreign, self._is_last = True, False, last
        for state in self.states:
            state.missing = state.trained_parameters
            state.is_reduced = state.in_backward = state.recomputes = state.made_way = False
            for bucket in state.buckets:
                bucket.gradient.reduces_alone = last and not self._adds_up
        if self._is_differentiated_twice and not self._is_held:
            self._hold_for_second_derivatives()

    def _hold_for_second_derivatives(self) -> None:
        """[Note: second derivatives] Where Units share memory nothing is held, and autograd's version check decides."""
        try:
            self._gather_all()
        except UsageError:
            self._release_all()
        else:
            self._is_held = True

    def run_backward(self, run: Callable[[], None]) -> None:
        """``run``, which is autograd's part, and what is left to do after it."""
        try:
            run()
            self.end_backward()
        except Exception as error:
            if "modified by an inplace operation" in str(error) and self.strategy.cuts_weight:
                raise UsageError(
                    "backward: a weight was needed after its Unit had been released, or was changed in place between "
                    "forward and backward. Call the module's forward (not its inner functions) so that its hooks run, "
                    "or name one Unit around what belongs together in zero.units; a block returns tensors in tuples, "
                    "lists, dictionaries or dataclasses, where hooks find them, and not in objects of another kind; "
                    "for a loss on gradients (autograd.grad with create_graph=True) set zero.reuse_buffers: false. "
                    f"({error})"
                ) from error
            if " is released now, is used by" in str(error):
                raise UsageError(
                    "backward: a block was to recompute before the gradient of any of its outputs had come, as for a "
                    "side loss that it put into a list or an object. Return it from the block, keep it in an attribute "
                    "of its module (self.side_loss = ...), leave the block out of recompute.blocks, or take zero.stage "
                    f"2. ({error})"
                ) from error
            raise

    def _order_of_passes(self) -> tuple[Bracket, ...]:
        passes = self._passes.get(self.microbatch, [])
        return tuple(bracket for brackets in passes for bracket in brackets) or self.brackets

    def _begin_foreign(self) -> None:
        """[Note: foreign backward]"""
        untrained = [False] * len(self.states)
        order = self._order_of_passes()
        if self._root_is_open:
            self._interrupted = self._list, self._cursor, [state.in_forward for state in self.states]
        self._begin(backward_actions(order, self.strategy, untrained, False, self.prefetch_units))
        self._is_backward = self._is_foreign = True
        if torch.is_grad_enabled() and self.strategy.cuts_weight:
            self._is_differentiated_twice = True
        for state in self.states:
            state.missing = state.trained_parameters
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """After autograd has run: whatever did not close by itself closes now."""
        self._finish_list()
        if self._is_differentiated_twice and not self._is_foreign:
            self._is_held = False
        self._release_all()
        self._is_backward = False
        if not self._is_foreign:
            self._adds_up = not self._is_last
            self._is_differentiated_twice = False
        if self._interrupted is not None:
            actions, self._cursor, in_forward = self._interrupted
            self._list, self._interrupted = actions, None
            for state, calls in zip(self.states, in_forward, strict=True):
                state.in_forward = calls
                if calls:
                    state.gather()
        elif not (self._is_foreign and self._is_differentiated_twice):
            self._passes.pop(self.microbatch, None)

    def mark_gradients(self) -> None:
        """The user's code goes on: what it reads in ``p.grad`` is an error from here to the step."""
        for bucket in self._trained_buckets:
            bucket.gradient.mark()
        self._is_marked = True

    def unmark_gradients(self, at_step: bool = False) -> None:
        """Take the marks out of ``p.grad``.

        Errors: UsageError where the user put a gradient of his own in the place of one, or ``at_step`` dropped them.
        """
        if not self._is_marked:
            return
        self._is_marked = False
        changes = [bucket.gradient.unmark() for bucket in self._trained_buckets]
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

    def abandon(self) -> None:
        """After an exception in the middle of a pass: back to the state between two steps."""
        if self._is_marked:
            self._is_marked = False
            for bucket in self._trained_buckets:
                bucket.gradient.unmark()
        self._begin([])
        self._is_backward = self._adds_up = self._is_held = self._is_differentiated_twice = False
        self._interrupted = None
        self._passes.clear()
        self._release_all()
        for state in self.states:
            for bucket in state.buckets:
                bucket.gradient.drop_gradients()

    def _before_backward(self, index: int, grad: Tensor) -> None:
        state = self.states[index]
        if state.in_backward:
            return
        if not self._is_backward:
            self._begin_foreign()
        state.in_backward = True
        # A tensor that is the output of two nested Units calls the inner one's hook first: the outer one is late then,
        # and what comes next in the list is not its turn.
        current = self.states[self._current].unit.name
        is_late = index in self._skipped and is_inside(current, state.unit.name)
        if not is_late and not self._advance_to(Kind.B, index):
            self._depart(f"backward of {state.unit.title} is not next in the list")
        self._need(state)

    def _land(self, index: int, bucket: BucketState, place: int, parameter: nn.Parameter) -> None:
        state = self.states[index]
        name = bucket.layout.slots[place].name
        if self._is_foreign or not self._is_backward:
            parameter.grad = None
            raise UsageError(
                f"backward: the gradient of {name} arrived outside engine.backward(loss), which alone knows when to "
                "reduce. Call it instead of loss.backward(). Where another engine's loss passes through this model (a "
                "generator's through its discriminator) torch would let the gradients land for zero_grad() to drop; "
                "here set model.requires_grad_(False) before that loss is computed and True again after its backward"
            )
        if state.is_reduced:
            raise UsageError(
                f"backward: {name} got another gradient after those of its Unit {state.unit.title!r} were reduced. "
                "Reentrant activation checkpointing does that (set use_reentrant=False), and a graph that returns to a "
                "block after later ones (name one Unit around them in zero.units)"
            )
        if state.made_way:
            raise UsageError(
                f"backward: {name} got a gradient while another Unit, which recomputes, "
                "stood in the memory of its weights. Checkpoint one Unit at a time, or set zero.reuse_buffers: false"
            )
        if bucket.gradient.accumulate(place, parameter):
            state.missing -= 1
            if state.missing == 0:
                self._close_complete()

    def _close_complete(self) -> None:
        """Run what closes Units whose gradients have all landed, as far as the list's order allows."""
        actions, position = self._list, self._cursor
        while position < len(actions):
            kind, unit = actions[position][:2]
            if kind is Kind.UNSHARD or (not kind.computes and not self.states[unit].is_complete):
                return
            position += 1
            if not kind.computes:
                self._run[kind](self.states[unit])
                self._cursor = position

    # Order -----------------------------------------------------------------------------------------------------

    @property
    def order_hash(self) -> int:
        """A 20-bit number of the order that the last forward pass followed; its squares sum exactly on 8,192 ranks."""
        text = repr([tuple(bracket) for bracket in self._seen]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:3]) >> 4

    def adopt_order(self) -> None:
        """All ranks have seen the same order: follow it from now on."""
        if self._seen:
            order = self._completed(self._seen)
            if order != self.brackets:
                self.brackets = order
                self._forward = forward_actions(order, self.strategy, self.prefetch_units)
                self._backward.clear()

    def _completed(self, seen: Sequence[Bracket]) -> tuple[Bracket, ...]:
        """An order with the Units that did not run: a later step may use them on some ranks, and all are reduced."""
        return with_absent(seen, self.brackets)

    def _depart(self, text: str) -> None:
        self.departures.append(text)
        del self.departures[:-100]

    # Hooks -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        for state in self.states:
            index = state.unit.index
            # The lists need a window for the root even where it holds no parameter itself.
            self._handles += [
                # First of all: a hook of the user's (weight_norm, say) reads the weights.
                state.module.register_forward_pre_hook(_Hook(self._before_forward, index), prepend=True),
                state.module.register_forward_hook(_Hook(self._after_forward, index)),
            ]
            for bucket in state.buckets:
                for place, parameter in enumerate(bucket.parameters if bucket.layout.key.trained else ()):
                    hook = partial(self._land, index, bucket, place)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def gather_around(self, index: int, method: str) -> None:
        """Let ``method`` of a Unit's module be called as its forward is: its weights are there while it runs."""
        state, module = self.states[index], self.states[index].module
        function = getattr(module, method)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if state.in_forward or (index == 0 and self._root_is_open):
                return function(*args, **kwargs)  # from its own forward
            if index == 0:
                return self.run_as_forward(function, args, kwargs)
            self._before_forward(index, module, args)
            output = function(*args, **kwargs)
            self._after_forward(index, module, args, output)
            return output

        setattr(module, method, call)
        self._handles.append(_Method(module, method))

    def remove_hooks(self) -> None:
        """Give the model back as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
