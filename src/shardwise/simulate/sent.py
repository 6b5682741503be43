"""Sent: the collectives and messages of every Action of one rank, foreseen from the Plan and one measured pass.

The table of Kinds (plan/kinds.py) names for each Kind what it sends; this module has the calls:

    pass              what modules send inside a Unit's forward or backward pass: gathers and sums of slices along
                      "tp", rows for experts along "ep", the loss over a cut vocabulary     (measured: passes.py)
    message           an activation or its gradient to another stage                       (measured)
    saved             parts along "tp" of what a block has saved in host memory            (measured)
    weights           all-gathers of a Unit's buckets                                      (parallel/zero/cost.py)
    gradients         their reductions; ``arrival``: what follows when a reduction is waited for
    shared gradients  sums over the ranks of a model that hold the same elements, or stages with tied parameters
    numbers           the two small all-reduces of NORM, and before them the sums over replicas of shards
    matrices          whole matrices to their owners and back                              (optim/stage_matrices.py)
    keys, vectors, row gradients, squares of rows     of embedding tables                  (parallel/embedding/calls.py)
    norms, scales     small numbers for optimizers that need norms, and for weights that are gathered in fp8

Each call has the size that ``Traffic`` counts for it, so that the sum of a list equals the counts of a real step. A
test compares them (tests/simulate/test_sent.py).

[Note: what numbers decide] How many rows go to an expert without a capacity depends on the router, and how many rows
of tables a batch needs on its keys. ``assumed`` says so.

Cost: a look at each Action, and at each bucket once.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch

from shardwise.comm.equality import terms
from shardwise.optim.stage_matrices import dealt_rounds
from shardwise.parallel.embedding.calls import (
    CollectionCalls,
    GroupLoad,
    calls_of,
    keys_of_pass,
    keys_of_step,
)
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.parallel.zero.cost import Calls, UnitExchanges, unit_exchanges
from shardwise.plan.action import Action, Kind
from shardwise.plan.exchange_calls import ExchangeCall, collective
from shardwise.plan.plan import Plan, class_of
from shardwise.plan.slices import TensorSlices
from shardwise.plan.unit import Bucket
from shardwise.simulate.exchanges import united
from shardwise.simulate.passes import MeasuredPass

_NUMBER = 8
"""Bytes of a number of NORM."""
_HASH = len(terms(0, 32))
"""Numbers by which ranks compare a hash of 32 bits."""
_FINGERPRINT = len(terms(0))
_SUMS, _GUESSES, _FAULTS, _LOSSES = 4, 5, 3, 4
"""Numbers of NORM, as engine/step/end.py has them: the sums, the weights that are guessed, the faults, the losses."""
_BESIDE_PAIRS = 4
"""Numbers beside those of each expert that a mixture sums (parallel/expert/loads.py)."""
_VERDICTS = 2
"""Numbers by which ranks of a model tell one another of tables: a dropped pass, and a refused step."""
_IN_TIERS = 2
"""Numbers of a group of tables with tiers: rows that have no room in memory, and whether the disk has failed."""
_WORD = 16
"""Alignment of the parts of saved tensors along "tp" (tiers/activations.py)."""


class RankExchanges:
    """The exchanges of one rank in one step.

    Args:
        plan: The Plan.
        passed: Measured pass of one microbatch, by stage; empty if passes are not to be counted.
        rank: The rank.
    """

    def __init__(self, plan: Plan, passed: Mapping[int, MeasuredPass], rank: int):
        self._plan = plan
        self._passed = passed
        self._rank = rank
        self._ranks = plan.classes[class_of(plan.mesh, rank)]
        self.microbatches = 1 + max((action.microbatch for action in self._ranks.actions), default=0)
        """Microbatches of a step."""
        is_alone = self.microbatches == 1
        self.of_units: list[UnitExchanges] = [
            unit_exchanges(unit, strategy, plan.mesh, is_alone)
            for unit, strategy in zip(self._ranks.units, self._ranks.strategies, strict=True)
        ]
        """Exchanges of each Unit's gathers and reductions."""

    def of(self, action: Action) -> Calls:
        """Return the calls of one Action."""
        sends = action.kind.row.sends
        return () if sends == "nothing" else CALLS[sends](self, action)

    # Passes ----------------------------------------------------------------------------------------------------

    def _pass(self, action: Action) -> Calls:
        if action.unit < 0 or not self._passed:
            return ()
        unit, stage = self._ranks.units[action.unit], self._ranks.unit_stages[action.unit]
        return self._passed[stage].of(action.kind, unit.name).exchanges

    def _message(self, action: Action) -> Calls:
        if not self._passed or action.kind is not Kind.SEND:
            return ()
        if not action.carries_gradient:
            return self._passed[action.stage].leaves
        found = self._passed[action.other].answered
        if not self._plan.experts:
            return found
        # Behind the gradients goes the factor of the microbatch's loss, by which loss terms of experts are multiplied.
        scale = ExchangeCall("send", "gradients", "pp", 1, _NUMBER)
        wide = [call for call in found if call.itemsize == _NUMBER]
        if not wide:
            return (*found, scale)
        return tuple(call._replace(elements=call.elements + 1) if call is wide[0] else call for call in found)

    def _saved(self, action: Action) -> Calls:
        unit, ranks = self._ranks.units[action.unit], self._plan.mesh.tp
        if not self._passed or ranks == 1:
            return ()
        found: Calls = ()
        for size in self._passed[self._ranks.unit_stages[action.unit]].alike_sizes.get(unit.name, ()):
            whole = -(-size // (_WORD * ranks)) * _WORD * ranks
            found += collective("all_gather", "activations", "tp", whole, 1, ranks)
        return found

    # State -----------------------------------------------------------------------------------------------------

    def _weights(self, action: Action) -> Calls:
        return self.of_units[action.unit].gather

    def _gradients(self, action: Action) -> Calls:
        return self.of_units[action.unit].reduce

    def _arrival(self, action: Action) -> Calls:
        found, strategy = self.of_units[action.unit], self._ranks.strategies[action.unit]
        leaves = strategy.grad_tier != "device" and action.microbatch == self.microbatches - 1
        return (*found.arrive, *found.replicas) if leaves else found.arrive

    @property
    def over_replicas(self) -> Calls:
        """Sums over the replicas of shards that the end of a step begins: those of gradients on the device."""
        pairs = zip(self.of_units, self._ranks.strategies, strict=True)
        return tuple(
            call for found, strategy in pairs if strategy.grad_tier == "device" for call in found.replicas
        )

    def _shared(self, action: Action) -> Calls:
        return (*self.over_replicas, *self._over_sharers)

    @cached_property
    def _over_sharers(self) -> Calls:
        """Sums over the ranks of a model that hold the same elements, and over stages with tied parameters."""
        plan, ranks = self._plan, self._ranks
        slices = TensorSlices(plan.registry, plan.mesh, self._rank)
        held: dict[tuple[int, ...], tuple[int, torch.dtype]] = {}
        ties: dict[str, tuple[int, int]] = {}
        for unit, strategy in zip(ranks.units, ranks.strategies, strict=True):
            inner = unit.axes[1]
            owned = (
                (plan.mesh.index(inner, self._rank), plan.mesh.size(inner))
                if strategy.cuts_master
                else (0, 1)
            )
            for bucket in unit.buckets:
                key = bucket.key
                if not key.trained:
                    continue
                dtype = key.grad_dtype or key.dtype
                for group, parts in slices.shared_ranges(bucket, *owned).items():
                    elements, wide = held.get(group, (0, dtype))
                    elements += sum(stop - start for start, stop in parts)
                    held[group] = elements, torch.promote_types(wide, dtype)
                if key.tie:
                    ties.setdefault(key.tie, (bucket.elements // owned[1], dtype.itemsize))
        found: Calls = ()
        for group, (elements, dtype) in sorted(held.items()):
            found += collective("all_reduce", "gradients", "shared", elements, dtype.itemsize, len(group))
        for name, (elements, itemsize) in sorted(ties.items()):
            among = len(plan.mesh.stage_ranks(self._rank, plan.registry.get("parameter", name).stages))
            found += collective("all_reduce", "gradients", "shared", elements, itemsize, among)
            found += collective("all_reduce", "control", "shared", 1, _NUMBER, among)
        return found

    # The end of a step -----------------------------------------------------------------------------------------

    def _numbers(self, action: Action) -> Calls:
        mesh = self._plan.mesh
        is_summed = any(each.kind is Kind.SUM for each in self._ranks.actions)
        over_dp, over_model = self._numbers_of_followers()
        over_dp += _SUMS + 3 * _HASH + _GUESSES + self._parameters
        over_model += _SUMS + _FAULTS + _LOSSES + _HASH + _FINGERPRINT + _GUESSES
        tables = sum(len(each.tables) for each in self._plan.classes.values())
        compared = 3 * tables if mesh.size("model") > 1 else 0
        return (
            *(() if is_summed else self.over_replicas),
            *(
                collective("all_reduce", "control", "model", compared, _NUMBER, mesh.size("model"))
                if compared
                else ()
            ),
            *collective("all_reduce", "control", "dp", over_dp, _NUMBER, mesh.size("dp")),
            *collective("all_reduce", "control", "model", over_model, _NUMBER, mesh.size("model")),
        )

    @property
    def _parameters(self) -> int:
        """Trained parameters on the rank, for each of which NORM sums whether it was used."""
        return sum(
            len(bucket.slots) for unit in self._ranks.units for bucket in unit.buckets if bucket.key.trained
        )

    def _numbers_of_followers(self) -> tuple[int, int]:
        """Return the numbers that techniques add to NORM, over "dp" and over the model."""
        plan = self._plan
        both = sum(2 * experts + _BESIDE_PAIRS for experts in plan.experts.values()) + plan.monitored
        capped = sum(
            _is_capped(table)
            for unit in self._ranks.tables
            for group in self._loads(unit.index)
            for table in group.tables.tables
        )
        tiered = sum(
            group.tables.tables[0].tiers is not None
            for unit in self._ranks.tables
            for group in self._loads(unit.index)
        )
        delivered = self.microbatches * len(self._ranks.tables)
        has_tables = any(each.tables for each in plan.classes.values())
        compared = has_tables and plan.mesh.size("model") > 1
        over_dp = both + self._watches_edits + delivered + capped + _IN_TIERS * tiered + compared
        return over_dp, both + _VERDICTS * has_tables

    @property
    def _watches_edits(self) -> bool:
        """True if the user may edit weights that masters overwrite."""
        return any(
            bucket.key.trained and not strategy.has_windows and not strategy.is_delayed and has_master
            for unit, strategy in zip(self._ranks.units, self._ranks.strategies, strict=True)
            for place, bucket in enumerate(unit.buckets)
            for has_master in [any(row.kind == "master" for row in self._ranks.buffers[unit.index, place])]
        )

    def _norms(self, action: Action) -> Calls:
        tensors, ranks = len(self._plan.registry.needs("norm")), self._plan.mesh.world_size
        return collective("all_reduce", "control", "world", 2 * tensors, _NUMBER, ranks)

    def _scales(self, action: Action) -> Calls:
        mesh = self._plan.mesh
        buckets = (bucket for unit in self._ranks.units for bucket in unit.buckets)
        scales = sum(len(bucket.slots) for bucket in buckets if bucket.key.gather_dtype is not None)
        found: Calls = ()
        for axis in ("dp_shard", "tp"):
            ranks = mesh.size(axis)
            found += collective("all_gather", "control", axis, scales * ranks, 4, ranks)
        return found

    # Tables ----------------------------------------------------------------------------------------------------

    def _loads(self, unit: int) -> tuple[GroupLoad, ...]:
        """Return the groups of tables of a Unit, with their numbers of keys."""
        passed = self._passed.get(self._ranks.unit_stages[unit])
        return () if passed is None else passed.lookups.get(self._ranks.units[unit].name, ())

    def _of_tables(self, action: Action) -> CollectionCalls:
        mesh = self._plan.mesh
        return calls_of(self._loads(action.unit), mesh.index("dp", self._rank), mesh.size("dp"))

    def _vectors(self, action: Action) -> Calls:
        fetched = self._of_tables(action).fetched
        if self._plan.mesh.pp == 1:
            return fetched
        return keys_of_pass(self._loads(action.unit), self._plan.mesh.size("dp")) + fetched

    def _row_gradients(self, action: Action) -> Calls:
        return self._of_tables(action).delivered * self.microbatches

    def _row_squares(self, action: Action) -> Calls:
        is_table = self._ranks.units[action.unit].has_rows
        return self._of_tables(action).stepped if is_table else ()

    @property
    def before_passes(self) -> Calls:
        """Calls before the first Action of a step: of keys of tables, or of the rows of parts of batches."""
        ranks = self._plan.mesh.pp
        if ranks > 1:  # each forward pass exchanges its own keys
            brings_parts = any(passed.brings_parts for passed in self._passed.values())
            told = 1 + 4 * self.microbatches
            return collective("all_reduce", "control", "pp", told, _NUMBER, ranks) if brings_parts else ()
        units = [unit.index for unit in self._ranks.tables]
        groups = [group for unit in units for group in self._loads(unit)]
        return keys_of_step(groups, self.microbatches, self._plan.mesh.size("dp"))

    def _matrices(self, action: Action) -> Calls:
        plan, ranks = self._plan, self._plan.mesh.ranks("stage", self._rank)
        me = ranks.index(self._rank)
        slices = TensorSlices(plan.registry, plan.mesh, self._rank)
        buckets = [
            (bucket, bucket.shards if strategy.cuts_master else 1)
            for unit, strategy in zip(self._ranks.units, self._ranks.strategies, strict=True)
            for bucket in unit.buckets
            if bucket.key.trained and self._needs_matrices(bucket)
        ]
        found: Calls = ()
        for dtype, _, there, back in dealt_rounds(buckets, slices, ranks):
            for counts in (there, back):
                leaving = [sum(row) - row[rank] for rank, row in enumerate(counts)]
                if any(leaving):
                    found += collective(
                        "all_to_all", "gradients", "stage", leaving[me], dtype.itemsize, len(ranks)
                    )
        return found

    def _needs_matrices(self, bucket: Bucket) -> bool:
        return self._plan.registry.get("master", bucket.slots[0].name).needs == "matrix"


def _is_capped(table: TablePolicy) -> bool:
    """Return whether more rows than a limit are an error: NORM sums the rows of such tables."""
    rule = table.dynamic
    if rule is None or rule.capacity is None and rule.budget_bytes is None:
        return False
    return rule.eviction.type in ("none", "age")


CALLS: Mapping[str, Callable[[RankExchanges, Action], Calls]] = {
    "pass": RankExchanges._pass,
    "message": RankExchanges._message,
    "saved": RankExchanges._saved,
    "weights": RankExchanges._weights,
    "gradients": RankExchanges._gradients,
    "arrival": RankExchanges._arrival,
    "shared gradients": RankExchanges._shared,
    "numbers": RankExchanges._numbers,
    "norms": RankExchanges._norms,
    "scales": RankExchanges._scales,
    "matrices": RankExchanges._matrices,
    "keys": lambda self, action: self.before_passes,
    "vectors": RankExchanges._vectors,
    "row gradients": RankExchanges._row_gradients,
    "squares of rows": RankExchanges._row_squares,
}
"""Functions by the names in the table of Kinds."""


def sent(plan: Plan, passed: Mapping[int, MeasuredPass], rank: int) -> tuple[ExchangeCall, ...]:
    """Return all calls of one rank in one step, equal ones added up.

    Args:
        plan: The Plan.
        passed: Measured pass of one microbatch, by stage.
        rank: The rank.
    """
    exchanges = RankExchanges(plan, passed, rank)
    actions: Iterable[Action] = plan.classes[class_of(plan.mesh, rank)].actions
    return united((*exchanges.before_passes, *(call for action in actions for call in exchanges.of(action))))
