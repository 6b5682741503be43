"""The engine's flat buffers as pieces of whole tensors, for saves, loads and exports.

    weight   elements of the shard of this rank: [start, stop) of the whole tensor, flat, in the compute dtype
    buffer   the whole tensor, on the first rank that holds it
    master, moments   the elements that this rank updates

Of ranks with the same elements only the first writes them, so that the pieces of all ranks cover each tensor once.

Cost: none; the pieces are views, except for state on a disk, which is read when its elements are asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from shardwise.checkpoint import FlatSlice, TensorPieces
from shardwise.checkpoint.piece import ElementSource, Flat, LazySlice
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.state import own_buffers
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.unit import ParameterSlot


class CheckpointState:
    """Access to masters and moments for a checkpoint.

    Of state on a disk, one kind of one bucket is in memory at a time. Moments in another form than the masters' are
    decoded when they are read and encoded when they are written. The first write of a load clears all of such a moment,
    because elements of a block share a scale: what was there before would round what is loaded beside it.
    """

    def __init__(self, parts: EngineParts, changes: bool):
        self._optimizers = {id(bucket): optimizer for bucket, optimizer in parts.trained}
        self._changes = changes
        self._open_now: tuple[BucketState, str | None] | None = None
        """The bucket and the kind of its state that are in memory; kind None stands for all kinds."""
        self._cleared: set[tuple[BucketState, str]] = set()
        """Moments in another form that this load has begun to write."""
        self._stack = ExitStack()

    def of(self, bucket: BucketState, kind: str) -> Flat:
        """Return the master, or one of the moments, flat."""
        state, optimizer = bucket.state, self._optimizers.get(id(bucket))
        if optimizer is not None and optimizer.state.coded is not None and kind in optimizer.state.labels:

            def read_coded(start: int, stop: int) -> Tensor:
                self._open(bucket)
                return optimizer.state.read(kind, start, stop)

            def write_coded(start: int, values: Tensor) -> None:
                self._open(bucket)
                if (bucket, kind) not in self._cleared:
                    self._cleared.add((bucket, kind))
                    optimizer.state.clear(kind)
                optimizer.state.write(kind, start, values)

            return LazySlice(
                ElementSource(read_coded, write_coded), bucket.owned_elements, bucket.dtypes.master
            )
        assert state is not None, "on the device they are at hand"
        if state.tier != "disk":
            return state.tensors[kind]

        def read(start: int, stop: int) -> Tensor:
            self._open(bucket, kind)
            return state.tensors[kind][start:stop]

        def write(start: int, values: Tensor) -> None:
            read(start, start + values.numel()).copy_(values)

        return LazySlice(ElementSource(read, write), *state.kinds[kind])

    def _open(self, bucket: BucketState, kind: str | None = None) -> None:
        if self._open_now != (bucket, kind):
            self.close()
            self._stack.enter_context(bucket.opened(self._changes, None if kind is None else (kind,)))
            self._open_now = bucket, kind

    def close(self) -> None:
        """Release the state that is in memory; changed state is written back to the disk in the background."""
        self._open_now = None
        self._stack.close()


Pieces = dict[tuple[str, str], list[FlatSlice]]
"""Pieces of tensors by (kind, name)."""


def items_to_save(
    parts: EngineParts,
    labels: Mapping[str, Sequence[str]],
    stateless: frozenset[str],
    opened: CheckpointState,
) -> list[TensorPieces]:
    """Return every tensor of the whole model's state, with the pieces that this rank writes."""
    held: Pieces = {}
    optimizers = {id(bucket): optimizer for bucket, optimizer in parts.trained}
    for bucket, slots in _buckets_to_write(parts):
        if bucket.weight.master is None:
            continue
        window, first = bucket.written_range, bucket.owned_range[0] * bucket.owned_elements
        with_state = [slot for slot in slots if slot.name not in stateless]
        if bucket.state is not None:
            for kind in bucket.state.kinds:
                if kind == "weight":
                    continue
                if kind != "master" or bucket.dtypes.master != bucket.dtypes.compute:
                    wanted = slots if kind == "master" else with_state
                    add_pieces(parts, held, kind, wanted, first, opened.of(bucket, kind), window)
            continue
        if bucket.dtypes.master != bucket.dtypes.compute:
            add_pieces(parts, held, "master", slots, first, bucket.weight.master, window)
        optimizer = optimizers[id(bucket)]
        if optimizer.state.coded is not None:
            for label in optimizer.state.labels:
                add_pieces(parts, held, label, with_state, first, opened.of(bucket, label), window)
            continue
        for label, start, _, tensor in optimizer.state.moments():
            add_pieces(parts, held, label, with_state, first + start, tensor, window)
    items = []
    for info in parts.registry.of_kind("master"):
        if info.dtype != parts.registry.get("parameter", info.name).dtype:
            items.append(
                TensorPieces("master", info.name, info.shape, info.dtype, held.get(("master", info.name), []))
            )
        for label in labels[info.name] if info.name not in stateless else ():
            items.append(
                TensorPieces(label, info.name, info.shape, info.dtype, held.get((label, info.name), []))
            )
    return model_items(parts, opened) + items


def model_items(parts: EngineParts, opened: CheckpointState) -> list[TensorPieces]:
    """Return the weights and buffers of the whole model, with the pieces that this rank writes."""
    held: Pieces = {}
    for bucket, slots in _buckets_to_write(parts):
        weight = opened.of(bucket, "weight") if bucket.holds("weight") else bucket.weight.shard
        add_pieces(parts, held, "weight", slots, bucket.weight.first, weight, bucket.written_range)
    items = [
        TensorPieces("weight", info.name, info.shape, info.dtype, held.get(("weight", info.name), []))
        for info in parts.registry.of_kind("parameter")
    ]
    return items + buffer_items(parts, to_write=True)


def _buckets_to_write(parts: EngineParts) -> Iterator[tuple[BucketState, list[ParameterSlot]]]:
    """Yield each bucket of this rank, with its parameters that the bucket's stage writes."""
    for stage in parts.stages:
        for bucket in (bucket for state in stage.hooks.states for bucket in state.buckets):
            yield (
                bucket,
                [
                    slot
                    for slot in bucket.layout.slots
                    if parts.registry.get("parameter", slot.name).stages[0] == stage.index
                ],
            )


def buffer_items(parts: EngineParts, to_write: bool) -> list[TensorPieces]:
    """Return every saved buffer of the model, with this rank's pieces.

    A buffer is whole on each rank that holds it: the first of them writes it, and every rank reads its own.
    """
    items = []
    held = own_buffers(parts)
    for info in parts.registry.of_kind("buffer"):
        if not parts.spec.buffers[info.name][2]:
            continue
        is_writer = parts.slices.holds_first(info) and parts.owner(info) == parts.stage_group.index
        mine = info.name in held and (is_writer or not to_write)
        pieces = []
        if mine:
            flat = held[info.name].detach()
            flat = flat.contiguous().view(-1) if to_write else flat.view(-1)
            pieces = [FlatSlice(0, flat.numel(), flat)]
        items.append(TensorPieces("buffer", info.name, info.shape, info.dtype, pieces))
    return items


def add_pieces(
    parts: EngineParts,
    held: Pieces,
    kind: str,
    slots: Iterable[ParameterSlot],
    first: int,
    flat: Flat,
    window: tuple[int, int] | None,
) -> None:
    """Add the parts of ``slots`` that lie in ``flat``, whose first element is element ``first`` of the bucket.

    With a ``window`` of the bucket the pieces are to be written: elements that several ranks hold are added only on the
    first of them. Without a window the pieces are to be filled.
    """
    for name, start, stop, place in parts.slices.ranges_in(slots, first, flat.numel(), window):
        piece = FlatSlice(start, stop, flat.detach()[place : place + stop - start])
        held.setdefault((kind, name), []).append(piece)
