"""Guard: every so many steps the ranks compare the state that has to be equal on them, with the numbers of NORM.

State is equal on several ranks where the registry says so: whole weights on data-parallel ranks, shards on the replicas
of HSDP, norms and shared KV heads on tp, tied weights on several stages, rows of copied embedding tables, and on all
ranks the numbers of the run. With H the digest (memory/digest.py) of all that one set of n ranks holds in common, and p
one of its four pieces of 16 bits, rank i of the set adds to the sum of NORM

    c_i p        c_0 = n - 1, all other c_i = -1        Σ_i c_i p_i = 0 if all p_i are equal

times a factor of the set, so that the errors of two sets do not cancel. The sums run over all ranks of the job and over
all sets at once, are whole numbers, and are exact in float64. They tell all ranks alike that something differs; only
then the ranks exchange the digests of single tensors, through the store, and name the tensor and the ranks.

State that one rank alone holds is compared with itself: its digest after the update of a compared step must be that
before the next update. State with another version, in torch's count, was changed by a call, which is allowed.

State in host memory is read too, after the updates that run beside the next step; state on a disk is not, because its
blocks have checksums. Weights that a user's program can reach are compared between ranks, never with themselves.

Cost: five numbers in an all-reduce that runs anyway; in a compared step one read of the state, twice if ``at_rest``,
and a wait for the updates in host memory.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, DivergedError
from shardwise.engine.parts.followers import BucketSquares, StepFollower
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.parts.sums import Number
from shardwise.memory.digest import digest
from shardwise.observe.guard import GuardPolicy, TensorCopies, differences, say_alarm
from shardwise.optim.flat import FlatOptimizer
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.norm_numbers import GUARD_NUMBERS
from shardwise.plan.slices import TensorSlices
from shardwise.tiers.tier import TierState

_PIECES = (0, 16, 32, 48)
_FACTORS = 4093
"""Number of different factors of sets of ranks; a prime, small enough for sums to stay exact."""


class StateTensor(NamedTuple):
    """One flat tensor of state in memory, with the elements of a bucket from ``first`` on."""

    kind: str
    bucket: BucketState
    first: int
    flat: Tensor
    is_cut: bool
    """True if data-parallel ranks hold different elements of the bucket."""
    is_reachable: bool
    """True if a user's program may change the tensor, whose versions do not tell of it."""
    block: int = 0
    """Elements that share a scale, for moments in 16 or 8 bits; 0 for all other state."""

    @property
    def place(self) -> tuple[str, BucketState, int]:
        """The fields that stay the same when the tensor moves."""
        return self.kind, self.bucket, self.first


class SharedRange(NamedTuple):
    """A range of state that ``holders`` hold alike: elements of the parameter ``name``, as a rule."""

    kind: str
    flat: Tensor
    name: str
    piece_start: int
    """First element in this rank's flattened piece of the parameter."""
    holders: tuple[int, ...]


class GuardedState:
    """All state of one rank that lies on the device or in host memory, and the ranks that hold the same.

    Args:
        buckets: All buckets of the rank, frozen ones included.
        optimizers: Optimizers of the trained buckets.
        slices: The rank's pieces of the registered tensors.
        tables: Returns the rows of embedding tables that several ranks hold, with their names and these ranks.
    """

    def __init__(
        self,
        buckets: Sequence[BucketState],
        optimizers: Mapping[BucketState, FlatOptimizer],
        slices: TensorSlices,
        tables: Callable[[], Iterator[tuple[str, Tensor, tuple[int, ...]]]],
    ):
        self._buckets = buckets
        self._optimizers = optimizers
        self._slices = slices
        self._tables = tables
        self._ranges: dict[
            tuple[BucketState, int, int, bool, int], list[tuple[int, int, str, int, tuple[int, ...]]]
        ] = {}

    def tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors of all buckets: weights, masters that are not weights, and moments."""
        for bucket in self._buckets:
            weight, layout = bucket.weight, bucket.layout
            cuts = bucket.owned_range[1] > 1
            own = bucket.owned_range[0] * bucket.owned_elements
            if not bucket.holds("weight"):
                shard = weight.shard
                is_cut = shard.numel() < layout.elements
                yield StateTensor(
                    "weight", bucket, weight.first, shard.detach(), is_cut, not weight.has_window
                )
            if bucket.state is not None and bucket.state.tier == "host":
                yield from self._in_host_memory(bucket, bucket.state)
            master = weight.master
            if master is not None and not weight.shares_master and not bucket.holds("master"):
                yield StateTensor("master", bucket, own, master.detach(), cuts, False)
            optimizer = self._optimizers.get(bucket)
            if optimizer is None or not bucket.state_is_here:
                continue
            coded = optimizer.state.coded
            if coded is not None:
                for label, stored in coded.tensors.items():
                    yield StateTensor(label, bucket, own, stored.detach(), cuts, False, coded.block)
                continue
            for segment in optimizer.state.segments:
                for label, value in sorted(optimizer.state.of(segment.leaf).items()):
                    if isinstance(value, Tensor) and value.numel() == segment.stop - segment.start > 1:
                        yield StateTensor(
                            label, bucket, own + segment.start, value.detach().view(-1), cuts, False
                        )

    def _in_host_memory(self, bucket: BucketState, state: TierState) -> Iterator[StateTensor]:
        """Yield the tensors of a bucket that lie in host memory, after the last update has ended."""
        bucket.weight.finish_update()
        state.finish_update()
        (index, count), optimizer = bucket.owned_range, self._optimizers.get(bucket)
        coded = None if optimizer is None else optimizer.state.coded
        for kind, flat in state.tensors.items():
            if kind == "grad":
                continue
            if kind == "weight":
                is_cut = flat.numel() < bucket.layout.elements
                yield StateTensor(kind, bucket, bucket.weight.first, flat.detach(), is_cut, False)
                continue
            block = coded.block if coded is not None and kind in coded.tensors else 0
            own = index * bucket.owned_elements
            yield StateTensor(kind, bucket, own, flat.detach(), count > 1, False, block)

    def shared(self) -> Iterator[SharedRange]:
        """Yield the ranges that other ranks hold too."""
        for state in self.tensors():
            bucket = state.bucket
            key = (bucket, state.first, state.flat.numel(), state.is_cut, state.block)
            if key not in self._ranges:
                last = state.first + state.flat.numel()
                found = (
                    self._coded(bucket, state)
                    if state.block
                    else self._found(bucket, state.first, last, state.is_cut)
                )
                self._ranges[key] = [each for each in found if len(each[4]) > 1]
            for start, stop, name, piece, holders in self._ranges[key]:
                yield SharedRange(state.kind, state.flat[start:stop], name, piece, holders)
        for name, rows, holders in self._tables():
            if len(holders) > 1:
                yield SharedRange("rows", rows.detach().view(-1), name, 0, holders)

    def _coded(
        self, bucket: BucketState, state: StateTensor
    ) -> Iterator[tuple[int, int, str, int, tuple[int, ...]]]:
        """Yield the ranges of moments in another form: numbers of elements, and the scales of their blocks.

        The elements of a block share a scale, so a range is compared between ranks that hold all of its blocks.
        """
        size, elements = state.block, bucket.owned_elements
        found = list(self._found(bucket, state.first, state.first + elements, state.is_cut))
        of_blocks: dict[int, set[int]] = {}
        for start, stop, *_, holders in found:
            for block in {start // size, (stop - 1) // size}:
                of_blocks[block] = of_blocks.get(block, set(holders)) & set(holders)
        for start, stop, name, piece, _ in found:
            first, last = start // size, (stop - 1) // size
            common = tuple(sorted(of_blocks[first] & of_blocks[last]))
            yield start, stop, name, piece, common
            if state.flat.numel() > elements:
                yield elements + first, elements + last + 1, f"scales of {name}", piece, common

    def _found(
        self, bucket: BucketState, first: int, last: int, is_cut: bool
    ) -> Iterator[tuple[int, int, str, int, tuple[int, ...]]]:
        """Yield (start, stop, name, first element of the piece, holders) of the ranges of elements [first, last)."""
        for slot in bucket.layout.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.elements)
            if start >= stop:
                continue
            info = self._slices.registry.get("parameter", slot.name)
            held: tuple[int, int, tuple[int, ...]] | None = None
            for run in self._slices.runs(info, start - slot.offset, stop - slot.offset):
                holders = self._slices.holders(info, run, is_cut)
                if held is not None and held[1] == run.local and held[2] == holders:
                    held = held[0], run.local + run.elements, holders
                    continue
                yield from _placed(held, slot.name, slot.offset - first)
                held = run.local, run.local + run.elements, holders
            yield from _placed(held, slot.name, slot.offset - first)


def _placed(
    held: tuple[int, int, tuple[int, ...]] | None, name: str, offset: int
) -> Iterator[tuple[int, int, str, int, tuple[int, ...]]]:
    """Yield a range of a piece as a range of its tensor."""
    if held is not None:
        start, stop, holders = held
        yield start + offset, stop + offset, name, start, holders


class GuardFollower(StepFollower):
    """``guard``: the comparison of state that has to be equal.

    Args:
        policy: Keys under ``guard:``.
        state: The rank's state.
        rank: This rank.
        ranks: All ranks of the job.
        run_numbers: Returns the numbers of the run that are equal on all ranks.
        step: Returns the number of the running step.
        exchange: Function (name, text) that returns the texts of all ranks.
        device: Device of the state.
    """

    name = "guard"

    def __init__(
        self,
        policy: GuardPolicy,
        state: GuardedState,
        rank: int,
        ranks: int,
        run_numbers: Callable[[], Sequence[float]],
        step: Callable[[], int],
        exchange: Callable[[str, str], list[str]],
        device: torch.device,
    ):
        self._policy = policy
        self._state = state
        self._rank = rank
        self._ranks = ranks
        self._run_numbers = run_numbers
        self._step = step
        self._exchange = exchange
        self._device = device
        self._is_first = True
        self._last_good: int | None = None
        self._resting: list[tuple[StateTensor, int, Tensor]] = []
        """State with its version and its digest after the last compared update."""

    @property
    def _is_due(self) -> bool:
        return self._is_first or self._step() % self._policy.every == 0

    def numbers(self, squares: BucketSquares) -> Sequence[Number] | Tensor:
        """Return the sums of this rank, which over all ranks are 0 if nothing differs."""
        if not self._is_due and not self._resting:
            return (0.0,) * GUARD_NUMBERS
        copies = self._copies() if self._is_due else torch.zeros(len(_PIECES), dtype=torch.float64)
        changed = torch.zeros((), dtype=torch.float64, device=self._device)
        for state, before in self._unmoved():
            changed += digest(state.flat) != before
        return torch.cat([copies.to(self._device), changed.view(1)])

    def _unmoved(self) -> Iterator[tuple[StateTensor, Tensor]]:
        """Yield the state at rest that no call has changed or moved since, with its digest of then."""
        if not self._resting:
            return
        now = {state.place: state.flat for state in self._state.tensors()}
        for state, version, before in self._resting:
            flat = now.get(state.place)
            if flat is not None and flat.data_ptr() == state.flat.data_ptr() and flat._version == version:
                yield state, before

    def _copies(self) -> Tensor:
        """Return Σ over sets of ranks of factor · c · (pieces of the digest of what the set has in common)."""
        sets: dict[tuple[int, ...], list[tuple[tuple[str, str, int], Tensor]]] = {}
        for each in self._state.shared():
            sets.setdefault(each.holders, []).append(((each.kind, each.name, each.piece_start), each.flat))
        everyone = tuple(range(self._ranks))
        if self._ranks > 1:
            run = torch.tensor(self._run_numbers(), dtype=torch.float64)
            sets.setdefault(everyone, []).append((("numbers of the run", "", 0), run))
        total = torch.zeros(len(_PIECES), dtype=torch.float64, device=self._device)
        for holders, parts in sorted(sets.items(), key=lambda item: item[0]):
            whole = torch.zeros((), dtype=torch.int64, device=self._device)
            # In an order that all holders have, whatever stage they are.
            for place, (_, part) in enumerate(sorted(parts, key=lambda item: item[0])):
                whole += digest(part).to(self._device) * (2 * place + 1)
            factor = 1 + zlib.crc32(repr(holders).encode()) % _FACTORS
            weight = (len(holders) - 1 if holders[0] == self._rank else -1) * factor
            pieces = torch.stack([whole >> shift & 0xFFFF for shift in _PIECES])
            total += pieces.double() * weight
        return total

    def settle(self, sums: Sequence[float], over_model: Sequence[float] | None) -> None:
        """Raise on all ranks if something differs."""
        totals = sums if over_model is None else over_model
        if any(totals):
            raise self._alarm(bool(totals[-1]))
        if self._is_due:
            self._last_good = self._step() - 1

    def _alarm(self, at_rest: bool) -> DivergedError:
        """Return the error that names the first tensor and its ranks. Collective."""
        mine = [
            TensorCopies(
                each.kind,
                each.name,
                each.piece_start,
                each.piece_start + each.flat.numel(),
                each.holders,
                int(digest(each.flat)),
            )
            for each in self._state.shared()
        ]
        changed = [
            f"{state.kind} of {state.bucket.what}"
            for state, before in self._unmoved()
            if at_rest and bool(digest(state.flat) != before)
        ]
        texts = self._exchange("digests", json.dumps({"copies": mine, "at_rest": changed}))
        told = [json.loads(text) for text in texts]
        tables = [
            [TensorCopies._make([*each[:4], tuple(each[4]), each[5]]) for each in entries["copies"]]
            for entries in told
        ]
        resting = {rank: each["at_rest"] for rank, each in enumerate(told) if each["at_rest"]}
        error = DivergedError(say_alarm(self._step(), self._last_good, differences(tables), resting))
        error.last_good_step = self._last_good
        return error

    def end_step(self, applied: bool) -> None:
        """Note the digests of state at rest after the update of a compared step."""
        is_due, self._is_first = self._is_due, False
        self._resting = []
        if is_due and self._policy.at_rest:
            self._resting = [
                (state, state.flat._version, digest(state.flat))
                for state in self._state.tensors()
                if not state.is_reachable
            ]

    def drop(self) -> None:
        """Compare anew in the next step, because a load or an edit may come before it."""
        self._is_first, self._resting = True, []


def with_guard(parts: EngineParts) -> EngineParts:
    """Return the parts of an engine with its guard; unchanged without ``guard`` in its configuration.

    Raises:
        ConfigError: if nothing would be compared.
    """
    policy, site = parts.config.guard, parts.site
    if policy is None:
        return parts
    if site.world.size == 1 and not policy.at_rest:
        raise ConfigError(
            "guard.at_rest: false on one process, which holds no copy of anything, so nothing would be compared; set "
            "it to true, or leave guard out"
        )

    def run_numbers() -> tuple[float, ...]:
        scale = parts.loss_scale
        return (
            float(parts.progress.step_count),
            float(parts.progress.applied_steps),
            0.0 if scale is None else scale.scale,
        )

    guard = GuardFollower(
        policy,
        GuardedState(
            [bucket for hooks in parts.hooks for state in hooks.states for bucket in state.buckets],
            {bucket: optimizer for bucket, optimizer in parts.trained},
            parts.slices,
            lambda: parts.tables.copies(parts.mesh, site.world.rank),
        ),
        site.world.rank,
        site.world.size,
        run_numbers,
        lambda: parts.progress.step_count + 1,
        parts.folders.exchange,
        site.world.device,
    )
    # First, because others may mend what the guard has to name, such as masters that differ from their weights.
    parts.followers = (guard, *parts.followers)
    return parts
