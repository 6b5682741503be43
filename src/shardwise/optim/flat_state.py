"""What an optimizer keeps of one bucket's owned range: leaves and their state, cut into segments of the flat master.

    master     flat tensor of N elements, which updates write
    segment    elements [start, stop) of it that share a step count; the leaf of torch's optimizer is a view of them
    moment     what is kept for every element (exp_avg, momentum_buffer ...): flat, as long as its segment
    scalar     what is kept once for a segment: the step count, mostly

[Note: segments]
torch skips a parameter without a gradient, and its step count (Adam's bias correction) stands still. The flat buffer
starts as one segment; where a parameter got no gradient on any rank, the segment is split around it, state and all, as
views of the same memory. Split pieces have step counts of their own from then on.

[Note: state that moves]
Leaves and moments are views of flat memory. Where that lies on another tier, ``point`` shows them where it is now: the
optimizer keeps its objects, and step counts stay.

[Note: coded moments] Moments in another form than the masters' (coded_moments.py) lie beside torch's optimizer, which
knows the single numbers alone; updates bring them by the chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.classes import Make, labels_of, make_state
from shardwise.optim.coded_moments import CodedMoments
from shardwise.optim.rounding import Rounding
from shardwise.optim.two_pass import TwoPass
from shardwise.plan.state_form import StateForm


class Segment(NamedTuple):
    """A part of the flat master that shares a step count."""

    start: int
    stop: int
    leaf: Tensor
    is_stepped: bool = False
    """Whether its state is worth saving. [Note: state at build] in classes.py"""


class Scalars(NamedTuple):
    """Single numbers of one segment's state."""

    start: int
    stop: int
    scalars: dict[str, float]
    has_state: bool


class FlatState:
    """See the module's docstring."""

    def __init__(
        self,
        master: Tensor,
        make: Make,
        group: int,
        form: StateForm = "fp32",
        rounding: Rounding | None = None,
    ):
        """``form``: of the moments, whose random numbers are those of ``rounding``."""
        self.master = master.detach()
        leaf = self.master if form == "fp32" else torch.zeros(1, dtype=master.dtype, device=master.device)
        self.optimizer = make([leaf], group)
        """torch's, whose leaves are those of the segments."""
        self.remake = lambda leaf: make([leaf], group)
        """The same optimizer as it was made, on another leaf."""
        # Adagrad has made its state already, and saves it.
        self.segments = [Segment(0, master.numel(), self.master, bool(self.optimizer.state))]
        make_state(self.optimizer)
        self.coded: CodedMoments | None = None
        """[Note: coded moments]"""
        if form != "fp32":
            assert rounding is not None, f"moments in {form} are rounded at random"
            state = self.optimizer.state.pop(leaf, {})
            if labels := labels_of(state):
                self.coded = CodedMoments(form, labels, master.numel(), master.device, rounding)
                state = self.coded.begin(state, 0, master.numel())
            self.optimizer.state[self.master] = state
            self.optimizer.param_groups[0]["params"] = [self.master]

    def of(self, leaf: Tensor) -> dict[str, Any]:
        """What torch's optimizer keeps of a segment; empty before there is anything."""
        return self.optimizer.state.get(leaf, {})

    def reached(self, unused: Sequence[tuple[int, int]]) -> Iterator[tuple[Segment, bool]]:
        """Each segment, and whether an update reaches it that skips the ranges of ``unused``, around which they were
        cut; those that it reaches have stepped."""
        for place, segment in enumerate(self.segments):
            is_reached = not any(first <= segment.start and segment.stop <= last for first, last in unused)
            self.segments[place] = segment._replace(is_stepped=segment.is_stepped or is_reached)
            yield segment, is_reached

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """The moments lie in ``tensors`` from now on, flat, by label, with the numbers that they have."""
        for label, start, stop, moment in self.moments():
            tensors[label][start:stop] = moment
            moment.data = tensors[label][start:stop]

    def point(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Master and moments, by label, are here now; empty ones are nowhere. [Note: state that moves]"""
        self.master = master
        for start, stop, leaf, _ in self.segments:
            leaf.data = master[start:stop]
            for label, value in self.of(leaf).items():
                if label in moments:
                    value.data = moments[label][start:stop]
        for label, flat in self.coded.tensors.items() if self.coded else ():
            if label in moments:
                flat.data = moments[label]

    def count_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(tensor.nbytes for _, _, _, tensor in self.moments())

    def moments(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """(label, start, stop, tensor) of every moment as it is kept, by segment; coded ones whole."""
        for label, flat in self.coded.tensors.items() if self.coded else ():
            yield label, 0, flat.numel(), flat
        for start, stop, leaf, _ in self.segments:
            for label, value in self.of(leaf).items():
                if isinstance(value, Tensor) and value.dim() == 1:
                    yield label, start, stop, value

    @property
    def labels(self) -> list[str]:
        """Names of the moments."""
        return sorted({label for label, *_ in self.moments()})

    def read(self, label: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of a moment in the master's dtype; 0 where it has none yet."""
        stop = self.master.numel() if stop is None else stop
        if self.coded is not None:
            return self.coded.read(label, start, stop)
        found = torch.zeros_like(self.master[start:stop])
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

    def scalars(self) -> list[Scalars]:
        """Step counts and other single numbers by segment."""
        rows = []
        for start, stop, leaf, is_stepped in self.segments:
            state = self.of(leaf)
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
        elements, whole = self.master.numel(), self.master
        merged: list[tuple[int, dict[str, float] | None]] = []
        for stop, scalars in ends or [(elements, None)]:
            if merged and merged[-1][1] == scalars:
                merged.pop()
            merged.append((stop, scalars))
        merged[-1] = (elements, merged[-1][1])
        self.optimizer.state.clear()
        kinds = self._scalar_kinds(whole)
        self.segments, start = [], 0
        for stop, scalars in merged:
            leaf = whole[start:stop].detach()
            self.segments.append(Segment(start, stop, leaf, scalars is not None))
            held = {label: flat[start:stop] for label, flat in moments.items()}
            if scalars is not None:
                state = {label: _like(kinds.get(label), value) for label, value in scalars.items()}
                self.optimizer.state[leaf] = state | held
            elif self.coded is not None:
                fresh = self._fresh_state(torch.zeros_like(whole[:1]))
                self.optimizer.state[leaf] = self.coded.begin(fresh, start, stop)
            else:
                state = self._fresh_state(leaf)
                for label in held.keys() & state.keys():
                    state[label] = held[label].copy_(state[label])
                self.optimizer.state[leaf] = state
            start = stop
        self.optimizer.param_groups[0]["params"] = [segment.leaf for segment in self.segments]

    def _scalar_kinds(self, whole: Tensor) -> dict[str, Any]:
        """Its single numbers as the optimizer itself makes them, from a step on one element. A fused or capturable one
        keeps its step count beside the weights: a count in host memory would be read through a device's pointer."""
        probe = torch.zeros(1, dtype=whole.dtype, device=whole.device)
        probe.grad = torch.zeros_like(probe)
        optimizer = self.remake(probe)
        if isinstance(optimizer, TwoPass):
            optimizer.direct()
        else:
            optimizer.step()
        return dict(optimizer.state.get(probe, {}))

    def _fresh_state(self, leaf: Tensor) -> dict[str, Any]:
        """That of a part which was never stepped."""
        optimizer = self.remake(leaf)
        make_state(optimizer)
        return dict(optimizer.state.get(leaf, {}))

    def split_around(self, start: int, stop: int) -> None:
        """Make [start, stop) a segment of its own. [Note: segments]"""
        for place, (first, last, leaf, is_stepped) in enumerate(self.segments):
            if first <= start and stop <= last:
                if (first, last) == (start, stop):
                    return
                cuts = [(a, b) for a, b in ((first, start), (start, stop), (stop, last)) if a < b]
                pieces = [Segment(a, b, leaf[a - first : b - first].detach(), is_stepped) for a, b in cuts]
                state = self.optimizer.state.pop(leaf, None)
                if state:
                    for a, b, piece, _ in pieces:
                        self.optimizer.state[piece] = _cut_state(state, a - first, b - first)
                self.segments[place : place + 1] = pieces
                self.optimizer.param_groups[0]["params"] = [segment.leaf for segment in self.segments]
                return
        for first, last, *_ in self.segments:  # the range spans segments that were split before
            if start < last and first < stop:
                self.split_around(max(start, first), min(stop, last))


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
