"""StepKeys: the exchange of the keys of all microbatches of a step in one message, before its first forward pass.

    a forward pass on its own     numbers, keys     for each microbatch: the host waits twice for the other ranks
    train_step(batches)           numbers and keys  for the whole step: the host waits once

Only keys go ahead: no weight is read and no row is inserted, so that results have the same bits. Each collection finds
its keys by the tensors of its features (``KeysAtHand``). If the model asks for other features, the collection prepares
them in the forward pass.

[Note: one message of fixed size] A receiver must know the size of a message, and ranks do not know each other's numbers
of keys. So each rank sends to each rank its numbers and a slot for keys. All ranks derive the size of the slot alike
from the numbers of the step before. If the keys of any rank for any rank do not fit into the slot, all ranks see that
by the numbers, ignore all slots, and send the keys in a second exchange (``carry``). A slot has a quarter more than the
largest number of keys from one rank to another in the step before. The size is 0 in the first step, and if slots of
that size would have held more than twice the keys of the step before, because few ranks get most of them.

[Note: ranks that cannot] Every rank sends a verdict with its numbers in every step. If a rank's batch is refused, all
ranks prepare in the forward pass of this step, where the refusal is reported. If a rank does not find the features of
every collection in each microbatch, or if its model did not ask for the features of the step before, all ranks prepare
in the forward pass in this step and in all later ones. A model must change its features on all ranks or on none: the
same holds for keys that ``engine.prefetch`` prepares. ``tables.prefetch_steps: 0`` turns both off.

Cost: numbers of 8 bytes, N·(N-1)·K for each group and microbatch; keys as in cost.py, at most 2.5 times as many with
slots, which are rounded up to 64 keys. The keys of a step take memory from its beginning, not from their forward pass,
until its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.base.pytree import rebuilt
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.comm.exchange import RowParcel, carry
from shardwise.parallel.embedding.ahead import PreparedFeatures, are_features
from shardwise.parallel.embedding.batch import AskedFeatures, KeysAtHand
from shardwise.parallel.embedding.placed import PlacedTables

_WHAT = "keys of a step"
_ROUNDED_TO = 64
"""Numbers of keys that the size of a slot is a multiple of."""
_MOST_PADDING = 2
"""Largest size of all slots over the number of keys in them."""


class _Verdict(IntEnum):
    """The state of a rank's step: whether its keys can be exchanged before its forward passes."""

    READY = 0
    REFUSED = 1
    """A batch is refused: this step is prepared in the forward pass."""
    UNUSED = 2
    """Features are not found, or were not asked for: this and later steps are prepared in the forward pass."""


class _Wanted(NamedTuple):
    """The keys of one collection in one microbatch."""

    tables: PlacedTables
    features: Mapping[str, Ragged]
    found: AskedFeatures


class StepKeys:
    """Exchanges the keys of all microbatches of a step at once, for all collections of a rank.

    Args:
        collections: the placed tables, all on the same ranks.
    """

    def __init__(self, collections: Sequence[PlacedTables]):
        self._collections = tuple(collections)
        self._is_on = bool(collections) and collections[0].group.size > 1
        self._slot = 0
        """Number of keys that a slot holds, the same on all ranks."""
        self._was_unused = False
        """True if the model did not ask for some of the last step's features."""

    @property
    def _group(self) -> Group:
        return self._collections[0].group

    @torch.no_grad()
    def prepare(self, batches: Sequence[Any]) -> None:
        """Exchange the keys of all microbatches of a step, if all ranks can. Collective.

        Without traffic if the keys of the batches were prepared ahead (``engine.prefetch``).

        Args:
            batches: the microbatches, as many on every rank.
        """
        if not self._is_on:
            return
        mappings = [mappings_of(batch) for batch in batches]
        if any(isinstance(each, PreparedFeatures) for of_batch in mappings for each in of_batch):
            return
        wanted = self._find(mappings)
        verdict, numbers, parcels, came = self._exchanged(wanted, len(batches))
        if verdict is _Verdict.UNUSED:
            self._is_on = False
        if verdict is not _Verdict.READY:
            return
        assert not isinstance(wanted, _Verdict), "a rank without keys says so"
        arrived = iter(came)
        for each, of_batch, sent in zip(wanted, numbers, parcels, strict=True):
            prepared = each.tables.arrive(each.found, of_batch, [next(arrived) for _ in sent])
            each.tables.at_hand.append(KeysAtHand(each.features, prepared))

    @contextmanager
    def of_step(self, batches: Sequence[Any]) -> Iterator[None]:
        """Exchange the keys of a step, and drop them after the ``with`` block, in which its passes run. Collective."""
        self.prepare(batches)
        try:
            yield
            self._was_unused |= any(
                not each.is_taken for tables in self._collections for each in tables.at_hand
            )
        finally:
            self._forget()

    def _forget(self) -> None:
        for tables in self._collections:
            tables.at_hand = []

    def _find(self, mappings: Sequence[Sequence[Mapping[str, Ragged]]]) -> list[_Wanted] | _Verdict:
        """Return the keys of each microbatch and collection, or why there are none."""
        if self._was_unused:
            return _Verdict.UNUSED
        read = []
        for of_batch in mappings:
            for tables in self._collections:
                names = tables.feature_names
                features = _read_by(names, of_batch)
                if features is None:
                    return _Verdict.UNUSED
                read.append((tables, features))
        try:
            return [
                _Wanted(tables, _only(tables, features), tables.ask(features)) for tables, features in read
            ]
        except Exception:  # the forward pass comes to the same exception, and tells all ranks
            return _Verdict.REFUSED

    def _exchanged(
        self, wanted: "list[_Wanted] | _Verdict", microbatches: int
    ) -> tuple[_Verdict, list[list[Tensor]], list[list[RowParcel]], list[Tensor]]:
        """Return the worst verdict, and by collection and microbatch the numbers, the parcels, and what came."""
        group, kinds = self._group, [kinds for tables in self._collections for kinds in tables.kinds]
        kinds = kinds * microbatches
        length, verdict = 1 + group.size * sum(kinds), _Verdict.READY
        sent = torch.zeros(group.size, length + self._slot, dtype=torch.int64)
        if isinstance(wanted, _Verdict):
            sent[:, 0] = wanted
        else:
            leaving = torch.cat([asked.leaving for each in wanted for asked in each.found.asked], 1)
            sent[:, 1:length] = leaving.reshape(-1)
            self._fill(sent[:, length:], wanted, leaving, kinds)
        came = torch.empty_like(sent)
        even = [[length + self._slot] * group.size] * group.size
        group.all_to_all(came.view(-1), sent.view(-1), even, _WHAT, "keys").wait()
        verdict = _Verdict(int(came[:, 0].max()))
        if verdict is not _Verdict.READY:
            return verdict, [], [], []
        assert not isinstance(wanted, _Verdict), "this rank is ready"
        numbers = _by_batch(came[:, 1:length].reshape(group.size, group.size, -1), wanted, kinds)
        parcels = [
            each.tables.leave(each.found, of_batch) for each, of_batch in zip(wanted, numbers, strict=True)
        ]
        flat = [parcel for of_batch in parcels for parcel in of_batch]
        need = _needed(flat, group.size)
        fits = int(need.max()) <= self._slot
        keys = _unpacked(came[:, length:], flat, group.index) if fits else carry(flat, group, _WHAT, "keys")
        self._slot = _slot_for(need)
        return verdict, numbers, parcels, keys

    def _fill(self, slots: Tensor, wanted: Sequence[_Wanted], leaving: Tensor, kinds: Sequence[int]) -> None:
        """Write this rank's keys into the slots, unless they do not fit into one of them."""
        me, size = self._group.index, self._group.size
        mine = torch.zeros(size, *leaving.shape, dtype=torch.int64)
        mine[me] = leaving
        numbers = _by_batch(mine, wanted, kinds)
        parcels = [
            parcel
            for each, of_batch in zip(wanted, numbers, strict=True)
            for parcel in each.tables.leave(each.found, of_batch)
        ]
        if int(_needed(parcels, size)[me].max()) > self._slot:
            return
        pieces = [
            [parcel.rows] * size if parcel.is_for_all else parcel.rows.split(parcel.counts[me])
            for parcel in parcels
        ]
        for rank in range(size):
            keys = torch.cat([of_parcel[rank] for of_parcel in pieces])
            slots[rank, : keys.numel()] = keys


def mappings_of(batch: Any) -> list[Mapping[str, Ragged]]:
    """Return the mappings of features in a batch, in the order in which they stand there."""
    found: list[Mapping[str, Ragged]] = []

    def walk(value: Any) -> Any:
        if isinstance(value, PreparedFeatures) or are_features(value):
            found.append(value)
            return value
        return value if isinstance(value, Ragged) else rebuilt(value, walk)

    walk(batch)
    return found


def _read_by(names: Sequence[str], mappings: Sequence[Mapping[str, Ragged]]) -> Mapping[str, Ragged] | None:
    """Return the only mapping that has the named features, None if there is another or their weights learn."""
    having = [each for each in mappings if all(name in each for name in names)]
    if len(having) != 1:
        return None
    weights = [having[0][name].weights for name in names]
    if any(isinstance(each, Tensor) and each.requires_grad for each in weights):
        return None  # keys that are found before the pass have no autograd history
    return having[0]


def _only(tables: PlacedTables, features: Mapping[str, Ragged]) -> Mapping[str, Ragged]:
    """Return the features that the tables read."""
    return {name: features[name] for name in tables.feature_names}


def _by_batch(numbers: Tensor, wanted: Sequence[_Wanted], kinds: Sequence[int]) -> list[list[Tensor]]:
    """Cut numbers [N, N, K of all] by collection and microbatch, then by part."""
    parts = iter(numbers.split(list(kinds), 2))
    return [[next(parts) for _ in each.tables.parts] for each in wanted]


def _needed(parcels: Sequence[RowParcel], size: int) -> Tensor:
    """Return the number of keys that each rank sends to each: int64 [N, N]."""
    counts = [torch.tensor(parcel.counts, dtype=torch.int64).expand(size, size) for parcel in parcels]
    return torch.stack(counts).sum(0)


def _unpacked(slots: Tensor, parcels: Sequence[RowParcel], index: int) -> list[Tensor]:
    """Return the keys of each parcel that came in the slots, in the order of the ranks."""
    pieces = []
    for rank, slot in enumerate(slots):
        counts = [parcel.counts[rank][0 if parcel.is_for_all else index] for parcel in parcels]
        pieces.append(slot[: sum(counts)].split(counts))
    return [torch.cat(of_parcel) for of_parcel in zip(*pieces, strict=True)]


def _slot_for(need: Tensor) -> int:
    """Return the size of the next step's slots, from the numbers of keys of this step: int64 [N, N]."""
    return slot_of(int(need.max()), need.numel(), int(need.sum()))


def slot_of(most: int, pairs: int, total: int) -> int:
    """Return the number of keys that a slot holds after a step; 0 for no slots.

    Args:
        most: Largest number of keys from one rank to another in the step.
        pairs: Number of pairs of ranks, each rank with itself included.
        total: Keys of all pairs.
    """
    slot = -(-(most + most // 4) // _ROUNDED_TO) * _ROUNDED_TO
    return slot if most * pairs <= _MOST_PADDING * total else 0
