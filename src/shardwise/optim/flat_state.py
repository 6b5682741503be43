"""State of one bucket's owned range: leaves and their optimizer state, cut into segments of the flat master.

    master     flat tensor of N elements, which updates write
    segment    elements [start, stop) of it that share a step count; the leaf of torch's optimizer is a view of them
    moment     state of every element (exp_avg, momentum_buffer ...): flat, as long as its segment
    scalar     state of a segment as a single number: mostly the step count

[Note: segments]
torch skips a parameter without a gradient, and its step count (Adam's bias correction) stands still. The flat buffer
starts as one segment. If a parameter got no gradient on any rank, the segment is split around it, with its state, as
views of the same memory. Split pieces have separate step counts from then on.

[Note: state that moves]
Leaves and moments are views of flat memory. When that memory moves to another tier, ``point`` sets the views to its new
place: the optimizer keeps its objects, and step counts stay.

[Note: coded moments] Moments in another form than the masters' (coded_moments.py) lie beside torch's optimizer, which
only has the single numbers; updates decode them by the chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.average import EMA
from shardwise.optim.classes import Make, labels_of, make_state
from shardwise.optim.coded_moments import CodedMoments
from shardwise.optim.rounding import StochasticRounding
from shardwise.optim.two_pass import TwoPass
from shardwise.plan.state_form import StateForm

_MADE_AT_ONCE = 1 << 20
"""Number of elements whose first moments are made at once and copied to their memory."""


class MasterSegment(NamedTuple):
    """Part of the flat master that shares a step count."""

    start: int
    stop: int
    leaf: Tensor
    """View of the master that is the leaf of torch's optimizer."""
    is_stepped: bool = False
    """True if the state is worth saving. [Note: state at build] in classes.py."""


class SegmentScalars(NamedTuple):
    """Single numbers of one segment's state."""

    start: int
    stop: int
    scalars: dict[str, float]
    """Numbers by label."""
    has_state: bool
    """True if a checkpoint has state of this segment."""


class FlatState:
    """State of one bucket's owned range: master, optimizer, moments and average.

    Args:
        master: flat master of the range.
        make: makes the optimizer.
        group: optimizer group of the bucket.
        form: dtype or code of the moments.
        rounding: random numbers for moments in another form than fp32.
        into: flat memory for the moments, by label; None allocates memory.
        averages: True keeps an average of the master (average.py).
    """

    def __init__(
        self,
        master: Tensor,
        make: Make,
        group: int,
        form: StateForm = "fp32",
        rounding: StochasticRounding | None = None,
        into: Mapping[str, Tensor] | None = None,
        averages: bool = False,
    ):
        self.average: Tensor | None = None
        """Average of the master, flat, which torch's optimizer does not have."""
        self.master = master.detach()
        self.remake = lambda leaf: make([leaf], group)
        """Function that makes the same optimizer, in its first state, on another leaf."""
        if averages:
            own = None if into is None else into.get(EMA)
            self.average = torch.empty_like(self.master) if own is None else own
            self.restart_average()
        is_made_by_torch = form == "fp32" and into is None
        leaf = self.master if is_made_by_torch else master[:1].detach()
        self.optimizer = self.remake(leaf)
        """Optimizer of torch, whose leaves are those of the segments."""
        # Adagrad makes its state in the constructor, so its segment counts as stepped and is saved.
        self.segments = [MasterSegment(0, master.numel(), self.master, bool(self.optimizer.state))]
        make_state(self.optimizer)
        self.coded: CodedMoments | None = None
        """Moments in another form than fp32. [Note: coded moments]"""
        if is_made_by_torch:
            return
        labels = labels_of(self.optimizer.state.pop(leaf, {}))
        if form != "fp32" and labels:
            assert rounding is not None, f"moments in {form} are rounded at random"
            self.coded = CodedMoments(form, labels, master.numel(), master.device, rounding, into)
        self.optimizer.state[self.master] = self._begin(0, master.numel(), into or {})
        self.optimizer.param_groups[0]["params"] = [self.master]

    def restart_average(self, start: int = 0, stop: int | None = None) -> None:
        """Set the average of elements [start, stop) to the master."""
        if self.average is not None:
            self.average[start:stop].copy_(self.master[start:stop])

    def update_average(self, decay: float, is_first: bool) -> None:
        """Update the average after an update of the master."""
        if self.average is None:
            return
        if is_first:
            self.restart_average()
        else:
            self.average.lerp_(self.master, 1.0 - decay)

    def swap_average(self) -> None:
        """Exchange the master's numbers with the average's, to the bit, a chunk at a time."""
        if self.average is None:
            return
        for ours, theirs in zip(
            self.master.split(_MADE_AT_ONCE), self.average.split(_MADE_AT_ONCE), strict=True
        ):
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    def of(self, leaf: Tensor) -> dict[str, Any]:
        """Return torch's state of a segment; empty before there is any."""
        return self.optimizer.state.get(leaf, {})

    def reached(self, unused: Sequence[tuple[int, int]]) -> Iterator[tuple[MasterSegment, bool]]:
        """Yield each segment, and whether an update that skips the ranges of ``unused`` reaches it.

        Segments that are reached are marked as stepped.
        """
        for place, segment in enumerate(self.segments):
            is_reached = not any(first <= segment.start and segment.stop <= last for first, last in unused)
            self.segments[place] = segment._replace(is_stepped=segment.is_stepped or is_reached)
            yield segment, is_reached

    def point(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Point the state to a master and moments, by label, that have moved; empty tensors stand for absent ones.

        [Note: state that moves] in the module's docstring.
        """
        self.master = master
        for start, stop, leaf, _ in self.segments:
            leaf.data = master[start:stop]
            for label, value in self.of(leaf).items():
                if label in moments:
                    value.data = moments[label][start:stop]
        for label, flat in self.coded.tensors.items() if self.coded else ():
            if label in moments:
                flat.data = moments[label]
        if self.average is not None and EMA in moments:
            self.average = moments[EMA]

    def count_bytes(self) -> int:
        """Return the bytes of the moments."""
        return sum(tensor.nbytes for _, _, _, tensor in self.moments())

    def moments(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """Yield (label, start, stop, tensor) of every moment in its stored form, by segment; coded ones whole."""
        for label, flat in self.coded.tensors.items() if self.coded else ():
            yield label, 0, flat.numel(), flat
        for start, stop, leaf, _ in self.segments:
            for label, value in self.of(leaf).items():
                if isinstance(value, Tensor) and value.dim() == 1:
                    yield label, start, stop, value
        if self.average is not None:
            yield EMA, 0, self.average.numel(), self.average

    @property
    def labels(self) -> list[str]:
        """Labels of the moments, sorted."""
        return sorted({label for label, *_ in self.moments()})

    def read(self, label: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of a moment in the master's dtype; 0 where there is no moment yet."""
        stop = self.master.numel() if stop is None else stop
        if self.coded is not None and label != EMA:
            return self.coded.read(label, start, stop)
        found = torch.zeros_like(self.master[start:stop])
        for first, last, held in self._held(label, start, stop):
            found[first - start : last - start] = held
        return found

    def write(self, label: str, start: int, values: Tensor) -> None:
        """Store ``values`` [N] as elements of a moment from ``start`` on; coded ones are rounded to the nearest."""
        if self.coded is not None and label != EMA:
            self.coded.write(label, start, values)
            return
        for first, last, held in self._held(label, start, start + values.numel()):
            held.copy_(values[first - start : last - start])

    def clear(self, label: str) -> None:
        """Set a moment in another form than the masters', with the scales of its blocks, to zero, and leave others.

        An average of weights beside coded moments is in the form of the masters.
        """
        if self.coded is not None and label in self.coded.tensors:
            self.coded.tensors[label].zero_()

    def _held(self, wanted: str, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first, last, view) of the parts of elements [start, stop) that torch's optimizer has of a moment."""
        for label, begin, end, moment in self.moments():
            first, last = max(start, begin), min(stop, end)
            if label == wanted and first < last:
                yield first, last, moment[first - begin : last - begin]

    def scalars(self) -> list[SegmentScalars]:
        """Return step counts and other single numbers by segment."""
        rows = []
        for start, stop, leaf, is_stepped in self.segments:
            state = self.of(leaf)
            numbers = {
                label: float(value)
                for label, value in state.items()
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
            }
            has_state = is_stepped and (bool(state) or self.average is not None)
            rows.append(SegmentScalars(start, stop, numbers, has_state))
        return rows

    def restore(
        self, moments: Mapping[str, Tensor], ends: Sequence[tuple[int, dict[str, float] | None]]
    ) -> None:
        """Load state from a checkpoint. Neighbours with equal scalars become one segment.

        Args:
            moments: flat moments by label, whose memory is used from now on; coded moments have been written before.
            ends: end of each parameter's part in order, with its scalars. None stands for a parameter that never got a
                gradient, whose moments are made anew.
        """
        elements, whole = self.master.numel(), self.master
        if self.average is not None and EMA in moments:
            self.average = moments[EMA]
        moments = {label: flat for label, flat in moments.items() if label != EMA}
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
            self.segments.append(MasterSegment(start, stop, leaf, scalars is not None))
            if scalars is None:
                self.restart_average(start, stop)
                self.optimizer.state[leaf] = self._begin(start, stop, moments)
            else:
                state = {label: _like(kinds.get(label), value) for label, value in scalars.items()}
                self.optimizer.state[leaf] = state | {
                    label: flat[start:stop] for label, flat in moments.items()
                }
            start = stop
        self.optimizer.param_groups[0]["params"] = [segment.leaf for segment in self.segments]

    def _scalar_kinds(self, whole: Tensor) -> dict[str, Any]:
        """Return the single numbers as the optimizer itself makes them, from a step on one element.

        A fused or capturable optimizer keeps its step count beside the weights: its kernel would read a count in host
        memory through a device's pointer.
        """
        probe = torch.zeros(1, dtype=whole.dtype, device=whole.device)
        probe.grad = torch.zeros_like(probe)
        optimizer = self.remake(probe)
        if isinstance(optimizer, TwoPass):
            optimizer.direct()
        else:
            optimizer.step()
        return dict(optimizer.state.get(probe, {}))

    def _begin(self, start: int, stop: int, into: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return torch's state of elements [start, stop) before their first step.

        torch's code makes the state a chunk at a time, so that moments that lie in ``into``, or are coded, never exist
        twice.
        """
        state: dict[str, Any] = {}
        for first in range(start, stop, _MADE_AT_ONCE) or (start,):
            leaf = self.master[first : min(first + _MADE_AT_ONCE, stop)].detach()
            optimizer = self.remake(leaf)
            make_state(optimizer)
            fresh = dict(optimizer.state.get(leaf, {}))
            for label in labels_of(fresh):
                values = fresh.pop(label)
                if self.coded is not None:
                    self.coded.write(label, first, values)
                    continue
                if label not in state:
                    own = into[label][start:stop] if label in into else values.new_empty(stop - start)
                    state[label] = own
                state[label][first - start :][: leaf.numel()] = values
            state |= fresh
        return state

    def split_around(self, start: int, stop: int) -> None:
        """Make [start, stop) a separate segment. [Note: segments]."""
        for place, (first, last, leaf, is_stepped) in enumerate(self.segments):
            if first <= start and stop <= last:
                if (first, last) == (start, stop):
                    return
                cuts = [(a, b) for a, b in ((first, start), (start, stop), (stop, last)) if a < b]
                pieces = [
                    MasterSegment(a, b, leaf[a - first : b - first].detach(), is_stepped) for a, b in cuts
                ]
                state = self.optimizer.state.pop(leaf, None)
                if state:
                    for a, b, piece, _ in pieces:
                        self.optimizer.state[piece] = _cut_state(state, a - first, b - first)
                self.segments[place : place + 1] = pieces
                self.optimizer.param_groups[0]["params"] = [segment.leaf for segment in self.segments]
                return
        for (
            first,
            last,
            *_,
        ) in self.segments:  # no segment contains the range: it spans some that were split before
            if start < last and first < stop:
                self.split_around(max(start, first), min(stop, last))


def _like(kind: Any, value: float) -> Any:
    """Return ``value`` as a number or a tensor, with the type of ``kind``."""
    if isinstance(kind, Tensor):
        return torch.tensor(value, dtype=kind.dtype, device=kind.device).reshape(kind.shape)
    return torch.tensor(value) if kind is None else type(kind)(value)


def _cut_state(state: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    def cut(label: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[start:stop] if value.dim() == 1 else value.clone()

    return {label: cut(label, value) for label, value in state.items()}
