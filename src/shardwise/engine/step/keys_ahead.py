"""KeysAhead: the exchange of a step's keys in a thread, ahead of the step.

The thread finds the features of a step, agrees with the other ranks on the exchange, and runs the step's INPUT_DISTs;
then the READs of tables with tiers, which bring rows from a disk.

    the step's list     F(0,0) FETCH(t,0) ... F(0,1) FETCH(t,1) ...        the Plan's
    run ahead           INPUT_DIST(t,0) INPUT_DIST(t,1) READ(t,0) READ(t,1)       plan/lists.py: keys_ahead

The list follows the order in force when the caller requested the step, with as many microbatches as the step has. A
separate walker runs it through the handlers of the step's own walker. The Actions that ran are recorded in the trace of
the step that uses the keys (``Trace.ahead``).

[Note: ranks that fail] Before each step all ranks exchange whether they have the step, and which INPUT_DISTs they will
run. If a rank has no step, because its reader failed or its data ended early, or if ranks would run different
INPUT_DISTs, all ranks stop at that step. A batch that one rank's tables refuse ends the step on all ranks
(embedding/collection.py). If a rank dies, the transport's deadline ends the exchange on the others.

Cost: one exchange of four numbers per rank and step, beside the keys.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import CommError, DataError, TierError
from shardwise.base.words import named_ranks
from shardwise.comm.exchange import share
from shardwise.engine.parts.inputs import cast_inputs
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.step.step_source import ReadStep
from shardwise.memory.streams import beside
from shardwise.observe.lanes_picture import LaneRecorder
from shardwise.parallel.embedding.ahead import BatchFeatures, FeatureReader, Features, find_features
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.plan.action import Action, Kind
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.walker import Walker

Asks = Callable[[int], Sequence[Action]]
"""Function that returns the INPUT_DISTs for a number of microbatches (``ActionLists.asks``)."""

_HAS_STEP, _HAS_NONE, _FAILED = 0, 1, 2
_UNKNOWN = -1


class _KeysSummary(NamedTuple):
    """A rank's summary of a step, as numbers that the ranks compare."""

    state: int
    asked: int = 0
    """Number of times that collections will prepare keys."""
    order: int = 0
    """Checksum of the order in which collections prepare keys."""
    missing: int = _UNKNOWN
    """Index, among the features of all collections, of the first feature that a mapping lacks."""


class KeysAhead:
    """Exchanges the keys of steps before the steps are computed.

    Args:
        parts: the parts of the engine.
        lanes: a recorder of what ran when, or None.
        depth: number of steps ahead; 0 if there is no thread.
    """

    def __init__(self, parts: EngineParts, lanes: LaneRecorder | None, depth: int):
        self._parts = parts
        self._lanes = lanes
        sent = self._collections[0].placed.keys_group.traffic if self._collections else None
        handlers = {Kind.INPUT_DIST: self.input_dist, Kind.READ: self.read}
        self._walker = Walker(handlers, Trace(sent, parts.walker.trace.clock))
        self._depth = depth
        self.stream = beside(parts.device) if depth else None
        """Stream of the thread on an accelerator, else None."""

    @torch.no_grad()
    def prepared(self, read: Callable[[], ReadStep | None], asks: Asks) -> ReadStep | None:
        """Return the next step with its keys exchanged, None behind the last step.

        Collective: every rank calls this once for every job, also if an error has occurred.

        Args:
            read: returns the next step, or None behind the last one.
            asks: returns the INPUT_DISTs for a number of microbatches.

        Raises:
            DataError: if not all ranks have a step, or their steps differ in features.
        """
        actions: list[Action] = []
        try:
            step = read()
            started = time.perf_counter()
            with self._on_stream():
                found = None if step is None else self._find(step.batches)
                if found is not None:
                    actions = self._actions(found, asks)
            stopped = time.perf_counter()
        except Exception:
            with contextlib.suppress(CommError):
                self._agree(_KeysSummary(_FAILED))
            raise
        refusal = self._agree(_KeysSummary(_HAS_NONE) if found is None else self._word_of(found, actions))
        if refusal:
            raise DataError(refusal)
        if step is None or found is None:
            return None
        resumed = time.perf_counter()  # since ``stopped``, readers of other ranks were waited for
        with self._on_stream():
            self._walk(found, actions)
        if self.stream is not None:
            self.stream.synchronize()
        for done in self._walker.trace.rows():
            collection = self._parts.program.tables.collection(done.action)
            found.asked(collection, done.action.microbatch).ahead.append(done)
        if self._lanes is not None:
            reads = [done for done in self._walker.trace.rows() if done.action.kind is Kind.READ]
            ended = time.perf_counter()
            # READs follow all INPUT_DISTs.
            read_s = sum(done.stop_s - done.start_s for done in reads)
            self._lanes.record("keys", step.number, started, stopped)
            self._lanes.record("keys", step.number, resumed, ended - read_s)
            if reads:
                self._lanes.record("disk", step.number, ended - read_s, ended)
        return step._replace(batches=found.batch)

    @property
    def trace(self) -> Trace:
        """The trace of the list of INPUT_DISTs and READs."""
        return self._walker.trace

    @recorded
    def input_dist(self, action: Action) -> None:
        """Run INPUT_DIST: send the keys of one microbatch to the owners of their rows."""
        self._parts.program.tables.input_dist(action)

    @recorded
    def read(self, action: Action) -> None:
        """Run READ: read rows of one microbatch from a disk into memory.

        An error of the disk is left to FETCH, which reads what is missing in the caller's thread and tells all ranks.
        """
        with contextlib.suppress(TierError):
            self._parts.program.tables.read(action, self._depth)

    def _walk(self, found: BatchFeatures, actions: Sequence[Action]) -> None:
        units = self._parts.program.tables
        units.at_hand = found
        try:
            self._walker.begin(actions)
            self._walker.run()
        finally:
            units.at_hand = None

    def _actions(self, found: BatchFeatures, asks: Asks) -> list[Action]:
        """Return the step's INPUT_DISTs and READs of the collections whose features were found."""
        asked = {each: len(found.read_by(each)) for each in self._collections}
        collection = self._parts.program.tables.collection
        row = asks(max(asked.values(), default=0))
        return [action for action in row if action.microbatch < asked[collection(action)]]

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else self.stream

    def _find(self, batches: Any) -> BatchFeatures:
        device, dtype = self._parts.device, self._parts.config.precision.compute_dtype

        def cast(features: Features) -> Features:
            found: Features = cast_inputs(features, device, dtype)
            return found

        return find_features(cast_inputs(batches, device, None), self._collections, cast)

    def _word_of(self, found: BatchFeatures, actions: Sequence[Action]) -> _KeysSummary:
        places: dict[FeatureReader, int] = {each: place for place, each in enumerate(self._collections)}
        readers = [[places[reader] for reader in each.readers] for each in found.mappings]
        missing = self._features.index(found.missing[0]) if found.missing else _UNKNOWN
        will_do = " ".join(map(str, (readers, *actions)))
        return _KeysSummary(_HAS_STEP, sum(map(len, readers)), zlib.crc32(will_do.encode()), missing)

    @property
    def _collections(self) -> list[EmbeddingCollection]:
        return list(self._parts.tables.collections.values())

    @property
    def _features(self) -> list[str]:
        """Names of the features of all collections, in an order that is equal on all ranks."""
        return [name for each in self._collections for name in each.feature_names]

    def _agree(self, word: _KeysSummary) -> str:
        """Return why the ranks cannot exchange this step, "" if they can. Collective.

        The ranks must all have a step with the same features, or all be at the end.
        """
        if not self._collections or self._collections[0].placed.keys_group.size == 1:
            return ""
        group = self._collections[0].placed.keys_group
        told = share(torch.tensor([word] * group.size), group, "whether there is a step")[:, 0].tolist()
        words = {rank: _KeysSummary(*each) for rank, each in zip(group.ranks, told, strict=True)}
        failed = [rank for rank, each in words.items() if each.state == _FAILED]
        if failed:
            return f"prefetch: {named_ranks(failed)} could not read a part of a step and said why; all ranks stop at it"
        ended = [rank for rank, each in words.items() if each.state == _HAS_NONE]
        if ended and len(ended) < group.size:
            return (
                f"prefetch: no further step on {named_ranks(ended)}, while the others have one; every rank must bring "
                "the same number of steps, where data runs out with empty batches"
            )
        if len({(each.asked, each.order) for each in words.values()}) == 1:
            return ""
        return "prefetch: ranks differ in the features of a step: " + self._difference(words)

    def _difference(self, words: Mapping[int, _KeysSummary]) -> str:
        most = max(each.asked for each in words.values())
        fewer = {rank: each for rank, each in words.items() if each.asked < most}
        said = [
            f"on rank {rank} {each.asked} of {most} times a collection finds all its features"
            + ("" if each.missing == _UNKNOWN else f", {self._features[each.missing]!r} is missing")
            for rank, each in fewer.items()
        ]
        return (
            "; ".join(said or ["mappings of features follow one another in different orders"])
            + ". Every rank must bring batches of one structure, where a feature has no keys with empty lists "
            "(Ragged.of_lists)"
        )
