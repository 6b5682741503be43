"""Exchange of keys, vectors and gradients between ranks, by placement.

    Everywhere   every rank gets the distinct keys of all ranks
       data_parallel   reads its own copy                    gradients: gathered by all, merged alike by all
       column          sends each rank its columns           gradients: each rank gets its columns
    Routed       distinct keys go to the owners of their rows (placements table and row)
                 vectors of distinct rows come back          gradients of distinct rows go the same way
    Sums         all keys go to the owners, which pool
                 (partial) sums come back                    gradients of the sums go the same way

In each, gradients reach a row's owner in the order of microbatches, then ranks, then the rank's own keys, and are
merged in that order: the same bits in every run.

    ask       finds and counts this rank's keys             no traffic
    leave     returns keys and destinations                 no traffic: the keys of all groups travel together, and
    arrive    stores the keys that this rank received       may travel ahead of the batch before, in another thread
    fetch     returns vectors, pooled                       reads the weights, so it runs after the step before
    keep      merges gradients of pooled vectors to rows    no traffic: runs in the backward pass
    deliver   sends gradients to the owners

Cost of one pass in bytes per rank: cost.py.
Shapes: N ranks, U distinct keys of the rank's batch, A keys that the rank serves, D width, R runs of features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.exchange import Counts, RowParcel, back, carry, gather, send
from shardwise.kernels.tables.pooling import gather as gather_vectors
from shardwise.kernels.tables.pooling import merge, pool
from shardwise.kernels.tables.rounding import word_of
from shardwise.kernels.tables.unique import DistinctKeys, UniqueScratch, dealt, grouped, unique
from shardwise.kernels.tables.wire import RowWire, WireName
from shardwise.parallel.embedding.fuse import FusedKeys, by_sample
from shardwise.parallel.embedding.group import FeatureRun, TableGroup
from shardwise.parallel.embedding.layout import dynamic_bucket, static_owner
from shardwise.parallel.embedding.rows.store import RowStore, TableRange
from shardwise.parallel.embedding.transfer import SlabRows


@dataclass
class KeyRequest:
    """Keys of one group in one batch, with the state of their exchange."""

    fused: FusedKeys
    """The joined features of the batch."""
    keys: Tensor
    """Keys that leave this rank, ordered by destination rank."""
    inverse: Tensor
    """Index into ``keys`` of each key of the batch."""
    leaving: Tensor
    """Counts that leave for each rank, by kind: int64 [N, K]."""
    leaving_bags: "LeavingBags | None" = None
    """Bags whose keys leave this rank, for ``PooledSumsExchange``."""
    counts: Counts = field(default_factory=list)
    """Number of keys from each rank to each rank; one column for ``GatheredKeysExchange``."""
    number: int = 0
    """Number of the pass in its step, which decides how its gradients are rounded."""
    arrived: Tensor | None = None
    """Keys that this rank must serve: int64 [A]."""
    stretches: list[TableRange] = field(default_factory=list)
    """Ranges of ``arrived`` by dynamic table."""
    bags: "RemoteBags | None" = None
    """Bags that this rank pools for others, for ``PooledSumsExchange``."""
    rows: SlabRows | None = None
    """Slab rows of ``arrived``, once known; for ``PooledSumsExchange``, of its distinct keys."""
    found: list[Tensor | None] = field(default_factory=list)
    """For each run of max pooling, the position of each maximum; None for other runs."""
    gradient: Tensor | None = None
    """Gradients of ``keys``, [U, D]; for ``PooledSumsExchange`` of the sums, [F·B, D]."""
    keeps_vectors: bool = False
    """True if the weights of the keys require gradients."""
    vectors: Tensor | None = None
    """Vector of each key, if ``keeps_vectors``: [N, D]."""

    def read_by_device(self) -> list[Tensor]:
        """Return the tensors that operations on the slab's device read, if that is not the host.

        ``take`` stores their copies in the same order.
        """
        bags = () if self.bags is None else (self.bags.offsets, self.bags.weights, self.bags.inverse)
        rows = () if self.rows is None else (self.rows.here,)
        fused = (self.fused.offsets, self.fused.weights)
        return [each for each in (*fused, self.inverse, *rows, *bags) if each is not None]

    def take(self, there: Iterator[Tensor]) -> None:
        """Replace the tensors of ``read_by_device`` by their copies on the device."""

        def next_of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else next(there)

        offsets, weights = next_of(self.fused.offsets), next_of(self.fused.weights)
        self.fused = self.fused._replace(offsets=offsets, weights=weights)
        self.inverse = next(there)
        if self.rows is not None:
            self.rows = self.rows._replace(there=next(there))
        if self.bags is not None:
            counts, _, has_weights, _ = self.bags
            self.bags = RemoteBags(counts, next(there), next_of(has_weights), next(there))


class LeavingBags(NamedTuple):
    """Bags whose keys leave this rank, which ``PooledSumsExchange`` pools on other ranks."""

    lengths: Tensor
    """Number of keys in each bag."""
    weights: Tensor | None
    """Weight of each key; None if all are 1."""


class RemoteBags(NamedTuple):
    """Bags that ``PooledSumsExchange`` pools on this rank for others."""

    counts: Counts
    """Number of bags from each rank to each rank, in the direction of the gradients."""
    offsets: Tensor
    """Start of each bag among the arrived keys, and the end."""
    weights: Tensor | None
    """Weight of each arrived key; None if all are 1."""
    inverse: Tensor
    """Index of each arrived key among the distinct ones."""


class PreparationLane(NamedTuple):
    """Group and scratch memory with which one thread prepares batches; two threads must not share a lane."""

    group: Group
    """Group that carries keys."""
    scratch: UniqueScratch


class TableExchange:
    """Exchange of one group of tables between ranks.

    Args:
        tables: the group of tables.
        group: carries vectors and gradients; a ``PreparationLane`` carries keys.
        wire: form in which vectors and gradients travel.
    """

    sees_rows = True
    """True if this rank gets the vectors of single rows, False if it only gets sums."""
    parcels = 1
    """Number of parcels of ``leave``."""

    def __init__(self, tables: TableGroup, group: Group, wire: RowWire):
        self.tables = tables
        self.dtype = wire.dtype
        self.wire = wire
        self.group = group
        self.kinds = len(tables.tables) if tables.is_dynamic else 1
        self._name = f"embedding {tables}"

    def ask(self, fused: FusedKeys, lane: PreparationLane) -> KeyRequest:
        """Return the distinct keys of a batch, with the number that goes to each rank."""
        raise NotImplementedError

    def leave(self, asked: KeyRequest, everyone: Tensor) -> list[RowParcel]:
        """Return the int64 tensors to send; ``everyone`` is what leaves each rank for each, int64 [N, N, K]."""
        raise NotImplementedError

    def arrive(
        self, asked: KeyRequest, came: Sequence[Tensor], everyone: Tensor, lane: PreparationLane
    ) -> None:
        """Store the received tensors ``came``, which are in the order of ``leave``."""
        raise NotImplementedError

    def fetch(self, asked: KeyRequest, store: RowStore, learns: bool) -> list[Tensor]:
        """Return the vectors of each run: pooled [F·B, D], or one for each key [n, D]. Collective."""
        raise NotImplementedError

    def keep(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients of the vectors that ``fetch`` returned."""
        raise NotImplementedError

    def deliver(self, asked: KeyRequest, store: RowStore) -> Tensor:
        """Send the gradients to the owners of the rows and return those of ``asked.rows``. Collective."""
        what = f"gradients of {self._name}"
        (came,) = carry([self.gradients(asked, store)], self.group, what, "gradients")
        return self.delivered(asked, came)

    def _packed_gradients(
        self, asked: KeyRequest, gradient: Tensor, store: RowStore, part: int = 0
    ) -> Tensor:
        """Return the message of gradients, each pass of a step and each rank rounded by random numbers of its own."""
        if self.wire.name == "fp32":
            return gradient
        word = word_of(store.wire_key, store.steps + 1, asked.number, self.group.index, part)
        return self.wire.packed(gradient, word)

    def gradients(self, asked: KeyRequest, store: RowStore) -> RowParcel:
        """Return the numbers of the gradients that ``deliver`` sends."""
        raise NotImplementedError

    def delivered(self, asked: KeyRequest, came: Tensor) -> Tensor:
        """Return the gradients of ``asked.rows`` from the numbers that came for ``gradients``."""
        raise NotImplementedError

    def of_weights(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of the keys' weights, computed from those of the pooled vectors: [N]."""
        assert asked.vectors is not None, "kept where weights want gradients"
        fused = asked.fused
        found = asked.vectors.new_zeros(asked.vectors.shape[0])
        for (kind, start, stop), grad in zip(self.tables.runs, grads, strict=True):
            if grad is None or kind in ("rows", "max"):  # such keys have no weights
                continue
            if fused.offsets is None:
                found += (grad * asked.vectors).sum(1)
                continue
            offsets = fused.offsets[start * fused.samples : stop * fused.samples + 1]
            first, last = fused.starts[start], fused.starts[stop]
            bags = torch.arange(offsets.numel() - 1, device=grad.device)
            bags = bags.repeat_interleave(offsets.diff(), output_size=last - first)
            found[first:last] = (grad[bags] * asked.vectors[first:last]).sum(1)
        return found

    def _distinct(self, fused: FusedKeys, lane: PreparationLane) -> tuple[Tensor, Tensor, Tensor]:
        """Return distinct keys in the order of their tables, the index of each key among them, and counts by table."""
        if not self.tables.is_dynamic:
            keys, inverse = unique(fused.keys, lane.scratch, self.tables.bases[-1])
            return keys, inverse, torch.tensor([keys.numel()])
        found, inverses, sizes = [], [], []
        start = 0
        for table in range(len(self.tables.tables)):
            of_table = [place for place, feature in enumerate(self.tables.features) if feature.table == table]
            stretch = fused.keys[fused.starts[of_table[0]] : fused.starts[of_table[-1] + 1]]
            keys, inverse = unique(stretch, lane.scratch)
            found.append(keys)
            inverses.append(inverse + start if start else inverse)
            sizes.append(keys.numel())
            start += keys.numel()
        return torch.cat(found), torch.cat(inverses), torch.tensor(sizes)

    def _owners(self, keys: Tensor) -> Tensor:
        """Return the rank that owns each key, for placement ``row``."""
        if self.tables.is_dynamic:
            return dynamic_bucket(keys) % self.group.size
        return static_owner(keys, self.group.size)

    def _pooled(self, asked: KeyRequest, vectors: Tensor, index: Tensor | None = None) -> list[Tensor]:
        """Return the output of each run.

        ``vectors`` has a line for each distinct key, or ``index`` selects the line of each key.
        """
        fused, outputs, width = asked.fused, [], self.tables.width
        index = asked.inverse if index is None else index
        asked.found = []
        if asked.keeps_vectors:
            asked.vectors = gather_vectors(vectors, index, width)
        for run in self.tables.runs:
            places, offsets, weights = _stretch(fused, run, index)
            if run.kind == "rows":
                outputs.append(gather_vectors(vectors, places, width))
                asked.found.append(None)
                continue
            if run.kind == "max":
                pooled = pool(vectors, places, offsets, "max", width=width)
            else:
                pooled = pool(vectors, places, offsets, "sum", weights, width)
            outputs.append(pooled.values)
            asked.found.append(pooled.places)
        return outputs

    def _merged(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of the distinct keys."""
        fused, total = asked.fused, None
        distinct = asked.keys.numel()
        for run, found, grad in zip(self.tables.runs, asked.found, grads, strict=True):
            if grad is None:
                continue
            inverse, offsets, weights = _stretch(fused, run, asked.inverse)
            if run.kind == "rows":
                part = merge(grad, inverse, None, distinct)
            elif run.kind == "max":
                part = merge(grad, inverse, offsets, distinct, "max", places=found)
            else:
                part = merge(grad, inverse, offsets, distinct, "sum", weights)
            total = part if total is None else total.add_(part)
        assert total is not None, "backward runs where at least one gradient came"
        return total


class GatheredKeysExchange(TableExchange):
    """Exchange for placements data_parallel and column: every rank gets the distinct keys of all ranks."""

    def ask(self, fused: FusedKeys, lane: PreparationLane) -> KeyRequest:
        """Return the distinct keys of a batch, which go to every rank."""
        keys, inverse, sizes = self._distinct(fused, lane)
        return KeyRequest(fused, keys, _by_vector(fused, inverse), sizes.expand(self.group.size, -1))

    def leave(self, asked: KeyRequest, everyone: Tensor) -> list[RowParcel]:
        """Return the distinct keys; every rank gets all of them."""
        asked.counts = [[part] for part in everyone[:, 0].sum(1).tolist()]
        return [RowParcel(asked.keys, asked.counts)]

    def arrive(
        self, asked: KeyRequest, came: Sequence[Tensor], everyone: Tensor, lane: PreparationLane
    ) -> None:
        """Store the distinct keys of all ranks."""
        (asked.arrived,) = came
        if self.tables.is_dynamic:
            asked.stretches = _stretches(everyone[:, 0])

    def fetch(self, asked: KeyRequest, store: RowStore, learns: bool) -> list[Tensor]:
        """Return the vectors of each run: from the own copy, or with the columns of all ranks."""
        assert asked.arrived is not None, "keys are exchanged before vectors are fetched"
        me, parts = self.group.index, [part for (part,) in asked.counts]
        rows = _rows(asked, store, learns)
        if self.tables.place.placement == "data_parallel" or self.group.size == 1:
            start = sum(parts[:me])
            own = rows.part(start, start + parts[me])
            places = store.lend(own, learns)
            if places is None:
                return self._pooled(asked, store.read(own, learns))
            # Pool from the lines, without a copy of the rows. Keys of static tables are rows already.
            are_rows = asked.fused.keys.device == places.device and not self.tables.is_dynamic
            are_places = are_rows and not store.is_tiered
            index = asked.fused.keys if are_places else places[asked.inverse]
            return self._pooled(asked, store.lines.pooled_from, index)
        served = self.wire.packed(store.read(rows, learns))  # [A, D/N]
        widths = [len(self.tables.columns(rank)) for rank in self._ranks]
        elements = [[part * self.wire.width(width) for part in parts] for width in widths]
        output = served.new_empty(sum(row[me] for row in elements))
        self.group.all_to_all(output, served.view(-1), elements, f"vectors of {self._name}").wait()
        pieces = output.split([row[me] for row in elements])
        columns = [
            self.wire.unpacked(piece, width)
            for piece, width in zip(pieces, widths, strict=True)
            if piece.numel()
        ]
        whole = torch.cat(columns, 1) if columns else self.wire.unpacked(output, self.tables.width)
        return self._pooled(asked, whole)

    def keep(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients, merged to distinct keys."""
        asked.gradient = self._merged(asked, grads)

    def gradients(self, asked: KeyRequest, store: RowStore) -> RowParcel:
        """Return the gradients for all ranks, or for each rank those of its columns."""
        parts = [part for (part,) in asked.counts]
        gradient = _or_zeros(asked, asked.keys.numel(), self.tables.width, store)
        if not self._cuts_columns:
            sent = self._packed_gradients(asked, gradient, store).reshape(-1)
            return RowParcel(sent, [[part * self.wire.width(self.tables.width)] for part in parts])
        columns = [self.tables.columns(rank) for rank in self._ranks]
        pieces = [
            self._packed_gradients(asked, gradient[:, held.start : held.stop], store, rank).reshape(-1)
            for rank, held in enumerate(columns)
        ]
        counts = [[part * self.wire.width(len(held)) for held in columns] for part in parts]
        return RowParcel(torch.cat(pieces), counts)

    def delivered(self, asked: KeyRequest, came: Tensor) -> Tensor:
        """Return the gradients of all ranks, of this rank's columns if columns are spread."""
        width = len(self.tables.columns(self.group.index)) if self._cuts_columns else self.tables.width
        return self.wire.unpacked(came, width)

    @property
    def _cuts_columns(self) -> bool:
        return self.tables.place.placement == "column" and self.group.size > 1

    @property
    def _ranks(self) -> range:
        return range(self.group.size)


class DistinctRowsExchange(TableExchange):
    """Exchange for placements table and row, with vectors of distinct rows."""

    def ask(self, fused: FusedKeys, lane: PreparationLane) -> KeyRequest:
        """Return the distinct keys of a batch, ordered by owner."""
        keys, inverse, sizes = self._distinct(fused, lane)
        ranks = self.group.size
        if self.tables.place.placement == "row":
            owners = self._owners(keys)
            ordered, moved, counts = dealt(DistinctKeys(keys, inverse), owners, ranks)
            leaving = counts.cpu()
            if self.tables.is_dynamic:
                table = torch.arange(self.kinds).repeat_interleave(sizes)
                leaving = torch.bincount(owners * self.kinds + table, minlength=ranks * self.kinds)
            return KeyRequest(fused, ordered, _by_vector(fused, moved), leaving.view(ranks, self.kinds))
        leaving = torch.zeros(ranks, self.kinds, dtype=torch.int64)
        if self.tables.is_dynamic:
            for number, place_of in enumerate(self.tables.places):
                leaving[place_of.owner, number] = sizes[number]
            return KeyRequest(fused, keys, _by_vector(fused, inverse), leaving)
        # Distinct keys are numbered in the order of first occurrence, and features are ordered by owner: so the keys
        # of an owner are a range.
        before = 0
        for rank, end in enumerate(self.tables.owner_ends()):
            start = 0 if rank == 0 else fused.starts[self.tables.owner_ends()[rank - 1]]
            stretch = inverse[start : fused.starts[end]]
            after = max(before, int(stretch.max()) + 1) if stretch.numel() else before
            leaving[rank, 0] = after - before
            before = after
        return KeyRequest(fused, keys, _by_vector(fused, inverse), leaving)

    def leave(self, asked: KeyRequest, everyone: Tensor) -> list[RowParcel]:
        """Return the distinct keys for their owners."""
        asked.counts = everyone.sum(2).tolist()
        return [RowParcel(asked.keys, asked.counts)]

    def arrive(
        self, asked: KeyRequest, came: Sequence[Tensor], everyone: Tensor, lane: PreparationLane
    ) -> None:
        """Store the keys that this rank serves."""
        (asked.arrived,) = came
        if self.tables.is_dynamic:
            asked.stretches = _stretches(everyone[:, self.group.index])

    def fetch(self, asked: KeyRequest, store: RowStore, learns: bool) -> list[Tensor]:
        """Return the vectors of each run, pooled on this rank from the rows that the owners send."""
        assert asked.arrived is not None, "keys are exchanged before vectors are fetched"
        served = self.wire.packed(store.read(_rows(asked, store, learns), learns))
        came = back(served, asked.counts, self.group, f"vectors of {self._name}")
        return self._pooled(asked, self.wire.unpacked(came, self.tables.width))

    def keep(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients, merged to distinct keys."""
        asked.gradient = self._merged(asked, grads)

    def gradients(self, asked: KeyRequest, store: RowStore) -> RowParcel:
        """Return the gradients of distinct rows for their owners."""
        gradient = _or_zeros(asked, asked.keys.numel(), self.tables.width, store)
        sent, width = self._packed_gradients(asked, gradient, store), self.wire.width(self.tables.width)
        return RowParcel(sent.reshape(-1), [[count * width for count in row] for row in asked.counts])

    def delivered(self, asked: KeyRequest, came: Tensor) -> Tensor:
        """Return the gradients of the rows that this rank owns."""
        return self.wire.unpacked(came, self.tables.width)


class PooledSumsExchange(TableExchange):
    """Exchange for placements table and row of static tables, with (partial) sums of bags."""

    sees_rows = False
    parcels = 2

    def __init__(self, tables: TableGroup, group: Group, wire: RowWire):
        super().__init__(tables, group, wire)
        self.kinds = 3  # counts of keys, of bags, and 1 if there are weights
        assert len(tables.runs) == 1 and tables.runs[0].kind == "summed", (
            "sums are of features that are added"
        )

    def ask(self, fused: FusedKeys, lane: PreparationLane) -> KeyRequest:
        """Return all keys of a batch ordered by owner, with the lengths of their bags."""
        ranks = self.group.size
        assert fused.offsets is not None, "bags of sums stand by feature"
        lengths = fused.offsets.diff()
        leaving = torch.zeros(ranks, self.kinds, dtype=torch.int64)
        leaving[:, 2] = fused.weights is not None
        if self.tables.place.placement == "row":
            owners = self._owners(fused.keys)
            order, numbers = grouped(owners, ranks)
            bags = lengths.numel()
            bag = torch.arange(bags, device=lengths.device)
            bag = bag.repeat_interleave(lengths, output_size=fused.keys.numel())
            lengths = torch.bincount(owners * bags + bag, minlength=ranks * bags)
            leaving[:, 0], leaving[:, 1] = numbers.cpu(), bags
            weights = None if fused.weights is None else fused.weights[order]
            return KeyRequest(fused, fused.keys[order], order, leaving, LeavingBags(lengths, weights))
        start = 0
        for rank, end in enumerate(self.tables.owner_ends()):
            leaving[rank, 0] = fused.starts[end] - fused.starts[start]
            leaving[rank, 1] = (end - start) * fused.samples
            start = end
        return KeyRequest(fused, fused.keys, fused.keys, leaving, LeavingBags(lengths, fused.weights))

    def leave(self, asked: KeyRequest, everyone: Tensor) -> list[RowParcel]:
        """Return keys and lengths of bags for their owners."""
        assert asked.leaving_bags is not None, "bags travel with their keys"
        asked.counts = everyone[:, :, 0].tolist()
        return [
            RowParcel(asked.keys, asked.counts),
            RowParcel(asked.leaving_bags.lengths, everyone[:, :, 1].tolist()),
        ]

    def arrive(
        self, asked: KeyRequest, came: Sequence[Tensor], everyone: Tensor, lane: PreparationLane
    ) -> None:
        """Store the bags that this rank pools; exchange the weights of keys if any rank has some."""
        keys, lengths = came
        weights = None
        if bool(everyone[:, :, 2].any()):
            own = None if asked.leaving_bags is None else asked.leaving_bags.weights
            if own is None:
                own = torch.ones(asked.keys.numel(), dtype=self.dtype, device=asked.keys.device)
            weights = send(own, asked.counts, lane.group, f"weights of {self._name}", "keys")
        offsets = lengths.new_zeros(lengths.numel() + 1)
        torch.cumsum(lengths, 0, out=offsets[1:])
        asked.arrived, inverse = unique(keys, lane.scratch, self.tables.bases[-1])
        asked.bags = RemoteBags(everyone[:, :, 1].tolist(), offsets, weights, inverse)

    def fetch(self, asked: KeyRequest, store: RowStore, learns: bool) -> list[Tensor]:
        """Return the sums of the bags, added over the owners if placed by row."""
        assert asked.arrived is not None and asked.bags is not None, "keys are exchanged before vectors"
        counts, offsets, weights, inverse = asked.bags
        sums = pool(store.read(_rows(asked, store, learns), learns), inverse, offsets, "sum", weights).values
        came = back(self.wire.packed(sums), counts, self.group, f"sums of {self._name}")
        arrived = self.wire.unpacked(came, self.tables.width)
        if self.tables.place.placement == "row" and self.group.size > 1:
            first, *others = arrived.view(self.group.size, -1, self.tables.width)
            arrived = first
            for part in others:
                arrived = arrived + part
        return [arrived]

    def keep(self, asked: KeyRequest, grads: Sequence[Tensor | None]) -> None:
        """Store the gradients of the sums."""
        asked.gradient = grads[0]

    def deliver(self, asked: KeyRequest, store: RowStore) -> Tensor:
        """Send the gradients of the sums to the owners, which merge them to rows."""
        assert asked.rows is not None and asked.bags is not None, "gradients follow vectors"
        counts, offsets, weights, inverse = asked.bags
        bags = len(self.tables.features) * asked.fused.samples
        gradient = _or_zeros(asked, bags, self.tables.width, store)
        gradient = self._packed_gradients(asked, gradient, store)
        what = f"gradients of {self._name}"
        if self.tables.place.placement == "row":
            parts = [row[self.group.index] for row in counts]
            arrived = gather(gradient, parts, self.group, what, "gradients")
        else:
            arrived = send(gradient, counts, self.group, what, "gradients")
        arrived = self.wire.unpacked(arrived, self.tables.width)
        return merge(arrived, inverse, offsets, asked.rows.here.numel(), "sum", weights)


def _by_vector(fused: FusedKeys, inverse: Tensor) -> Tensor:
    """Return indices of keys in the order of the vectors that the keys make."""
    return by_sample(inverse, fused.samples) if fused.by_sample and not fused.keys_by_sample else inverse


def _rows(asked: KeyRequest, store: RowStore, learns: bool) -> SlabRows:
    """Return the slab rows of the keys that arrived; ``learns`` inserts new keys."""
    if asked.rows is None or asked.rows.there.device.type == "cpu":
        assert asked.arrived is not None, "keys are exchanged before vectors are fetched"
        rows = store.rows(asked.arrived, asked.stretches, learns)
        asked.rows = SlabRows(rows, rows)
    return asked.rows


def _stretch(fused: FusedKeys, run: FeatureRun, index: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the part of ``index`` that belongs to a run, the offsets of its bags and its weights."""
    first, last = fused.starts[run.start], fused.starts[run.stop]
    offsets = fused.offsets
    if offsets is not None:
        offsets = offsets[run.start * fused.samples : run.stop * fused.samples + 1]
        offsets = offsets - first if first else offsets
    return index[first:last], offsets, None if fused.weights is None else fused.weights[first:last]


def _or_zeros(asked: KeyRequest, rows: int, width: int, store: RowStore) -> Tensor:
    """Return the stored gradients, or zeros if this rank's loss does not depend on the group."""
    if asked.gradient is None:
        return torch.zeros(rows, width, dtype=store.dtype, device=store.device)
    return asked.gradient.to(store.dtype)


def _stretches(sizes: Tensor) -> list[TableRange]:
    """Return the ranges of arrived keys by dynamic table, from sizes by source rank and table: int64 [N, K]."""
    found, start = [], 0
    for row in sizes.tolist():
        for table, size in enumerate(row):
            if size:
                found.append(TableRange(table, start, start + size))
                start += size
    return found


def way_of(tables: TableGroup, group: Group, dtype: torch.dtype, wire: WireName = "fp32") -> TableExchange:
    """Return the exchange of a group of tables, by its placement and ``exchange``.

    Args:
        tables: the group of tables.
        group: the ranks that hold the tables; a single rank sends nothing, so that nothing is rounded.
        dtype: dtype in which vectors and gradients are computed.
        wire: form in which they travel.
    """
    form = RowWire("fp32" if group.size == 1 else wire, dtype)
    if group.size == 1 or tables.place.placement in ("data_parallel", "column"):
        return GatheredKeysExchange(tables, group, form)
    kind = PooledSumsExchange if tables.place.exchange == "pooled" else DistinctRowsExchange
    return kind(tables, group, form)
