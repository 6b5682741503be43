"""Optimizers on the flat masters: any elementwise one of torch, and those of two halves (two_pass.py).

An elementwise update treats each element alone, so it may run on any cut of the flat buffer: 32 calls instead of 288,
and torch's own fused kernels do the work. One optimizer object per bucket, so that masters can be updated Unit by Unit.

An update that looks at whole tensors runs in two halves, ``direct`` and ``apply``; in between it is told by what each
tensor's direction is multiplied.

[Note: segments]
torch skips a parameter without a gradient, and its step count (Adam's bias correction) stands still. The flat buffer
starts as one segment; where a parameter got no gradient on any rank, the segment is split around it, state and all, as
views of the same memory. Split pieces have step counts of their own from then on.

[Note: state at build]
torch makes a parameter's state in its first step, when memory is tightest and nobody has counted on it. Here the same
code of torch's makes it when the optimizer is built, so that the moments stand in the ledger before anything runs; the
numbers are those of a first step. A parameter that was never stepped has no state in a checkpoint all the same.

[Note: state that moves]
Leaves and moments are views of flat memory. Where that lies on another tier, ``point`` shows them where it is now: the
optimizer keeps its objects, and step counts stay.

[Note: coded moments] Moments in another form than the masters' (coded_moments.py) lie beside torch's optimizer, which
knows the single numbers alone; updates bring them by the chunk.

Scaling: gradients arrive as sums; ``divisor`` (weights summed, loss scale, clipping) is applied inside the fused kernel
where that is exact enough (its scalar is fp32), else in a pass of its own.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.kernels.choice import fused
from shardwise.optim.by_chunk import ChunkKernel, chunk_kernel, class_kernel, step_by_chunk
from shardwise.optim.coded_moments import CodedMoments, CodedPart
from shardwise.optim.lamb import Lamb
from shardwise.optim.lars import Lars
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon
from shardwise.optim.named_rules import NamedRules
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import Rounding
from shardwise.optim.two_pass import TwoPass, Whole
from shardwise.plan.errors import ConfigError, UsageError
from shardwise.plan.registry import Needs, UpdateRule
from shardwise.plan.state_form import StateForm

Make = Callable[[list[Tensor], int], optim.Optimizer]
"""(flat tensors, optimizer group) -> an optimizer on them."""

_CLASSES: Mapping[str, type[optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "lion": Lion,
    "lamb": Lamb,
    "lars": Lars,
    "muon": Muon,
}
"""By the type of a rule (``OptimizerPolicy.rules``)."""
_FUSED = ("adam", "adamw", "sgd")
"""Those that torch has as one kernel on every device."""


class Factor(NamedTuple):
    """By what the direction of a tensor's elements [start, stop) of the master is multiplied."""

    start: int
    stop: int
    factor: float


class Segment(NamedTuple):
    """A part of the flat master that shares a step count."""

    start: int
    stop: int
    leaf: Tensor
    is_stepped: bool = False
    """Whether its state is worth saving. [Note: state at build]"""


class Scalars(NamedTuple):
    """Single numbers of one segment's state."""

    start: int
    stop: int
    scalars: dict[str, float]
    has_state: bool


def from_policy(policy: OptimizerPolicy) -> Make:
    """The class of each of the policy's rules, fused where torch has it so.

    Errors: ConfigError for numbers that the class refuses.
    """
    return _from_rules(policy.rules())


def _from_rules(rules: Sequence[tuple[str, dict[str, Any]]]) -> Make:
    def make(tensors: list[Tensor], group: int) -> optim.Optimizer:
        kind, options = rules[group]
        fused = {"fused": True} if kind in _FUSED else {}
        return _CLASSES[kind](tensors, **fused, **options)  # type: ignore[arg-type]

    for group, (kind, _) in enumerate(rules):
        try:
            make([torch.zeros(1)], group)
        except ValueError as error:
            raise ConfigError(f"optimizer: {kind}: {error}") from None
    return make


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group's keys those that its rule's class takes."""
    if group["type"] not in _CLASSES:
        raise UsageError(f"optimizer: there is no rule {group['type']!r}; known: {', '.join(_CLASSES)}")
    known = inspect.signature(_CLASSES[group["type"]]).parameters
    return {key: value for key, value in group.items() if key in known and key not in ("params", "type")}


def from_torch(optimizer: optim.Optimizer, elementwise: bool = False) -> Make:
    """Rebuild a user's optimizer from its class and the options of its groups.

    Errors: UsageError where the class needs whole tensors in a way of its own (its numbers would silently change on
    flat pieces).
    """
    if isinstance(optimizer, NamedRules):
        return _from_rules([(group["type"], _numbers(group)) for group in optimizer.param_groups])
    cls = type(optimizer)
    known = {*_CLASSES.values(), optim.Muon}
    if not elementwise and cls not in known:
        names = ", ".join(sorted(each.__name__ for each in {*known} - {Muon}))
        raise UsageError(
            f"optimizer: {cls.__name__} is not known to treat each element alone; on flat shards an optimizer that "
            f"needs whole tensors (Adafactor, LBFGS, Shampoo) would give wrong numbers. Known: {names}. "
            "If yours is elementwise, say so: initialize(..., elementwise=True)"
        )
    # Adagrad has state from its making on, at step 0.
    if any(not isinstance(state, dict) or state.get("step", 1) for state in optimizer.state.values()):
        raise UsageError("optimizer: it has stepped already; hand it to initialize() before its first step")
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    ours: type[optim.Optimizer] = Muon if cls is optim.Muon else cls  # torch's own takes no flat pieces
    known_arguments = inspect.signature(ours).parameters

    def make(tensors: list[Tensor], group: int) -> optim.Optimizer:
        # As arguments too: some have no default, and Adagrad reads its first accumulator from the argument alone.
        arguments: dict[str, Any] = {k: v for k, v in options[group].items() if k in known_arguments}
        return ours([{"params": tensors, **options[group]}], **arguments)

    return make


def make_state(optimizer: optim.Optimizer) -> None:
    """The state that the first step would make. [Note: state at build]

    Left to that step: where a class of the user's has no ``_init_group``, and SGD's momentum with dampening, which
    begins with the whole first gradient.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, optim.SGD):
            for leaf in group["params"] if group["momentum"] and not group["dampening"] else ():
                # -0, and not 0, is what leaves every first gradient as it is, -0 among them.
                optimizer.state[leaf]["momentum_buffer"] = torch.full_like(leaf, -0.0)
            continue
        make = getattr(optimizer, "_init_group", None)
        if make is None:
            continue
        for leaf in group["params"]:
            leaf.grad = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand_as(leaf)
        make(group, *([] for _ in list(inspect.signature(make).parameters)[1:]))
        for leaf in group["params"]:
            leaf.grad = None


def update_rules(make: Make, groups: int = 1) -> tuple[UpdateRule, ...]:
    """What optimizers made by ``make`` keep from build on, and look at, by group."""
    found = []
    for group in range(groups):
        probe = torch.zeros(1)
        optimizer = make([probe], group)
        make_state(optimizer)
        found.append(UpdateRule(labels_of(optimizer.state.get(probe, {})), needs_of(optimizer)))
    return tuple(found)


def labels_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The moments among the state of a leaf."""
    return tuple(label for label, value in state.items() if isinstance(value, Tensor) and value.dim() == 1)


def needs_of(optimizer: optim.Optimizer) -> Needs:
    """What its update of an element looks at."""
    return optimizer.needs if isinstance(optimizer, TwoPass) else "elements"


def makes_state_late(optimizer: optim.Optimizer) -> bool:
    """Whether some of its state appears in the first step alone. [Note: state at build]"""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, optim.SGD):
        return bool(group["momentum"] and group["dampening"])
    return not hasattr(optimizer, "_init_group")


class FlatOptimizer:
    """The optimizer of one bucket's owned range."""

    def __init__(
        self,
        master: Tensor,
        make: Make,
        group: int,
        form: StateForm = "fp32",
        rounding: Rounding | None = None,
    ):
        """``form``: of the moments, whose random numbers are those of ``rounding``."""
        self._master = master.detach()
        self._segments = [Segment(0, master.numel(), self._master)]
        leaf = self._master if form == "fp32" else torch.zeros(1, dtype=master.dtype, device=master.device)
        self._optimizer = make([leaf], group)
        self._group = group
        self._remake = lambda leaf: make([leaf], group)
        # Adagrad has made its state already, and saves it.
        self._segments[0] = self._segments[0]._replace(is_stepped=bool(self._optimizer.state))
        make_state(self._optimizer)
        self.coded: CodedMoments | None = None
        """[Note: coded moments]"""
        if form != "fp32":
            assert rounding is not None, f"moments in {form} are rounded at random"
            state = self._optimizer.state.pop(leaf, {})
            if labels := labels_of(state):
                self.coded = CodedMoments(form, labels, master.numel(), master.device, rounding)
                state = self.coded.begin(state, 0, master.numel())
            self._optimizer.state[self._master] = state
            self._optimizer.param_groups[0]["params"] = [self._master]
        self._divides = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False)) and (
            master.dtype == torch.float32
        )
        self._direction: Tensor | None = None
        """Between the two halves of an update."""

    @property
    def needs(self) -> Needs:
        """What the update of an element looks at; all but "elements" is done in two halves."""
        return needs_of(self._optimizer)

    @property
    def makes_state_late(self) -> bool:
        """Whether some state appears in the first step alone. [Note: state at build]"""
        return makes_state_late(self._optimizer)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """The moments lie in ``tensors`` from now on, flat, by label, with the numbers that they have."""
        for label, start, stop, moment in self.moments():
            tensors[label][start:stop] = moment
            moment.data = tensors[label][start:stop]

    def point(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Master and moments, by label, are here now; empty ones are nowhere. [Note: state that moves]"""
        self._master = master
        for start, stop, leaf, _ in self._segments:
            leaf.data = master[start:stop]
            for label, value in self._optimizer.state.get(leaf, {}).items():
                if label in moments:
                    value.data = moments[label][start:stop]
        for label, flat in self.coded.tensors.items() if self.coded else ():
            if label in moments:
                flat.data = moments[label]

    def step(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]] = (),
        weight: Tensor | None = None,
        steps: int = 0,
    ) -> bool:
        """Update from ``grad / divisor`` (flat, as the master) with the numbers of this bucket's group in ``rates``
        (groups.py); ``unused`` ranges are skipped. ``grad`` is spent.

        ``weight``, as long as the master, takes its new numbers rounded where that needs no pass of its own; whether it
        did. ``steps`` were before: what coded moments are rounded by.
        """
        if self.coded is not None:
            self._cut(rates, unused)
            self._step_by_chunk(self._chunk_kernel(), grad, divisor, unused, weight, steps)
            return weight is not None
        if fused(self._master, grad):
            self._cut(rates, unused)
            rule = self._adam_rule()
            if rule is not None:
                self._step_adam(rule, grad, divisor, unused, weight)
                return weight is not None
        if self._master.device.type == grad.device.type == "cpu":
            self._cut(rates, unused)
            kernel = self._chunk_kernel()
            if kernel is not None:
                self._step_by_chunk(kernel, grad, divisor, unused, weight)
                return weight is not None
        if self._divides and divisor != 1.0:
            # Filled on the device: a number that is copied there is waited for.
            self._optimizer.grad_scale = torch.full((), divisor, device=grad.device)  # type: ignore[attr-defined]
            self._optimizer.found_inf = torch.zeros((), device=grad.device)  # type: ignore[attr-defined]
            divisor = 1.0
        self._take(grad, divisor, rates, unused)
        self._optimizer.step()
        self._drop()
        if self._divides:
            self._optimizer.grad_scale = self._optimizer.found_inf = None  # type: ignore[attr-defined]
        return False

    def _adam_rule(self) -> AdamRule | None:
        """What one kernel's step works with; None where the update is another, or its count lies on the host."""
        group = self.options
        if type(self._optimizer) not in (optim.Adam, optim.AdamW) or self._master.dtype != torch.float32:
            return None
        states = [self._optimizer.state.get(segment.leaf, {}) for segment in self._segments]
        if any("step" not in state or state["step"].device != self._master.device for state in states):
            return None
        if any(group[key] for key in ("amsgrad", "maximize", "differentiable")):
            return None
        lr, (beta1, beta2), eps, weight_decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        if not all(isinstance(number, int | float) for number in (lr, beta1, beta2, eps, weight_decay)):
            return None
        decoupled = isinstance(self._optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        return AdamRule(lr, beta1, beta2, eps, weight_decay, decoupled)

    def _step_adam(
        self,
        rule: AdamRule,
        grad: Tensor,
        divisor: float,
        unused: Sequence[tuple[int, int]],
        weight: Tensor | None,
    ) -> None:
        for place, (start, stop, leaf, _) in enumerate(self._segments):
            if any(first <= start and stop <= last for first, last in unused):
                continue
            state, cast = self._optimizer.state[leaf], None if weight is None else weight[start:stop]
            moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            adam_step(rule, leaf, grad[start:stop], *moments, divisor, cast)
            self._segments[place] = Segment(start, stop, leaf, True)

    def _chunk_kernel(self) -> ChunkKernel | None:
        """What updates a chunk at a time; None where that is torch's to do, or the state is still to be made."""
        kernel = chunk_kernel(self._optimizer) if self._master.device.type == "cpu" else None
        # A product of 16-bit numbers has other bits where torch computes without vectors, which is at a tensor's end.
        if kernel is None or self._master.dtype not in (torch.float32, torch.float64):
            return None
        if self.coded is not None:
            return kernel
        held = [self._optimizer.state.get(segment.leaf, {}) for segment in self._segments]
        return kernel if all(label in state for state in held for label in kernel.moments) else None

    def _step_by_chunk(
        self,
        kernel: ChunkKernel | None,
        grad: Tensor,
        divisor: float,
        unused: Sequence[tuple[int, int]],
        weight: Tensor | None,
        steps: int = 0,
    ) -> None:
        """``kernel``: None, of coded moments alone, is the class's own step."""
        for place, (start, stop, leaf, _) in enumerate(self._segments):
            cast = None if weight is None else weight[start:stop]
            if any(first <= start and stop <= last for first, last in unused):
                if cast is not None:  # what comes from a disk is the master alone
                    cast.copy_(leaf)
                continue
            state, coded, own = self._optimizer.state.get(leaf, {}), None, kernel
            if self.coded is not None:
                coded = CodedPart(self.coded, start, steps)
                own = kernel or class_kernel(self._of_one_leaf(), self.coded.labels, state)
            assert own is not None, "moments that torch keeps are updated by a kernel, or by torch"
            step_by_chunk(own, leaf, grad[start:stop], state, divisor, self._divides, cast, coded)
            self._segments[place] = Segment(start, stop, leaf, True)

    def _of_one_leaf(self) -> optim.Optimizer:
        """The same optimizer, of one element."""
        made = self._remake(torch.zeros(1, dtype=self._master.dtype, device=self._master.device))
        made.param_groups[0].update({k: value for k, value in self.options.items() if k != "params"})
        return made

    def _cut(self, rates: Sequence[Mapping[str, Any]], unused: Sequence[tuple[int, int]]) -> None:
        """Segments around ``unused`` ranges, and the numbers of this step."""
        for start, stop in unused:
            self._split_around(start, stop)
        self._optimizer.param_groups[0].update(rates[self._group])

    def direct(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]] = (),
    ) -> None:
        """The first half of an update; as ``step`` else. ``grad`` becomes the direction, where the dtypes are one."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        self._direction = self._take(grad, divisor, rates, unused)
        self._optimizer.direct()

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """(master, direction), flat, between the halves."""
        assert self._direction is not None, "direct() comes before what looks at its directions"
        return self._master, self._direction

    @property
    def options(self) -> Mapping[str, Any]:
        """The numbers that it works with in this step."""
        return self._optimizer.param_groups[0]

    def factor(self, whole: Whole) -> float:
        """By what a tensor's direction is multiplied."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        return self._optimizer.factor(self.options, whole)

    def apply(self, factors: Iterable[Factor]) -> None:
        """The second half."""
        assert isinstance(self._optimizer, TwoPass), "an elementwise update has no halves"
        master, direction = self.halves
        for start, stop, factor in factors:
            self._optimizer.scale(self.options, master[start:stop], direction[start:stop], factor)
        self._optimizer.apply()
        self._drop()
        self._direction = None

    def _take(
        self,
        grad: Tensor,
        divisor: float,
        rates: Sequence[Mapping[str, Any]],
        unused: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Point the leaves into the gradient, which is returned, in the master's dtype."""
        self._cut(rates, unused)
        if grad.dtype != self._master.dtype:
            grad = grad.to(self._master.dtype)
        if divisor != 1.0:
            grad.mul_(1.0 / divisor)
        for place, (start, stop, leaf, is_stepped) in enumerate(self._segments):
            is_unused = any(first <= start and stop <= last for first, last in unused)
            leaf.grad = None if is_unused else grad[start:stop]
            self._segments[place] = Segment(start, stop, leaf, is_stepped or not is_unused)
        return grad

    def _drop(self) -> None:
        for segment in self._segments:
            segment.leaf.grad = None

    def count_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(tensor.nbytes for _, _, _, tensor in self.moments())

    def moments(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """(label, start, stop, tensor) of every moment as it is kept, by segment; coded ones whole."""
        for label, flat in self.coded.tensors.items() if self.coded else ():
            yield label, 0, flat.numel(), flat
        for start, stop, leaf, _ in self._segments:
            for label, value in self._optimizer.state.get(leaf, {}).items():
                if isinstance(value, Tensor) and value.dim() == 1:
                    yield label, start, stop, value

    @property
    def labels(self) -> list[str]:
        """Names of the moments."""
        return sorted({label for label, *_ in self.moments()})

    def read(self, label: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of a moment in the master's dtype; 0 where it has none yet."""
        stop = self._master.numel() if stop is None else stop
        if self.coded is not None:
            return self.coded.read(label, start, stop)
        found = torch.zeros_like(self._master[start:stop])
        for first, last, held in self._held(label, start, stop):
            found[first - start : last - start] = held
        return found

    def write(self, label: str, start: int, values: Tensor) -> None:
        """``values`` [N] become elements of a moment, from ``start`` on; coded ones are rounded to the nearest."""
        if self.coded is not None:
            self.coded.write(label, start, values)
            return
        for first, last, held in self._held(label, start, start + values.numel()):
            held.copy_(values[first - start : last - start])

    def _held(self, wanted: str, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """(first, last, their view) of what elements [start, stop) have of a moment that torch keeps."""
        for label, begin, end, moment in self.moments():
            first, last = max(start, begin), min(stop, end)
            if label == wanted and first < last:
                yield first, last, moment[first - begin : last - begin]

    def scalars(self) -> list["Scalars"]:
        """Step counts and other single numbers by segment."""
        rows = []
        for start, stop, leaf, is_stepped in self._segments:
            state = self._optimizer.state.get(leaf, {})
            numbers = {
                label: float(value)
                for label, value in state.items()
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
            }
            rows.append(Scalars(start, stop, numbers, is_stepped and bool(state)))
        return rows

    def restore(
        self, moments: Mapping[str, Tensor], ends: Sequence[tuple[int, dict[str, float] | None]]
    ) -> None:
        """Take over state from a checkpoint: flat ``moments`` by label, but for coded ones, which were written; and for
        each parameter in turn where its part ends and its scalars (None: it never got a gradient). Neighbours with
        equal scalars become one segment."""
        elements, whole = self._master.numel(), self._master
        merged: list[tuple[int, dict[str, float] | None]] = []
        for stop, scalars in ends or [(elements, None)]:
            if merged and merged[-1][1] == scalars:
                merged.pop()
            merged.append((stop, scalars))
        merged[-1] = (elements, merged[-1][1])
        self._optimizer.state.clear()
        kinds = self._scalar_kinds(whole)
        self._segments, start = [], 0
        for stop, scalars in merged:
            leaf = whole[start:stop].detach()
            self._segments.append(Segment(start, stop, leaf, scalars is not None))
            held = {label: flat[start:stop] for label, flat in moments.items()}
            if scalars is not None:
                state = {label: _like(kinds.get(label), value) for label, value in scalars.items()}
                self._optimizer.state[leaf] = state | held
            elif self.coded is not None:
                fresh = self._fresh_state(torch.zeros_like(whole[:1]))
                self._optimizer.state[leaf] = self.coded.begin(fresh, start, stop)
            else:
                state = self._fresh_state(leaf)
                for label in held.keys() & state.keys():
                    state[label] = held[label].copy_(state[label])
                self._optimizer.state[leaf] = state
            start = stop
        self._optimizer.param_groups[0]["params"] = [segment.leaf for segment in self._segments]

    def _scalar_kinds(self, whole: Tensor) -> dict[str, Any]:
        """Its single numbers as the optimizer itself makes them, from a step on one element. A fused or capturable one
        keeps its step count beside the weights: a count in host memory would be read through a device's pointer."""
        probe = torch.zeros(1, dtype=whole.dtype, device=whole.device)
        probe.grad = torch.zeros_like(probe)
        optimizer = self._remake(probe)
        if isinstance(optimizer, TwoPass):
            optimizer.direct()
        else:
            optimizer.step()
        return dict(optimizer.state.get(probe, {}))

    def _fresh_state(self, leaf: Tensor) -> dict[str, Any]:
        """That of a part which was never stepped."""
        optimizer = self._remake(leaf)
        make_state(optimizer)
        return dict(optimizer.state.get(leaf, {}))

    def _split_around(self, start: int, stop: int) -> None:
        """Make [start, stop) a segment of its own. [Note: segments]"""
        for place, (first, last, leaf, is_stepped) in enumerate(self._segments):
            if first <= start and stop <= last:
                if (first, last) == (start, stop):
                    return
                cuts = [(a, b) for a, b in ((first, start), (start, stop), (stop, last)) if a < b]
                pieces = [Segment(a, b, leaf[a - first : b - first].detach(), is_stepped) for a, b in cuts]
                state = self._optimizer.state.pop(leaf, None)
                if state:
                    for a, b, piece, _ in pieces:
                        self._optimizer.state[piece] = _cut_state(state, a - first, b - first)
                self._segments[place : place + 1] = pieces
                self._optimizer.param_groups[0]["params"] = [segment.leaf for segment in self._segments]
                return
        for first, last, *_ in self._segments:  # the range spans segments that were split before
            if start < last and first < stop:
                self._split_around(max(start, first), min(stop, last))


def _like(kind: Any, value: float) -> Any:
    """``value`` as a number or a tensor of the kind of ``kind``."""
    if isinstance(kind, Tensor):
        return torch.tensor(value, dtype=kind.dtype, device=kind.device).reshape(kind.shape)
    return torch.tensor(value) if kind is None else type(kind)(value)


def _cut_state(state: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    def cut(label: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[start:stop] if value.dim() == 1 else value.clone()

    return {label: cut(label, value) for label, value in state.items()}
