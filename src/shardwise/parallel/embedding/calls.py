"""Calls of a collection of tables in a step, as ``Traffic`` counts them, foreseen from the keys of one batch.

    keys        of all microbatches of a step, before its first forward pass          (step_keys.py)
    fetched     vectors, in each forward pass                                         (ways.py)
    delivered   gradients of vectors, for each forward pass, at the end of the step
    stepped     squares of rows that are cut by column, for row-wise Adagrad          (store.py)

Each rank is assumed to have the same numbers of keys, and the keys to lie evenly on the ranks of a table that is cut by
rows. The number of calls does not depend on that.

Cost: a few numbers for each group of tables.
Shapes: W ranks; of a group N keys, U distinct ones, S bags, width D.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.kernels.tables.wire import RowWire
from shardwise.parallel.embedding.cost import TableLoad
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.step_keys import slot_of
from shardwise.plan.exchange_calls import ExchangeCall, collective

Calls = tuple[ExchangeCall, ...]
_KEY_BYTES = 8
_AXIS = "dp"
_POOLED_KINDS = 3
"""Counts that leave for each rank of a group that exchanges sums (ways.py)."""


class GroupLoad(NamedTuple):
    """A group of tables, with the numbers of keys that one microbatch of one rank has for each table."""

    tables: TableGroup
    loads: tuple[TableLoad, ...]
    """By table of the group."""
    wire: RowWire
    """Form in which vectors and gradients travel."""

    @property
    def whole(self) -> TableLoad:
        """Load of all tables of the group."""
        return TableLoad(*(sum(column) for column in zip(*self.loads, strict=True)))

    @property
    def is_pooled(self) -> bool:
        """True if sums of bags are exchanged, and no rows."""
        return self.tables.place.placement in ("row", "table") and self.tables.place.exchange == "pooled"

    @property
    def kinds(self) -> int:
        """Number of counts that leave for each rank."""
        if self.is_pooled:
            return _POOLED_KINDS
        return len(self.tables.tables) if self.tables.is_dynamic else 1

    def of_owner(self, rank: int) -> TableLoad:
        """Return the load of the tables that a rank owns, for placement ``table``."""
        places = self.tables.places
        loads = [load for load, place in zip(self.loads, places, strict=True) if place.owner == rank]
        return (
            TableLoad(*(sum(column) for column in zip(*loads, strict=True))) if loads else TableLoad(0, 0, 0)
        )

    def needed(self, ranks: int) -> list[float]:
        """Return how many keys and lengths of bags this rank sends to each rank, itself included."""
        whole, placement = self.whole, self.tables.place.placement
        if placement in ("data_parallel", "column"):
            return [whole.distinct] * ranks
        if placement == "row":
            each = whole.keys / ranks + whole.bags if self.is_pooled else whole.distinct / ranks
            return [each] * ranks
        owned = [self.of_owner(rank) for rank in range(ranks)]
        return [load.keys + load.bags if self.is_pooled else load.distinct for load in owned]


class CollectionCalls(NamedTuple):
    """Calls of one collection on one rank."""

    fetched: Calls
    """Of one FETCH."""
    delivered: Calls
    """Of DELIVER, for one microbatch."""
    stepped: Calls
    """Of STEP."""


def keys_of_step(groups: Sequence[GroupLoad], microbatches: int, ranks: int) -> Calls:
    """Return the calls that exchange the keys of a step.

    Args:
        groups: All groups of tables of the rank's collections.
        microbatches: Microbatches of a step.
        ranks: Ranks of the group.
    """
    if ranks == 1 or not groups:
        return ()
    length = 1 + ranks * sum(group.kinds for group in groups) * microbatches
    need = [0.0] * ranks
    for group in groups:
        for rank, number in enumerate(group.needed(ranks)):
            need[rank] += number * microbatches
    slot = slot_of(round(max(need)), ranks * ranks, round(ranks * sum(need)))
    found = collective("all_to_all", "keys", _AXIS, (ranks - 1) * (length + slot), _KEY_BYTES, ranks)
    return found if slot else found + _carried(groups, microbatches, ranks)


def keys_of_pass(groups: Sequence[GroupLoad], ranks: int) -> Calls:
    """Return the calls that exchange the keys of one forward pass on its own, of one collection.

    Args:
        groups: The collection's groups of tables.
        ranks: Ranks of the group.
    """
    if ranks == 1 or not groups:
        return ()
    numbers = ranks * ranks * sum(group.kinds for group in groups)
    counted = collective("all_gather", "control", _AXIS, numbers, _KEY_BYTES, ranks)
    return counted + _carried(groups, 1, ranks)


def _carried(groups: Sequence[GroupLoad], microbatches: int, ranks: int) -> Calls:
    """Return the exchange of keys for which there are no slots: of those for all ranks, and of the others."""
    for_all = [group for group in groups if group.tables.place.placement in ("data_parallel", "column")]
    found: Calls = ()
    if for_all:
        keys = round(microbatches * sum(group.whole.distinct for group in for_all))
        found += collective("all_gather", "keys", _AXIS, ranks * keys, _KEY_BYTES, ranks)
    others = [group for group in groups if group not in for_all]
    if others:
        keys = round(microbatches * sum(sum(group.needed(ranks)) for group in others) * (ranks - 1) / ranks)
        found += collective("all_to_all", "keys", _AXIS, keys, _KEY_BYTES, ranks)
    return found


def calls_of(groups: Sequence[GroupLoad], rank: int, ranks: int) -> CollectionCalls:
    """Return the calls of one collection on the rank of an index.

    Args:
        groups: The collection's groups of tables.
        rank: Index of the rank.
        ranks: Ranks of the group.
    """
    fetched: Calls = ()
    delivered: Calls = ()
    stepped: Calls = ()
    for group in groups if ranks > 1 else ():
        there, back = _elements(group, rank, ranks)
        placement, size = group.tables.place.placement, group.wire.itemsize
        if placement != "data_parallel":
            fetched += collective("all_to_all", "activations", _AXIS, there, size, ranks)
        is_gathered = placement == "data_parallel" or (placement == "row" and group.is_pooled)
        operation, number = ("all_gather", back * ranks) if is_gathered else ("all_to_all", back)
        delivered += collective(operation, "gradients", _AXIS, number, size, ranks)  # type: ignore[arg-type]
        if placement == "column" and group.tables.optimizer.type == "rowwise_adagrad":
            rows = round(group.whole.distinct) * ranks
            stepped += collective("all_reduce", "gradients", _AXIS, rows, group.wire.dtype.itemsize, ranks)
    return CollectionCalls(fetched, delivered, stepped)


def _elements(group: GroupLoad, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements of vectors and of gradients that leave the rank; of gathered ones those that it has."""
    whole, others, wire = group.whole, ranks - 1, group.wire
    width = wire.width(group.tables.width)
    placement = group.tables.place.placement
    if placement == "data_parallel":
        return 0, round(whole.distinct) * width
    if placement == "column":
        mine, *rest = (
            wire.width(len(group.tables.columns(each)))
            for each in (rank, *range(rank), *range(rank + 1, ranks))
        )
        return others * round(whole.distinct) * mine, round(whole.distinct) * sum(rest)
    number = whole.bags if group.is_pooled else whole.distinct
    if placement == "row":
        if group.is_pooled:
            return others * round(number) * width, round(number) * width
        part = round(number * others / ranks) * width
        return part, part
    own = group.of_owner(rank)
    served = own.bags if group.is_pooled else own.distinct
    return others * round(served) * width, round(number - served) * width
