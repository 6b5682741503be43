"""Offloading of state between two steps, so that another model can use the device's memory.

    offload_states     weights, masters and moments -> host memory, or files of this rank; the device's memory is free
    reload_states      back, into new memory, bitwise equal

State is copied bucket by bucket through the tiers' own blocks and files (tiers/tier.py). Device memory is released
only after all ranks have copied all of their state, so if a disk is full, the engine is unchanged. State that
``offload`` keeps on a tier stays on that tier. Tables, buffers and single numbers of the optimizer stay where they are.

Cost: each byte is written once and read once; for a disk, host memory of a few buckets at a time.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shardwise.base.errors import CommError, UsageError
from shardwise.engine.parts import metrics
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import state
from shardwise.observe.memory import give_back_free
from shardwise.optim.flat import FlatOptimizer
from shardwise.parallel.zero.bucket import BucketState
from shardwise.tiers.scratch import DiskScratch
from shardwise.tiers.tier import TierResources, TierState, TierTensor

StateKind = Literal["weights", "masters", "moments"]
AwayTier = Literal["host", "disk"]
_KINDS = {"weight": "weights", "master": "masters"}


class _OffloadedBucket(NamedTuple):
    """A bucket with state to offload, or with offloaded state."""

    bucket: BucketState
    optimizer: FlatOptimizer | None
    held: Mapping[str, Tensor]
    """Weight and master tensors to offload, by kind; empty after they are offloaded."""
    moments: Mapping[str, TierTensor]

    @property
    def kinds(self) -> dict[str, TierTensor]:
        """All state of the bucket that is offloaded, by kind."""
        flat = {kind: TierTensor(tensor.numel(), tensor.dtype) for kind, tensor in self.held.items()}
        return {**flat, **self.moments}


class StateOffload:
    """The offloaded state of one engine."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.kinds: frozenset[str] = frozenset()
        """Kinds of state that are offloaded: some of weights, masters and moments."""
        self.is_averaged = False
        """True while the weights are their moving average (averaging.py)."""
        self._tiers: TierResources | None = None
        self._states: list[tuple[_OffloadedBucket, TierState]] = []

    def check(self, call: str, reads_weights_alone: bool = False) -> None:
        """Raise UsageError if ``call`` needs state that is offloaded, or weights that are an average now.

        Args:
            call: name of the call, for the message.
            reads_weights_alone: True if ``call`` only reads weights, and needs neither masters nor moments.
        """
        if self.is_averaged and not reads_weights_alone:
            raise UsageError(
                f"{call}: inside engine.ema() the weights are their moving average, which may only be read; leave the "
                "context first"
            )
        if self.kinds and (not reads_weights_alone or "weights" in self.kinds):
            raise UsageError(
                f"{call}: engine.offload_states() has moved this engine's {', '.join(sorted(self.kinds))}; call "
                "engine.reload_states() first"
            )

    def leave(self, to: AwayTier, folder: Path | None, include: Collection[StateKind] | None) -> None:
        """Offload state; see ``Engine.offload_states``. Collective."""
        self.check("offload_states")
        wanted = frozenset(get_args(StateKind) if include is None else include)
        folder = self._checked(to, folder, wanted)
        parts = self._parts
        parts.passes.own_use.end()
        for hooks in parts.hooks:
            hooks.recover()
        state.settle(parts, "offload_states")
        state.finish_updates(parts)
        if to == "host" and parts.device.type == "cpu":  # the state is in host memory already
            self.kinds = wanted
            return
        leaving, failure = self._leaving(wanted), None
        try:
            self._copy(leaving, to, folder)
        except Exception as error:
            failure = error
        if metrics.agree(parts, failure is not None):
            self.drop()
            raise failure or CommError(
                "offload_states: another rank could not move its state, and says why; all ranks have theirs as it was"
            )
        leaving.clear()  # else this list would keep the tensors, and their memory would not be released
        self.kinds = wanted
        self._states = [(self._let_go(each), there) for each, there in self._states]
        for bucket in state.buckets(parts):
            bucket.gradient.give_memory_back()
        for bucket in state.buckets(parts) if "weights" in wanted else ():
            bucket.views.forget()
            for slots in bucket.slots:
                slots.empty()
        if parts.site.tiers is not None:
            parts.site.tiers.rest()
        give_back_free(parts.device)

    def _checked(self, to: str, folder: Path | None, wanted: Collection[str]) -> Path | None:
        """Return the folder of the files, None for host memory.

        Raises:
            UsageError: if an argument is wrong, or the engine cannot offload state now.
        """
        parts, found = self._parts, folder or self._parts.config.offload.disk_path
        if to not in get_args(AwayTier):
            raise UsageError(f"offload_states: {to!r} is no place for state; expected host or disk")
        if unknown := [kind for kind in wanted if kind not in get_args(StateKind)]:
            raise UsageError(
                f"offload_states: include: {unknown[0]!r} is none of {', '.join(get_args(StateKind))}"
            )
        if to == "disk" and found is None:
            raise UsageError(
                "offload_states: say the folder of the files: offload_states('disk', folder=...)"
            )
        if parts.accumulation.passes or parts.passes.replay.is_running:
            raise UsageError(
                "offload_states: in the middle of a step, whose gradients would stay; call step() or discard() first"
            )
        if any(bucket.weight.is_summoned for bucket in state.buckets(parts)):
            raise UsageError(
                "offload_states: not inside engine.full_parameters() or engine.gathered(); call it outside of them"
            )
        if parts.config.compile.cuda_graphs:
            raise UsageError(
                "offload_states: with compile.cuda_graphs, whose graphs know where weights lie; leave it out"
            )
        return found if to == "disk" else None

    def _leaving(self, wanted: Collection[str]) -> list[_OffloadedBucket]:
        optimizers = {id(bucket): optimizer for bucket, optimizer in self._parts.trained}
        found = []
        for bucket in state.buckets(self._parts):
            optimizer = optimizers.get(id(bucket))
            held = {kind: flat for kind, flat in bucket.on_device().items() if _KINDS[kind] in wanted}
            moments = {}
            if optimizer is not None and bucket.state_is_here and "moments" in wanted:
                moments = {
                    label: TierTensor(stop, each.dtype) for label, _, stop, each in optimizer.state.moments()
                }
            if held or moments:
                found.append(_OffloadedBucket(bucket, optimizer, held, moments))
        return found

    def _copy(self, leaving: Collection[_OffloadedBucket], to: AwayTier, folder: Path | None) -> None:
        """Copy the state of all buckets to the tier; the originals stay."""
        parts, scratch = self._parts, None
        if folder is not None:
            scratch = DiskScratch(folder, parts.world.rank, parts.world.local_size)
        self._tiers = TierResources(scratch, parts.config.offload.buffers)
        wanted: dict[str, dict[str, int]] = {}
        for each in leaving:
            for kind, there in each.kinds.items():
                wanted.setdefault(kind, {})[each.bucket.what] = there.nbytes
        if scratch is not None:
            scratch.reserve(wanted)
        for each in leaving:
            away = TierState(each.bucket.what, to, each.kinds, self._tiers, parts.device.type != "cpu")
            with torch.no_grad():
                for kind, flat in each.held.items():
                    away.tensors[kind].copy_(flat)
                for label, start, stop, moment in each.optimizer.state.moments() if each.optimizer else ():
                    if label in each.moments:
                        away.tensors[label][start:stop].copy_(moment)
            if to == "disk":
                self._tiers.begin(away.store).result()
            self._states.append((each, away))
        self._tiers.rest()

    def _let_go(self, each: _OffloadedBucket) -> _OffloadedBucket:
        """Release the bucket's device memory, and return the bucket without its tensors."""
        bucket = each.bucket
        bucket.weight.leave(each.held)
        if each.optimizer is not None and bucket.state_is_here:
            assert bucket.weight.master is not None, "a trained bucket has a master"
            nowhere = {
                label: torch.empty(0, dtype=flat.dtype, device=self._parts.device)
                for label, flat in each.moments.items()
            }
            each.optimizer.state.point(bucket.weight.master, nowhere)
        return each._replace(held={})

    def come(self) -> None:
        """Bring the state back; see ``Engine.reload_states``."""
        device = self._parts.device
        for each, there in self._states:
            with there.opened() as tensors:
                here = {kind: flat.to(device, copy=True) for kind, flat in tensors.items()}
            bucket = each.bucket
            bucket.weight.come(here)
            if each.optimizer is not None and bucket.state_is_here:
                assert bucket.weight.master is not None, "a trained bucket has a master"
                each.optimizer.state.point(
                    bucket.weight.master, {label: here[label] for label in each.moments}
                )
        self.drop()

    def drop(self) -> None:
        """Forget the offloaded state and remove its files."""
        self.kinds, self._states = frozenset(), []
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None
