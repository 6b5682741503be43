"""PlacedTables: the tables of one collection on this rank, and the operations of a step on them.

    prepare    finds, counts and exchanges distinct keys   once for a batch; may run ahead, in another thread
    fetch      reads vectors; autograd keeps gradients     once for a batch
    deliver    sends gradients to the owners of the rows   once a step, for all batches of the step
    settle     discards passes without a backward pass     once a step, by numbers that another exchange has summed
    step       merges gradients over ranks and microbatches and updates the rows; ``drop`` if the step is skipped

All of them are collective: every rank calls them in the same order.

Cost: cost.py.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.base.errors import CommError, DataError, TableFullError, TierError, UsageError
from shardwise.base.policy import nearest
from shardwise.base.ragged import Ragged
from shardwise.base.words import named_ranks
from shardwise.comm.collectives import Group
from shardwise.comm.exchange import RowParcel, carry, share
from shardwise.comm.first_text import common_error
from shardwise.kernels.tables.unique import UniqueScratch
from shardwise.kernels.tables.wire import WireName
from shardwise.optim.clip import clip_factor
from shardwise.parallel.embedding.batch import (
    AskedFeatures,
    BatchVectors,
    KeysAtHand,
    PlacedGroup,
    PreparedKeys,
    features_on_host,
    keep_arrived,
)
from shardwise.parallel.embedding.fuse import batch_size, fuse
from shardwise.parallel.embedding.group import TableGroup, group_tables
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.planner import PlacementChoice
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.dynamic import DynamicIndex, is_unlimited
from shardwise.parallel.embedding.rows.keyed_rows import RowTally
from shardwise.parallel.embedding.rows.store import RowStore
from shardwise.parallel.embedding.transfer import SlabRows, together
from shardwise.parallel.embedding.ways import KeyRequest, PreparationLane, way_of

_CPU = torch.device("cpu")
_REFUSED = -1
"""Number of keys that a rank sends if it refused its batch."""
_MANY_PASSES, _MOST_PASSES = 64, 4096
"""Training forward passes without a step after which a user's own loop is warned, and after which it is refused."""


def grouped(
    tables: Sequence[TablePolicy],
    optimizer: RowOptimizerPolicy,
    choices: Sequence[PlacementChoice],
    ranks: int,
) -> list[TableGroup]:
    """Return the groups of tables on ``ranks`` ranks; ``optimizer`` is that of tables without their own."""
    places = {choice.table: choice.place for choice in choices}
    if ranks == 1:
        places = dict.fromkeys(places, TablePlacement("data_parallel"))
    return group_tables(tables, places, optimizer, ranks)


def make_parts(
    tables: Sequence[TablePolicy],
    optimizer: RowOptimizerPolicy,
    choices: Sequence[PlacementChoice],
    group: Group,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    wire: WireName = "fp32",
) -> list[PlacedGroup]:
    """Build the groups of tables on this rank and draw their start rows."""
    unlimited = sum(is_unlimited(table.dynamic) for table in tables)
    return [
        PlacedGroup(
            each, way_of(each, group, dtype, wire), RowStore(each, group, seed, dtype, device, unlimited)
        )
        for each in grouped(tables, optimizer, choices, group.size)
    ]


class PlacedTables:
    """The tables of one collection on this rank, and the operations of a step on them.

    Args:
        parts: the groups of tables.
        group: carries vectors and gradients, and also keys that are not prepared ahead.
        keys_group: carries keys that are prepared ahead.
        device: device of the vectors.
        dtype: dtype of the rows.
        compute_dtype: dtype of the vectors.
        is_led: True if an engine calls ``step``, after any number of forward passes.
    """

    def __init__(
        self,
        parts: Sequence[PlacedGroup],
        group: Group,
        keys_group: Group,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        is_led: bool,
    ):
        self.parts = tuple(parts)
        self.group = group
        self.device = device
        self.dtype = dtype
        self.steps = 0
        """Number of optimizer steps done."""
        self.lr_factors: list[float] = []
        """Factor of the learning rate in each step, recorded only if an optimizer replays steps."""
        self._compute_dtype = compute_dtype
        self._is_led = is_led
        self._here, self._ahead = (
            PreparationLane(group, UniqueScratch()),
            PreparationLane(keys_group, UniqueScratch()),
        )
        self._open: list[PreparedKeys] = []
        """Forward passes whose gradients have not been delivered."""
        self._delivered: list[tuple[PreparedKeys, list[Tensor]]] = []
        """Passes delivered but not settled, with the gradients of each part's rows that came here."""
        self.at_hand: list[KeysAtHand] = []
        """Keys of the microbatches of the running step that were exchanged before its first forward pass."""
        self.on_fetch: Callable[[PreparedKeys, bool], None] | None = None
        """Callback before vectors are fetched, with the batch and whether the pass learns."""

    @property
    def keys_group(self) -> Group:
        """The ranks among which keys are sent ahead."""
        return self._ahead.group

    @property
    def nbytes(self) -> int:
        """Bytes of memory that weights and optimizer state take on this rank so far."""
        return sum(part.store.nbytes for part in self.parts)

    @property
    def static_bytes(self) -> int:
        """Bytes of the static tables without tiers on this rank, which are known before the first batch."""
        parts = [part for part in self.parts if not part.tables.is_dynamic and not part.store.is_tiered]
        return sum(part.store.nbytes for part in parts)

    @property
    def tallies(self) -> dict[str, RowTally]:
        """Rows in use, inserted and evicted, by table. Each row counts on one rank, so that ranks may be summed."""
        return {name: tally for part in self.parts for name, tally in part.store.tallies.items()}

    # A batch -----------------------------------------------------------------------------------------------------

    def prepare(self, features: Mapping[str, Ragged], ahead: bool = False) -> PreparedKeys:
        """Find the distinct keys of a batch and send them to the owners of their rows. Collective.

        No weights are read and no key is inserted.

        Args:
            features: keys of the batch, by feature name.
            ahead: True sends keys over ``keys_group``, and allows a separate thread.

        Raises:
            DataError: on every rank, if the batch of any rank is refused.
        """
        lane = self._ahead if ahead else self._here
        try:
            found = self.ask(features, lane)
        except Exception:
            # The other ranks wait in the exchange of counts: without this message they would hang there.
            with contextlib.suppress(CommError):
                self._numbers([], lane)
            raise
        numbers = self._numbers(found.asked, lane)
        parcels = self.leave(found, numbers)
        name = f"keys of embedding {', '.join(str(part.tables) for part in self.parts)}"
        return self.arrive(found, numbers, carry(parcels, lane.group, name, "keys"), lane)

    def ask(self, features: Mapping[str, Ragged], lane: PreparationLane | None = None) -> AskedFeatures:
        """Find and count the distinct keys of a batch on this rank, without traffic.

        Args:
            features: keys of the batch, by feature name.
            lane: the lane of the calling thread; None is that of the forward pass.

        Raises:
            DataError: if this rank's batch is refused.
        """
        lane = lane or self._here
        samples = batch_size(features)
        asked, weights = [], []
        names = self.feature_names
        features = features_on_host(features, names)
        if not self._is_led:  # an engine checks the results for non-finite numbers and names the batch
            _check_weights(features, names)
        for part in self.parts:
            fused = fuse(part.tables, features, self.dtype)
            weights.append(_live(fused.weights, part))
            if fused.weights is not None:
                fused = fused._replace(weights=fused.weights.detach())
            asked.append(part.way.ask(fused, lane))
            asked[-1].keeps_vectors = weights[-1] is not None
        flat = {
            feature.name: features[feature.name].offsets
            for part in self.parts
            for feature in part.tables.features
            if feature.pooling == "none"
        }
        return AskedFeatures(samples, flat, asked, weights)

    def leave(self, found: AskedFeatures, numbers: Sequence[Tensor]) -> list[RowParcel]:
        """Return the int64 parcels to send for one batch; ``numbers`` are those of ``kinds``, by part."""
        parts = zip(self.parts, found.asked, numbers, strict=True)
        return [parcel for part, each, everyone in parts for parcel in part.way.leave(each, everyone)]

    def arrive(
        self,
        found: AskedFeatures,
        numbers: Sequence[Tensor],
        came: Sequence[Tensor],
        lane: PreparationLane | None = None,
    ) -> PreparedKeys:
        """Store the keys that came for one batch, in the order of ``leave``, and send what the device reads."""
        lane, arrived = lane or self._here, iter(came)
        for part, each, everyone in zip(self.parts, found.asked, numbers, strict=True):
            part.way.arrive(each, [next(arrived) for _ in range(part.way.parcels)], everyone, lane)
        if self.device.type != "cpu":
            self._send(found.asked, found.offsets)
        return PreparedKeys(found.samples, found.offsets, found.asked, weights=found.weights)

    def read_ahead(self, prepared: PreparedKeys, steps: int) -> None:
        """Read rows of a prepared batch from the disk into memory, for tables with tiers; may run in another thread.

        Args:
            prepared: a batch from ``prepare``.
            steps: number of steps after the running one in which the batch is fetched.
        """
        for part, asked in zip(self.parts, prepared.asked, strict=True):
            assert asked.arrived is not None, "keys have been exchanged"
            part.store.read_ahead(asked.arrived, asked.stretches, steps)

    @property
    def feature_names(self) -> list[str]:
        """Names of the features that the tables read."""
        return [feature.name for part in self.parts for feature in part.tables.features]

    @property
    def kinds(self) -> list[int]:
        """Number of counts that leave for each rank, by part."""
        return [part.way.kinds for part in self.parts]

    def exchanged(self, features: Mapping[str, Ragged]) -> PreparedKeys | None:
        """Return the keys of a batch that were exchanged when the step began, None if the tensors are others."""
        for each in self.at_hand:
            if each.is_of(features):
                each.is_taken = True
                return each.prepared
        return None

    def _send(self, asked: Sequence[KeyRequest], flat: dict[str, Tensor]) -> None:
        """Copy everything that the device needs of a batch in one transfer. [Note: host and device, in transfer.py]."""
        away = [
            (part, each)
            for part, each in zip(self.parts, asked, strict=True)
            if part.store.device.type != "cpu"
        ]
        for part, each in away:
            assert each.arrived is not None, "keys have been exchanged"
            rows = part.store.rows(each.arrived, [], learns=False)
            each.rows = SlabRows(rows, rows)
        sent = [tensor for _, each in away for tensor in each.read_by_device()]
        there = iter(together([*sent, *flat.values()], self.device))
        for _, each in away:
            each.take(there)
        flat.update(zip(flat, there, strict=True))

    def _numbers(self, asked: Sequence[KeyRequest], lane: PreparationLane) -> list[Tensor]:
        """Return, for each part, the counts that leave every rank for every rank: int64 [N, N, K].

        ``asked`` is empty if this rank refused its batch; the other ranks then raise DataError.
        """
        group = lane.group
        if group.size == 1:
            return [each.leaving[None] for each in asked]
        kinds = self.kinds
        refused = torch.full((group.size, sum(kinds)), _REFUSED)
        leaving = torch.cat([each.leaving for each in asked], 1) if asked else refused
        everyone = share(leaving, group, "numbers of keys")
        out = [group.ranks[index] for index in (everyone[:, 0, 0] == _REFUSED).nonzero()[:, 0].tolist()]
        if out and asked:
            raise DataError(
                f"embedding: {named_ranks(out)} could not take a part of this batch and said why; the batch was given "
                f"up here, on rank {group.ranks[group.index]}, too"
            )
        return list(everyone.split(kinds, 2))

    def fetch(self, prepared: PreparedKeys, learns: bool) -> list[list[Tensor]]:
        """Return the vectors of each run of each part. Collective.

        Args:
            prepared: a batch from ``prepare``.
            learns: True inserts new keys and keeps gradients for ``deliver``.

        Raises:
            UsageError: if a second training forward pass runs on one prepared batch.
            TierError: on all ranks, if the disk of any rank fails. In a pass of an engine that learns, such a rank goes
                on with zeros, and ``settle`` raises the error.
        """
        if self.on_fetch is not None:
            self.on_fetch(prepared, learns)
        weighs = torch.is_grad_enabled() and any(weights is not None for weights in prepared.weights)
        with torch.no_grad(), self.deferred_faults():
            fetched = [
                part.way.fetch(each, part.store, learns)
                for part, each in zip(self.parts, prepared.asked, strict=True)
            ]
            if self.device.type != "cpu":
                at_host = [output for of_part in fetched for output in of_part if output.device.type == "cpu"]
                came = iter(together(at_host, self.device))
                fetched = [
                    [next(came) if output.device.type == "cpu" else output for output in of_part]
                    for of_part in fetched
                ]
        if not learns or not self._is_led:
            self._raise_faults()
        if not learns and not weighs:
            return [[output.to(self._compute_dtype) for output in of_part] for of_part in fetched]
        if learns:
            if prepared.is_learning:
                raise UsageError(
                    "embedding: a second training forward pass on one prepared batch; prepare it again, or run it "
                    "under torch.no_grad()"
                )
            prepared.is_learning = True
            self._open.append(prepared)
            self._check_steps()
        flat = [output for of_part in fetched for output in of_part]
        anchor = torch.empty(0, dtype=self.dtype, device=self.device, requires_grad=learns)
        outputs = iter(BatchVectors.apply(anchor, self.parts, prepared, learns, *prepared.weights, *flat))
        return [[next(outputs).to(self._compute_dtype) for _ in of_part] for of_part in fetched]

    @contextlib.contextmanager
    def deferred_faults(self) -> Iterator[None]:
        """Keep errors of the disk below the tables in the context, which the caller then tells all ranks."""
        with contextlib.ExitStack() as stack:
            for part in self._tiered:
                stack.enter_context(part.store.faults.deferred())
            yield

    def take_fault(self) -> TierError | None:
        """Return the first error of the disk that was kept, and forget all; None if there is none."""
        found = [error for part in self._tiered if (error := part.store.faults.take()) is not None]
        return found[0] if found else None

    def _raise_faults(self) -> None:
        """Raise the error of the disk that any rank has kept. Collective for tables with tiers."""
        if not self._tiered:
            return
        error = self.take_fault()
        if self._summed([float(error is not None)])[0]:
            raise common_error(error, self.group, _CPU)

    def _check_steps(self) -> None:
        """Warn, and later raise UsageError, if a loop never calls ``step``: it would keep every batch."""
        passes = len(self._open)
        if self._is_led or passes < _MANY_PASSES:
            return
        what = (
            f"embedding: {passes} training forward passes without a step() of the tables, whose rows do not move; call "
            "tables.step() after the optimizer's step, or run passes that are not to learn under torch.no_grad()"
        )
        if passes >= _MOST_PASSES:
            raise UsageError(what)
        if passes == _MANY_PASSES:
            warnings.warn(what, stacklevel=2)

    # The step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def deliver(self) -> None:
        """Send the gradients of all forward passes since the last step to the owners of the rows. Collective.

        Call this method once a step, after the last backward pass. A rank whose loss does not depend on the vectors
        sends zeros. Without a forward pass since the last call nothing happens. ``settle`` follows before the step.
        """
        open_passes, self._open = self._open, []
        keep_arrived(self.parts, open_passes, self.device)
        for number, prepared in enumerate(open_passes):
            for asked in prepared.asked:
                asked.number = number
        on_host = self._delivered_on_host(open_passes)
        for number, prepared in enumerate(open_passes):
            of_pass = [
                part.way.deliver(asked, part.store)
                if (place, number) not in on_host
                else part.way.delivered(asked, on_host[place, number])
                for place, (part, asked) in enumerate(zip(self.parts, prepared.asked, strict=True))
            ]
            self._delivered.append((prepared, of_pass))
            self._add(prepared, of_pass)

    def _delivered_on_host(self, passes: Sequence[PreparedKeys]) -> dict[tuple[int, int], Tensor]:
        """Exchange the gradients of rows on the host beside a device, those of all passes in one message of a kind.

        Each message of the host makes the host wait for the other ranks, which wait for their devices.

        Returns:
            What came, by part and pass.
        """
        places = [
            (place, number)
            for number in range(len(passes))
            for place, part in enumerate(self.parts)
            if part.store.device != self.device
        ]
        if not places or self.group.size == 1:
            return {}
        parcels = [
            self.parts[place].way.gradients(passes[number].asked[place], self.parts[place].store)
            for place, number in places
        ]
        names = ", ".join(str(part.tables) for part in self.parts if part.store.device != self.device)
        came = carry(parcels, self.group, f"gradients of embedding {names}", "gradients")
        return dict(zip(places, came, strict=True))

    def _add(self, prepared: PreparedKeys, gradients: Sequence[Tensor]) -> None:
        for part, asked, of_part in zip(self.parts, prepared.asked, gradients, strict=True):
            assert asked.rows is not None, "rows are known since the vectors were fetched"
            part.store.add(asked.rows.here, of_part)

    @property
    def _capped(self) -> list[tuple[RowStore, DynamicIndex]]:
        """Tables that may exceed their capacity, with their stores."""
        return [(part.store, table) for part in self.parts for table in part.store.capped]

    @property
    def _tiered(self) -> list[PlacedGroup]:
        """Groups of tables of which only some rows are in memory."""
        return [part for part in self.parts if part.tables.tables[0].tiers is not None]

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """The least and the most that each summed number may be: else a pass is let go, or a table is too full."""
        most = [math.inf if table.capacity is None else float(table.capacity) for _, table in self._capped]
        most += [0.0] * 2 * len(self._tiered)
        return [(1.0, math.inf)] * len(self._delivered) + [(0.0, each) for each in most]

    def numbers(self) -> list[float]:
        """Return what the ranks must sum before ``settle``.

        For each delivered pass 1 if its gradients came on this rank, else 0; then the rows after this step of each
        table that may be too full; then for the groups with tiers the rows of this step that have no room in memory,
        and 1 for each whose disk has failed. If the gradients of a pass came on no rank, they are all 0, so
        ``square_sum`` need not wait for ``settle``.

        The rows of this step are brought into memory, so that STEP needs no disk.
        """
        stores = [part.store for part in self._tiered]
        for store in stores:
            store.bring_rows_of_step()
        came = [float(prepared.gradients_came) for prepared, _ in self._delivered]
        rows = [float(table.rows_after(self.steps + 1) * store.is_counted) for store, table in self._capped]
        in_tiers = [store.rows_too_many for store in stores] + [store.faults.is_pending for store in stores]
        return came + rows + [float(number) for number in in_tiers]

    @torch.no_grad()
    def settle(self, sums: Sequence[float]) -> bool:
        """Let go of the passes whose gradients came on no rank, and refuse the step where a table would be too full.

        The loss of such a pass was only looked at: its keys did not come. Where there is one, the rows are counted anew
        in an all-reduce of their own, on all ranks alike.

        Args:
            sums: ``numbers`` summed over the ranks.

        Returns:
            True if a pass was let go.

        Raises:
            TableFullError: on all ranks alike, if a table would have more rows than its capacity and evicts none for
                it. The new keys of the step are forgotten then, and its gradients: rows are those of the step before.
            TierError: on all ranks alike, if the disk of any rank has failed; the rows are as above.
        """
        delivered, self._delivered = self._delivered, []
        kept = [each for each, number in zip(delivered, sums, strict=False) if number]
        rows = list(sums[len(delivered) :])
        is_cut = len(kept) < len(delivered)
        if is_cut:
            for part in self.parts:
                part.store.drop()
            with self.deferred_faults():
                self._take_again([prepared for prepared, _ in kept])
            for prepared, gradients in kept:
                self._add(prepared, gradients)
            rows = self._summed(self.numbers())
        self._check_disk(rows)
        self._check_room(rows)
        return is_cut

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        """Return ``numbers`` summed over the ranks, in an all-reduce of their own."""
        if not numbers or self.group.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        self.group.all_reduce(sums, "passes and rows of tables", "control").wait()
        return sums.tolist()

    def _take_again(self, passes: Sequence[PreparedKeys]) -> None:
        """Insert the keys of ``passes`` into dynamic tables."""
        for prepared in passes:
            for part, asked in zip(self.parts, prepared.asked, strict=True):
                if part.tables.is_dynamic:
                    assert asked.arrived is not None, "keys have been exchanged"
                    rows = part.store.rows(asked.arrived, asked.stretches, learns=True)
                    asked.rows = SlabRows(rows, rows)

    def _check_disk(self, rows: Sequence[float]) -> None:
        """Raise TierError if the disk of any rank has failed; ``rows`` are the sums behind those of the passes."""
        first = len(self._capped) + len(self._tiered)
        if any(rows[first:]):
            error = self.take_fault()
            self.drop()
            raise common_error(error, self.group, _CPU)

    def _check_room(self, rows: Sequence[float]) -> None:
        """Raise TableFullError if a table would have more ``rows`` than its capacity, or a step more than memory."""
        for (_, table), total in zip(self._capped, rows, strict=False):
            if table.capacity is not None and total > table.capacity:
                self.drop()
                raise TableFullError(
                    f"table {table.name!r} would have {total:.0f} rows of at most {table.capacity} after this step, "
                    "and evicts none for that; raise dynamic.capacity (or budget_bytes), admit fewer keys, or set "
                    "dynamic.eviction.type: lru or lfu"
                )
        for part, more in zip(self._tiered, rows[len(self._capped) :], strict=False):
            if more:
                self.drop()
                raise TableFullError(
                    f"embedding {part.tables}: this step has {more:.0f} rows over all ranks that do not fit in the "
                    "memory of the tables' tiers; raise tiers.host_rows (or host), or take smaller batches"
                )

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Return Σ g² over the delivered gradients of the rows that this rank owns, in fp64.

        The sum over the ranks is the sum of squares of all tables.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self.parts:
            own = part.store.square_sum()
            squares = squares + (own if own.device == squares.device else together([own], self.device)[0])
        return squares

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0, divisor: float = 1.0, max_norm: float | None = None) -> None:
        """Update the rows that have received gradients since the last step; see ``EmbeddingCollection.step``."""
        if not self._is_led:
            self.deliver()
            self.settle(self._summed(self.numbers()))
        assert not self._open, "gradients are delivered before the step"
        assert not self._delivered, "passes are settled before the step"
        if max_norm is not None:
            squares = self.square_sum().reshape(1)
            self.group.all_reduce(squares, "the gradient norm of the tables", "control").wait()
            norm = float(squares.sqrt()) / divisor
            divisor = divisor / clip_factor(norm, max_norm)
        self.steps += 1
        if any(part.tables.optimizer.exact for part in self.parts):
            self.lr_factors.append(lr_factor)
        for part in self.parts:
            part.store.step(self.steps, lr_factor, divisor)

    def drop(self) -> None:
        """Discard the gradients and new keys since the last step, and an error of the disk that was kept.

        Rows, scores and keys that wait for admission become those of the step before.
        """
        self._open.clear()
        self._delivered.clear()
        self.take_fault()
        for part in self.parts:
            part.store.drop()

    def close(self) -> None:
        """Remove the rows on disk of tables with tiers, which cannot be read afterwards."""
        for part in self.parts:
            part.store.close()

    def find(self, table: str) -> tuple[PlacedGroup, int]:
        """Return the part that contains a table, and the table's index in the part.

        Raises:
            UsageError: if there is no such table.
        """
        check_table(table, [policy.name for part in self.parts for policy in part.tables.tables])
        return next(
            (part, place)
            for part in self.parts
            for place, policy in enumerate(part.tables.tables)
            if policy.name == table
        )


def check_table(table: str, names: Sequence[str]) -> None:
    """Check that ``table`` is among ``names``.

    Raises:
        UsageError: if ``table`` is not among ``names``.
    """
    if table not in names:
        raise UsageError(f"embedding: there is no table {table!r}{nearest(table, names)}")


def _check_weights(features: Mapping[str, Ragged], names: Sequence[str]) -> None:
    """Raise DataError if a weight of a key is not finite: it would make the row of its key non-finite for good."""
    for name in names:
        weights = features[name].weights if name in features else None
        if weights is None or bool(weights.isfinite().all()):
            continue
        place = int((~weights.isfinite()).nonzero()[0])
        raise DataError(
            f"feature {name!r}: the weight of the key at {place} is {float(weights[place]):g}; expected finite "
            "numbers: leave such keys out, or give them weight 0"
        )


def _live(weights: Tensor | None, part: PlacedGroup) -> Tensor | None:
    """Return the weights of the keys if they require gradients, else None."""
    if weights is None or not weights.requires_grad:
        return None
    if not part.way.sees_rows:
        raise DataError(
            f"embedding: weights of keys of {part.tables} want gradients, and this table exchanges pooled vectors, "
            "from which they do not follow; give it exchange: rows, or detach the weights"
        )
    return weights
