"""The hooks of a stage's Units: the user's Python decides what runs next, the walker runs the Actions that precede it.

In a user's own loop the user's Python sets the order of the Units. So the hooks find the Unit's place in the list:

    forward hook before Unit u      run the list up to F(u)          hook on the outputs of u        run up to B(u)
    forward hook after Unit u       run the Actions that close u     last gradient of u accumulated  close u
    end of the forward pass         run the rest                     end of the backward pass        run the rest

[step 1] to [step 9] are numbers of the drawing in docs/design.md; the other steps are in engine/step/end.py.

A Unit that this rank skips is gathered and reduced when the cursor passes it, so the ranks issue the same collectives
in the same order whatever their data made them do. A Unit that the list does not expect (a Unit used a second time, or
out of order) is gathered on the spot and recorded in the trace as a divergence; the backward pass then mirrors what the
forward pass did. All ranks must diverge alike: the names of their collectives are compared in each step.

[Note: forced closing]
A Unit's backward window is over when all its gradients have been accumulated. If some gradients never arrive (unused,
frozen), the window ends when the next Unit of the list opens: autograd runs later calls first, so everything that needs
the Unit has run. Units whose weights are always in memory open in this way only if their saved activations lie
elsewhere (RELOAD). In a graph that breaks this rule, the version check of [Note: stale memory] or the error about late
gradients below stops the step.

[Note: recomputing]
Activation checkpointing runs forward passes inside the backward pass. A recomputed Unit is gathered for its forward
only and opens its backward window like any other. If one checkpoint spans several Units, the last of them has opened
already and occupies the slot that an earlier one needs: the later Unit is displaced, and is gathered again when its own
turn to recompute comes. autograd's version check does not cover what a checkpoint saved, so a gradient that arrives
while its Unit is displaced is an error of our own.

[Note: side losses]
A block may keep a tensor for the loss beside its return value, in an attribute of its own or of a module inside (a
router's loss). The gradient of that tensor may arrive before the gradient of any output, so a hook on the tensor opens
the backward window too. If the tensor left the block another way (a list that blocks share), no hook opens the window,
and the released weight is used, which is an error.

[Note: foreign backward]
A loss of another engine may pass through this model (a generator's loss through the discriminator). The model's Units
are then gathered and released as usual, by a separate list, but no gradient may be accumulated: the model's parameters
must not require gradients meanwhile.

[Note: parts of the root]
A method of the model may call a part of the model directly: ``generate`` of an encoder-decoder model runs the encoder,
whose embedding the decoder shares, so that the embedding lies in the root's Unit. Outside of every pass and without
gradients, a module of the root's Unit that has parameters gathers that Unit around its own forward. With gradients such
a call stays an error: no backward window of the root would open.

Cost: two hooks per Unit and pass, one per parameter, and two per module of the root's Unit with parameters of its own.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.base.pytree import tensors_in
from shardwise.comm.duals import apart
from shardwise.kernels.deferred import ProductQueue
from shardwise.parallel.zero.bucket import BucketState
from shardwise.parallel.zero.marks import GradientSentinels
from shardwise.parallel.zero.order import UnitOrder
from shardwise.parallel.zero.windows import UnitState, UnitWindows, WindowState
from shardwise.plan.action import Action, Kind
from shardwise.plan.lists import UnitBoundary, is_inside
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.walker import Walker

_MODULE_STATE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HOLDERS = (Tensor, tuple, list, dict)


class PassKind(Enum):
    """Kind of pass that the stage's module is running."""

    NONE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    FOREIGN = auto()
    """A backward pass that the engine did not begin. See [Note: foreign backward]."""

    __hash__ = object.__hash__  # Enum's own runs in Python


_NEXT = {
    PassKind.NONE: {PassKind.FORWARD, PassKind.BACKWARD, PassKind.FOREIGN},
    PassKind.FORWARD: {PassKind.NONE, PassKind.FOREIGN, PassKind.BACKWARD},
    PassKind.BACKWARD: {PassKind.NONE},
    PassKind.FOREIGN: {PassKind.NONE, PassKind.FORWARD, PassKind.BACKWARD},
}


class PassLists(Protocol):
    """The lists of Units' Actions in single passes of a stage, which compose/lists.py makes.

    Units in orders are numbered within the stage, and Units in lists on the rank.
    """

    @property
    def order(self) -> UnitOrder:
        """The order of the stage's Units."""

    def forward(self) -> Sequence[Action]:
        """Return the list of a forward pass without a backward pass, in the agreed order."""

    def backward(
        self, order: Sequence[UnitBoundary], last: bool, first: bool, kind: Kind
    ) -> Sequence[Action]:
        """Return the list of the backward pass of ``order``, the last or the first one of the step or neither.

        ``kind`` is B, or I for a pass that leaves gradients of weights to W.
        """

    def foreign(self, order: Sequence[UnitBoundary]) -> Sequence[Action]:
        """Return the list of a backward pass that adds to no gradient."""


class _InterruptedForward(NamedTuple):
    """State of a pass that a foreign backward pass interrupts."""

    running: PassKind
    calls: list[int]
    """Number of running forward calls of each Unit."""


class _OwnAttributes:
    """The attributes of a Unit's modules that not every module has.

    Names are read again if the number of a module's attributes has changed or a name is gone.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._known: list[tuple[int, Callable[[dict[str, Any]], tuple[Any, ...]] | None]] = [
            (-1, None) for _ in modules
        ]
        """For each module, the number of all attributes when names were read, and the function that returns the values
        of the module's own; None if there are none."""

    def holders(self) -> Iterator[Any]:
        """Yield the present values that are tensors or may hold tensors."""
        for place, (count, values) in enumerate(self._known):
            held = vars(self.modules[place])
            if len(held) != count:
                values = self._read(place, held)
            if values is None:
                continue
            try:
                found = values(held)
            except KeyError:  # one attribute was deleted and another set
                values = self._read(place, held)
                found = () if values is None else values(held)
            for value in found:
                if isinstance(value, _HOLDERS):
                    yield value

    def _read(self, place: int, held: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
        names = [name for name in held if name not in _MODULE_STATE]
        # One more name that every module has: of a single name ``itemgetter`` returns no tuple.
        values = itemgetter(*names, "training") if names else None
        self._known[place] = (len(held), values)
        return values


class ModuleHook(partial[Any]):
    """A method of the engine used as a hook on a module, which does nothing in a copy of the module."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return unhooked

    def __reduce__(self) -> Any:
        raise UsageError(
            "torch.save(model), pickle: the engine's hooks hang on the model, and a pickle would be code. Save "
            "engine.state_dict(), or call engine.close() first"
        )


class _WrappedMethod(NamedTuple):
    """A method that was wrapped on its module."""

    module: nn.Module
    name: str

    def remove(self) -> None:
        """Remove the wrapper, so that the method of the class is used again."""
        vars(self.module).pop(self.name, None)


def unhooked(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the replacement of the engine's hooks in a copied module."""


@dataclass
class _InstalledHooks:
    """The hooks on modules and parameters that ``remove`` takes away, and the data that these hooks need."""

    handles: list[Any] = field(default_factory=list)
    landing: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    """Trained parameters, each with the number of the hook that takes its gradient over."""
    watched: list[BucketState] = field(default_factory=list)
    """Buckets whose parameters have their plain classes while a pass runs, because a compiler reads the classes."""


class UnitHooks:
    """The module hooks of a stage's Units.

    Args:
        windows: The windows of the stage's Units.
        lists: Makes the lists of single passes of the stage, and stores the order of its Units.
        walker: The walker of the rank's list.
        stage: Number of the stage.
        is_driven: True if a schedule's loop enters the passes of the stage, False if the hooks do.
        is_compiled: True if blocks are compiled.
        queue: The products that wait for W; None if the schedule has no W.
    """

    def __init__(
        self,
        windows: UnitWindows,
        lists: PassLists,
        walker: Walker,
        stage: int,
        is_driven: bool,
        is_compiled: bool = False,
        queue: ProductQueue | None = None,
    ):
        self.windows = windows
        self.lists = lists
        self.marks = GradientSentinels([bucket for state in self.states for bucket in state.buckets])
        self.microbatch = -1
        """The microbatch that runs; in a pipeline other microbatches are in flight at the same time."""
        self._walker = walker
        self._stage = stage
        self._is_driven = is_driven
        windows.products = queue
        self._pass = PassKind.NONE
        self._is_aside = False
        """True if the forward pass walks a separate list."""
        self._interrupted: _InterruptedForward | None = None
        self._is_differentiated_twice = False
        """True after a foreign backward pass with a graph. See [Note: second derivatives]."""
        self._root_is_held = False
        self.adopts: Callable[[], bool] | None = None
        """Callback at a backward pass that the engine did not begin; returns True if the pass now belongs to the
        engine (plain_backward.py)."""
        units = {id(state.module) for state in self.states}
        self._inside = [_OwnAttributes([*_own_modules(state.module, units)]) for state in self.states]
        """Attributes of the modules of each Unit, without the modules of Units inside it."""
        self._installed = _InstalledHooks(
            watched=[bucket for state in self.states for bucket in state.buckets] if is_compiled else []
        )
        """Installed hooks, with the trained parameters and the keys of their accumulation hooks."""
        self._install()

    @cached_property
    def order(self) -> UnitOrder:
        """The order of the stage's Units."""
        return self.lists.order

    @cached_property
    def has_windows(self) -> bool:
        """True if some weights must be gathered before use."""
        return any(state.has_windows for state in self.states)

    def _enter(self, to: PassKind) -> None:
        if to is not self._pass:
            before = self._pass
            assert to in _NEXT[before], f"stage {self._stage}: {before.name} does not become {to.name}"
            self._pass = to

    def recover(self) -> None:
        """Reset the passes after an exception that the user caught in the middle of a pass.

        The step stays as it was before that pass.

        Raises:
            UsageError: If the interrupted pass was ``engine.backward``'s own (Ctrl-C), because some of its
                gradients may have been accumulated.
        """
        if self._pass is PassKind.BACKWARD:
            raise UsageError(
                "the last engine.backward(loss) was interrupted before its end, so some of its gradients count and "
                "some do not; call engine.discard() on all ranks and begin the step again"
            )
        if self._pass is PassKind.FOREIGN:
            assert self._interrupted is not None, "a foreign backward pass interrupts something"
            self._walker.turn_back()
            self._interrupted = None
        if self._is_aside:
            self._walker.turn_back()
            self._is_aside = False
        if self._pass is not PassKind.NONE:
            self.windows.close_all()
            self._enter(PassKind.NONE)

    @cached_property
    def _places(self) -> dict[int, tuple[BucketState, int]]:
        """The bucket of each trained parameter, and its index there, by the parameter's ``id``."""
        return {
            id(parameter): (bucket, place)
            for state in self.states
            for bucket in state.buckets
            if bucket.layout.key.trained
            for place, parameter in enumerate(bucket.parameters)
        }

    @cached_property
    def states(self) -> list[UnitState]:
        """The stage's Units, in order of their index."""
        return self.windows.states

    @cached_property
    def _recalls(self) -> bool:
        """True if the saved activations of some Units lie on another tier."""
        return any(state.strategy.saved_tier != "device" for state in self.states)

    @property
    def is_idle(self) -> bool:
        """True if no backward pass runs."""
        return not self._is_backward

    @property
    def _is_backward(self) -> bool:
        return self._pass is PassKind.BACKWARD or self._pass is PassKind.FOREIGN

    # Forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, index: int, module: nn.Module, inputs: Any) -> None:
        state = self.states[index]
        if self._root_is_held and index == 0:
            return
        if self._is_backward and index == 0 and torch._C._current_graph_task_id() < 0:
            self.recover()
        if self._is_backward:
            if state.has_windows and state.window is not WindowState.BACKWARD:
                self.windows.recompute(state)
            return
        if index == 0:  # [step 1]
            self._begin_forward()
        if self._pass is PassKind.FORWARD:
            self.order.saw(True, index)
        is_next = self._walker.run_to(Kind.F, self.windows.first + index)  # [step 2]
        if not is_next and (self._pass is PassKind.FORWARD or torch.is_grad_enabled()):
            self._walker.diverge(f"forward of {state.unit.title} is not next in the list")
        if self.has_windows or self._recalls:
            self.order.has_departed |= not is_next
        if state.has_windows:
            self.windows.need(state, is_listed=is_next)
            state.enter(WindowState.FORWARD)
            state.calls += 1
        else:
            for bucket in state.buckets:
                bucket.weight.finish_update()
                if self._installed.watched:
                    bucket.views.unwatch()

    def _watch(self, is_on: bool) -> None:
        """Begin or stop to detect reads of ``p.data``, if blocks are compiled."""
        for bucket in self._installed.watched:
            if is_on:
                bucket.weight.watch()
            else:
                bucket.views.unwatch()

    def _before_part(self, module: nn.Module, inputs: Any) -> None:
        """Gather the root's Unit for a part of the model that is called directly.

        See [Note: parts of the root].
        """
        if self._pass is not PassKind.NONE or torch.is_grad_enabled() or self._root_is_held:
            return
        root = self.states[0]
        if not root.calls:
            self.windows.need(root, is_listed=False)
            root.enter(WindowState.FORWARD)
        root.calls += 1

    def _after_part(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Release the root's Unit after the outermost directly called part.

        See [Note: parts of the root].
        """
        root = self.states[0]
        if (
            self._pass is PassKind.NONE
            and not self._root_is_held
            and not torch.is_grad_enabled()
            and root.calls
        ):
            root.calls -= 1
            if not root.calls:
                self.windows.close(root)

    def _begin_forward(self) -> None:
        self.marks.clear()
        self.recover()
        if not self._is_driven and not (torch.is_grad_enabled() and self._walker.enter(Kind.F, self._stage)):
            if torch.is_grad_enabled():
                self._walker.diverge("a further forward pass, before the backward pass that is next")
            self._walker.turn_aside(self.lists.forward())
            self._is_aside = True
        self.windows.close_all()  # windows that an exception in the last pass left open
        self.windows.begin_pass()
        self.order.begin()
        self._enter(PassKind.FORWARD)

    def _after_forward(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        state = self.states[index]
        if self._root_is_held and index == 0:
            return
        if self._is_backward:
            if state.window is WindowState.RECOMPUTING:
                self.windows.end_recompute(state)
                self._watch_output(index, output)
            return
        if self._pass is PassKind.FORWARD:
            self.order.saw(False, index)
        if state.has_windows:
            state.calls -= 1
            if state.calls <= 0:
                self._close_forward(state)  # [step 3]
        if state.has_windows or self._recalls:
            self._watch_output(index, output)
        if index == 0:
            self._end_forward(_asks_for_gradients(output))  # [step 4]

    def _end_forward(self, has_backward: bool) -> None:
        self._walker.finish_pass()
        self._enter(PassKind.NONE)
        self._watch(True)
        if self._is_aside:
            self._walker.turn_back()
            self._is_aside = False
        elif not has_backward:  # a method without gradients of its own, such as generate
            self._walker.withdraw()
        self.order.end(self.microbatch if has_backward else None)

    def _watch_output(self, index: int, output: Any) -> None:
        """Register a hook on every output: the first gradient of any output opens the Unit's backward window."""
        if torch.is_grad_enabled():
            for tensor in (*tensors_in(output), *self._kept(index)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, index))

    def _kept(self, index: int) -> Iterator[Tensor]:
        """Yield the tensors with a graph that the Unit's modules hold in attributes.

        See [Note: side losses].
        """
        for value in self._inside[index].holders():
            yield from (tensor for tensor in tensors_in(value) if tensor.grad_fn is not None)

    def _close_forward(self, state: UnitState) -> None:
        state.enter(WindowState.CLOSED)
        state.calls = 0
        unit, following = self.windows.first + state.unit.index, self._walker.next_in_pass()
        if following is not None and following[:2] == (Kind.RESHARD, unit):
            self._walker.run_next()
        elif not any(action[:2] == (Kind.RESHARD, unit) for action in self._walker.rest_of_pass()):
            if self._pass is PassKind.FORWARD and not self.order.has_departed and not state.is_kept:
                self._walker.diverge(f"no RESHARD of the list releases the weights of {state.unit.title}")
            self.windows.close(state)

    def run_as_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function inside the root's window, as if the function were the model's forward.

        Args:
            function: The function, which may call the model's forward.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The result of the function.
        """
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
        """Begin a backward pass, before autograd runs [step 5].

        Args:
            last: True for the last backward pass of the step.
        """
        self.marks.clear()
        self.marks.check_frozen()
        self._land_last()
        self.recover()
        if not self._is_driven:
            is_entered = self._walker.enter(Kind.B, self._stage)
            assert is_entered, "the step's list has a pair of passes for every backward pass"
        is_half = self._walker.running_pass.kind is Kind.I
        order = self.order.of_passes(self.microbatch)
        if order != self.order.agreed:
            self._walker.replan(
                self.lists.backward(order, last, not self.windows.adds_up, Kind.I if is_half else Kind.B),
                "the forward pass took another way",
            )
        self.windows.begin_backward(last, self._is_differentiated_twice, is_half)
        if is_half:
            assert self._queue is not None, "a list with I has W, for which products wait"
            self._queue.open(self.microbatch)
        self._watch(False)
        self._enter(PassKind.BACKWARD)

    def run_backward(self, run: Callable[[], None]) -> None:
        """Run autograd's part of a backward pass and everything that follows it.

        Args:
            run: Function that calls autograd.

        Raises:
            UsageError: If a weight was used after its release or edited between forward and backward, or if a
                block recomputed before the gradient of any of its outputs had arrived.
        """
        try:
            run()
            self.end_backward()
        except Exception as error:
            if "modified by an inplace operation" in str(error) and self.has_windows:
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
                    "of its module (self.side_loss = ...), leave the block out of recompute.blocks, or keep weights "
                    f"there (zero.stage: 2, offload.parameters: device). ({error})"
                ) from error
            raise

    def _begin_foreign(self) -> None:
        """Begin a backward pass that the engine did not begin. See [Note: foreign backward]."""
        self._interrupted = _InterruptedForward(self._pass, [state.calls for state in self.states])
        self._walker.turn_aside(self.lists.foreign(self.order.of_passes(self.microbatch)))
        self._enter(PassKind.FOREIGN)
        if torch.is_grad_enabled() and self.has_windows:
            self._is_differentiated_twice = True
        self.windows.begin_pass()
        for state in self.states:
            state.missing = state.trained_parameters
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """End a backward pass after autograd has run [step 9]: close every window that is still open."""
        self._walker.finish_pass()
        self._watch(True)
        is_foreign = self._pass is PassKind.FOREIGN
        if not is_foreign:
            is_half = self._backward is Kind.I
            self.windows.check_backward(is_half)
            self.windows.end_backward(is_half)
            self._is_differentiated_twice = False
            self._close_queue()
        self.windows.close_all()
        if not is_foreign:
            self._enter(PassKind.NONE)
            self.order.done(self.microbatch)
            return
        assert self._interrupted is not None, "a foreign backward pass interrupts something"
        running, calls = self._interrupted
        self._interrupted = None
        self._walker.turn_back()
        self._enter(running)
        if running is not PassKind.FORWARD:
            if not self._is_differentiated_twice:
                self.order.done(self.microbatch)
            return
        for state, under_way in zip(self.states, calls, strict=True):
            if under_way:
                state.calls = under_way
                state.enter(WindowState.FORWARD)
                state.gather()

    @property
    def _queue(self) -> ProductQueue | None:
        """The products that wait for W; None if the schedule has no W."""
        return self.windows.products

    @property
    def _backward(self) -> Kind:
        """Kind of the running backward pass of the engine's own: I while products wait, else B."""
        return Kind.I if self._queue is not None and self._queue.is_open else Kind.B

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def run_weights(self, last: bool) -> None:
        """Run W: compute the gradients that I of the same microbatch has left, Unit by Unit, as the list has them.

        Args:
            last: True for the last W of the step.
        """
        assert self._queue is not None, "a list with W has products that wait"
        self._enter(PassKind.BACKWARD)
        self.windows.begin_weights(last)
        self._walker.finish_pass()
        self.windows.end_weights()
        for index in self._queue.left(self.microbatch):
            self._walker.diverge(
                f"no W of the list has computed the gradients of {self.states[index].unit.title}"
            )
        self._enter(PassKind.NONE)

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    @recorded
    def add_weights(self, action: Action) -> None:
        """Run W of a Unit: compute the products that wait, and add them to the Unit's gradients.

        Args:
            action: The W.
        """
        assert self._queue is not None, "a list with W has products that wait"
        with torch.no_grad():
            for parameter, gradient in self._queue.take(self.microbatch, self.windows.of(action).unit.index):
                bucket, place = self._places[id(parameter)]
                bucket.gradient.take(place, gradient)
                del gradient  # before the next product is computed

    def _is_left_for_weights(self, state: UnitState, parameter: nn.Parameter) -> bool:
        """Let a gradient that autograd has computed in I wait for the W of its Unit, if the Unit has one."""
        if self._queue is None or not self._queue.is_open or not self.windows.is_later(state):
            return False
        if parameter.grad is not None:
            grad, parameter.grad = parameter.grad, None
            self._queue.put(parameter, lambda: grad, *([grad] if grad.layout is torch.strided else []))
            state.missing -= 1
            if state.missing == 0:
                self._walker.run_while(self._may_close)
        return True

    def end_step(self) -> None:
        """End the step, after the optimizer has used the gradients."""
        self.order.forget()
        self.windows.end_step()

    def abandon(self) -> None:
        """Reset everything to the state between two steps, after an exception in the middle of a pass."""
        self.marks.drop()
        self._pass, self._is_aside, self._interrupted = PassKind.NONE, False, None
        self._is_differentiated_twice = False
        self._close_queue()
        if self._queue is not None:
            self._queue.clear()
        self.order.forget()
        self.windows.drop()
        self._watch(True)

    def _before_backward(self, index: int, grad: Tensor) -> None:
        state = self.states[index]
        if state.is_in_backward:
            return
        if not state.has_windows:  # only its saved activations are needed (RELOAD)
            if self._is_backward:
                state.has_passed |= self._walker.run_to(self._backward, self.windows.first + index)
            return
        if not self._is_backward and not (self.adopts is not None and self.adopts()):
            self._begin_foreign()
        is_next = self._walker.run_to(self._backward, self.windows.first + index)  # [step 6]
        if not is_next:
            self._walker.diverge(f"backward of {state.unit.title} is not next in the list")
        state.has_passed = True  # a divergence has told of the other case
        if not state.is_in_backward:
            self._open_backward(state, is_next)

    def _open_backward(self, state: UnitState, is_listed: bool = True) -> None:
        state.enter(WindowState.BACKWARD)
        self.windows.need(state, is_listed=is_listed)

    def passed_by(self, action: Action) -> None:
        """Handle a Unit's F, B or I that the cursor passes without a hook having announced it.

        Args:
            action: The F, B or I.
        """
        state, target = self.windows.of(action), self._walker.target
        self.windows.need_if_deferred(state)
        if action.kind is not Kind.F:
            state.has_passed = True
            # Weights that are always in memory need no hooks, and a frozen Unit gets no gradient. A Unit that ran
            # twice in one window opens the window once.
            is_silent = not state.has_windows or not state.trained_parameters or state.is_in_backward
            # A tensor that is the output of two nested Units calls the inner one's hook first.
            is_around = target is not None and is_inside(self.windows.of(target).unit.name, state.unit.name)
            if is_around and state.has_windows and not state.is_in_backward:
                self._open_backward(state)
            if is_silent or is_around:
                self._walker.passed(action)
                return
        self._walker.diverge(f"{action} did not run: {state.unit.title} was skipped")

    def _accumulate(self, index: int, bucket: BucketState, place: int, parameter: nn.Parameter) -> None:
        state = self.states[index]
        is_late = self._pass is not PassKind.BACKWARD or state.window is WindowState.DISPLACED
        if not is_late and self._is_left_for_weights(state, parameter):
            return
        if is_late or state.is_reduced:
            parameter.grad = None
            raise self._late_gradient(state, bucket.layout.slots[place].name)
        if bucket.gradient.accumulate(place, parameter):  # [step 7]
            state.missing -= 1
            if state.missing == 0:  # [step 8]
                self._walker.run_while(self._may_close)

    def _late_gradient(self, state: UnitState, name: str) -> UsageError:
        """Return the error about a gradient that arrived when its Unit took none."""
        if self._pass is not PassKind.BACKWARD:
            return UsageError(
                f"backward: the gradient of {name} arrived outside engine.backward(loss), which alone knows when to "
                "reduce; call it instead of loss.backward().\n"
                "  Where another engine's loss passes through this model (a generator's through its discriminator) "
                "torch would let the gradients land for zero_grad() to drop; here set model.requires_grad_(False) "
                "before that loss is computed and True again after its backward"
            )
        if state.is_reduced:
            return UsageError(
                f"backward: {name} got another gradient after those of its Unit {state.unit.title!r} were reduced. "
                "Reentrant activation checkpointing does that (set use_reentrant=False), and a graph that returns to a "
                "block after later ones (name one Unit around them in zero.units)"
            )
        return UsageError(
            f"backward: {name} got a gradient while another Unit, which recomputes, "
            "stood in the memory of its weights. Checkpoint one Unit at a time, or set zero.reuse_buffers: false"
        )

    def _may_close(self, action: Action) -> bool:
        """Return True if an Action closes a Unit whose gradients have all been accumulated, or is a Unit's silent pass.

        A pass that a hook announces is still to come. Without the check, a list with I could be left behind it, because
        the weights are gathered once in a step and the other Units are reduced behind W, so that no Action stands
        between the passes.
        """
        state = self.windows.of(action)
        if action.kind.computes:
            return not state.has_windows or not state.trained_parameters or state.has_passed
        return action.kind is not Kind.UNSHARD and state.is_complete

    # Hooks -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        before, after = apart(self._before_forward), apart(self._after_forward)
        for state in self.states:
            index = state.unit.index
            # The lists need a window for the root even if the root holds no parameter itself.
            self._installed.handles += [
                # Before all other hooks: a hook of the user's (weight_norm, say) reads the weights.
                state.module.register_forward_pre_hook(ModuleHook(before, index), prepend=True),
                state.module.register_forward_hook(ModuleHook(after, index)),
            ]
            for bucket in state.buckets:
                for place, parameter in enumerate(bucket.parameters if bucket.layout.key.trained else ()):
                    hook = _accumulation_hook(self, index, bucket, place)
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    self._installed.handles.append(handle)
                    self._installed.landing.append((parameter, handle.id))
        gathers_parts = self.states[0].has_windows and not self._is_driven
        parts = self._inside[0].modules[1:] if gathers_parts else []
        before_part, after_part = apart(self._before_part), apart(self._after_part)
        for module in parts:
            if next(module.parameters(recurse=False), None) is not None:
                self._installed.handles += [
                    module.register_forward_pre_hook(ModuleHook(before_part), prepend=True),
                    module.register_forward_hook(ModuleHook(after_part)),
                ]

    def _land_last(self) -> None:
        """Move the accumulation hooks behind the user's own hooks, including hooks that were registered later."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter's Python override is slow
            for parameter, key in self._installed.landing:
                hooks: Any = parameter._post_accumulate_grad_hooks
                if len(hooks) > 1 and next(reversed(hooks)) != key and key in hooks:
                    hooks[key] = hooks.pop(key)

    def gather_around(self, index: int, method: str) -> None:
        """Gather a Unit's weights around calls of another method than ``forward``.

        Args:
            index: Index of the Unit in the stage.
            method: Name of the method of the Unit's module.
        """
        state, module = self.states[index], self.states[index].module
        function = getattr(module, method)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if state.window is WindowState.FORWARD or (index == 0 and self._pass is PassKind.FORWARD):
                return function(*args, **kwargs)  # called inside the forward, which has gathered the weights
            if index == 0:
                return self.run_as_forward(function, args, kwargs)
            self._before_forward(index, module, args)
            output = function(*args, **kwargs)
            self._after_forward(index, module, args, output)
            return output

        setattr(module, method, call)
        self._installed.handles.append(_WrappedMethod(module, method))

    def remove(self) -> None:
        """Remove all hooks and wrapped methods from the model."""
        for handle in self._installed.handles:
            handle.remove()
        self._installed.handles.clear()


def _accumulation_hook(
    hooks: UnitHooks, index: int, bucket: BucketState, place: int
) -> Callable[[nn.Parameter], None]:
    """Return the hook that a parameter calls after its gradient has been accumulated.

    The hook holds the engine weakly. Python's collector cannot look into a hook that autograd holds in C++:
    with a strong reference, an engine that is dropped without ``close`` would keep its memory, threads and
    files until exit.
    """
    hooks_of, bucket_of = weakref.ref(hooks), weakref.ref(bucket)

    def hook(parameter: nn.Parameter) -> None:
        living_hooks, living_bucket = hooks_of(), bucket_of()
        if living_hooks is not None and living_bucket is not None:
            living_hooks._accumulate(index, living_bucket, place, parameter)

    return hook


def _asks_for_gradients(output: Any) -> bool:
    """Return True if a pass that returned ``output`` can have a backward pass.

    An output without tensors counts as one that can.
    """
    tensors = [*tensors_in(output)] if torch.is_grad_enabled() else []
    return torch.is_grad_enabled() and (not tensors or any(tensor.requires_grad for tensor in tensors))


def _own_modules(module: nn.Module, units: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in units:
            yield from _own_modules(child, units)
