"""Steps prepared before they are computed: the middle stage of three.

    read       threads of the loader        steps t+2, t+3 ...
    keys       one thread                   step t+1: to the device, distinct keys, sent where they are needed
    compute    the caller's thread          step t

    for batches in engine.prefetch(loader):
        engine.train_step(batches)

Only keys go ahead. Whatever depends on weights or changes a table (vectors, new keys' rows, evictions) waits for the
step before, so that every result has the bits of a run that prepares nothing ahead, at any depth and any speed of the
three.

[Note: the order of keys] Ranks must send keys in one order. So the caller's thread gives the jobs, at points that
follow from its own steps alone: handing out step t, it asks for all up to t + depth. One thread runs them in that
order, those of an evaluation between two steps included. None is withdrawn, for where one rank leaves early another may
be in the middle of the same job; a rank that has left says that it has no step. Keys travel over a transport of their
own; a forward pass that finds nothing prepared uses that of the vectors, and so cannot come between.

[Note: ranks that fail] Before each step all ranks say whether they have it, and which collections they will ask for
its keys. Where one has not, because its reader failed or its data ended early, or where they would ask differently, all
stop there; a batch that one rank's tables refuse ends the step on all (embedding/collection.py). What a rank does not
live to say, the transport's deadline says.

Cost: one exchange of four numbers a rank and step, beside the keys. Memory: ``depth`` steps with their keys.
"""

import contextlib
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from shardwise.comm.exchange import share
from shardwise.data.feed import Fetched
from shardwise.data.loader import Loader
from shardwise.engine.inputs import cast_inputs
from shardwise.engine.parts import Parts
from shardwise.observe.lanes_picture import Lanes
from shardwise.parallel.embedding.ahead import Features, Found, Reader, find_features
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.plan.errors import CommError, DataError, UsageError
from shardwise.plan.pytree import tensors_in
from shardwise.plan.words import named_ranks

_log = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""For work in hand, at the end; it is longer only where another rank does not answer."""
_HAS_STEP, _HAS_NONE, _FAILED = 0, 1, 2
_UNKNOWN = -1


class _Step(NamedTuple):
    """A step on its way to the caller."""

    batches: Any
    number: int
    fetched: Fetched | None
    """Where a ``Loader`` counts it."""


class _Word(NamedTuple):
    """What a rank says of its part of a step: numbers."""

    state: int
    asked: int = 0
    """How often a collection will be asked to prepare keys."""
    order: int = 0
    """Which collections, one after another: a checksum."""
    missing: int = _UNKNOWN
    """The first feature that a mapping lacks: its place among those of all collections."""


class Prefetcher(Iterator[Any]):
    """Iterator over steps, each with its keys exchanged; see the module's docstring. Made by ``engine.prefetch``.

    ``close`` (or the end of a ``with`` block) ends it early, and so does whoever else asks the same ``Loader`` for
    steps: its position is that of the step handed out last, as it is all along, and the steps behind are read again.
    """

    def __init__(
        self,
        parts: Parts,
        on_step: list[Callable[..., None]],
        steps: Iterable[Any] | Loader,
        depth: int,
        lanes: Lanes | None = None,
    ):
        if depth < 0:
            raise UsageError(
                f"prefetch: depth is {depth}; give the number of steps to prepare ahead, 0 for none"
            )
        self.depth = depth
        self._parts = parts
        self._on_step = on_step
        self._thread = parts.world.thread("keys")
        self._lanes = lanes
        self._loader = steps if isinstance(steps, Loader) else None
        if self._loader is not None:
            self._loader.lend(self._taken_back)
        self._left = None if self._loader is None else self._loader.steps_left
        self._steps: Iterator[Any] | None = None if isinstance(steps, Loader) else iter(steps)
        self._asked = 0
        self._first = parts.progress.step_count + 1
        self._waiting: deque[Future[_Step | None]] = deque()
        self._has_ended = False
        """Set by whoever reads; nothing is read after it."""
        self._reading = threading.Lock()
        """Held while a step is read."""
        self._is_closed = False
        self._is_taken_back = False
        self._computing: tuple[int, float, float] | None = None
        """Step, when it was asked for, when it was handed out."""
        self._stream: torch.Stream | None = None
        """Of the thread, on an accelerator."""
        if depth and parts.device.type != "cpu":
            self._stream = torch.Stream(parts.device)
        if lanes is not None:
            lanes.depth = depth
            on_step.insert(0, self._computed)

    # The caller's side -----------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._is_taken_back:
            raise UsageError(
                "prefetch: somebody else has asked the loader for steps, or moved its position, since the last step "
                "here; go on with the newer engine.prefetch(loader), or make another"
            )
        if self._is_closed:
            raise StopIteration
        self._computed()
        asked = time.perf_counter()
        try:
            while len(self._waiting) <= self.depth:
                self._waiting.append(self._ask())
            step = self._waiting.popleft().result()
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C: other ranks may have stopped elsewhere, and no job here may ever end
            self._close(0.0)
            raise
        if step is None:
            self.close()
            raise StopIteration
        if self._loader is not None and step.fetched is not None:
            self._loader.count(step.fetched)
        if self._lanes is not None:
            self._computing = (step.number, asked, time.perf_counter())
        if self._stream is not None:
            here = torch.accelerator.current_stream(self._parts.device)
            keep_for(here, tensors_in(step.batches))
        return step.batches

    def close(self) -> None:
        """End it; what was asked for is done first. See [Note: the order of keys]."""
        self._close(_PATIENCE_S)

    def _close(self, patience_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = self._has_ended = True
        end = time.monotonic() + patience_s
        for future in self._waiting:
            with contextlib.suppress(Exception):
                future.result(max(0.0, end - time.monotonic()))
        self._waiting.clear()
        if self._lanes is not None:
            self._computed()
            self._on_step.remove(self._computed)
        if self._loader is not None and self._reading.acquire(timeout=max(0.0, end - time.monotonic())):
            self._reading.release()
            self._loader.close()  # else by the next to ask it: a reader is in the middle of a step

    def _taken_back(self) -> None:
        """The loader's: nothing is read any more."""
        if not self._is_closed:
            self._is_taken_back = True
            self.close()
        if not self._reading.acquire(timeout=_PATIENCE_S):
            raise DataError(
                f"prefetch: a step is still being read {_PATIENCE_S:.0f} s after its end was asked for, so the loader "
                "cannot go on; look at what holds up the reader"
            )
        self._reading.release()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_hasty = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self._close(0.0 if is_hasty else _PATIENCE_S)

    def _computed(self, *_: object) -> None:
        """The step handed out last is over: called after an optimizer step, else when the next one is asked for."""
        if self._computing is not None and self._lanes is not None:
            number, asked, started = self._computing
            self._computing = None
            self._lanes.record("compute", number, started, time.perf_counter(), asked)

    def _ask(self) -> "Future[_Step | None]":
        """Give the job for the next step."""
        number = self._first + self._asked
        self._asked += 1
        reads_apart = self._loader is not None and self._loader.reads_apart
        if self.depth == 0 or not reads_apart:
            # What a user's data draws and holds open belongs to the caller's thread.
            read: Future[_Step | None] = Future()
            try:
                read.set_result(self._read(number))
            except Exception as error:
                read.set_exception(error)
            if self.depth == 0:
                return read
            return self._thread.submit(lambda: self._prepared(read.result))
        return self._thread.submit(lambda: self._prepared(lambda: self._read(number)))

    # The thread's side -----------------------------------------------------------------------------------------

    def _read(self, number: int) -> _Step | None:
        """The next step, None behind the last."""
        with self._reading:
            if self._has_ended:
                return None
            started = time.perf_counter()
            try:
                step = self._next_step(number)
            except Exception:
                self._has_ended = True
                raise
        if step is None:
            self._has_ended = True
        elif self._lanes is not None and (self._loader is None or not self._loader.reads_apart):
            self._lanes.record("read", step.number, started, time.perf_counter())
        return step

    def _next_step(self, number: int) -> _Step | None:
        if self._steps is not None:
            return next((_Step(batches, number, None) for batches in self._steps), None)
        assert self._loader is not None, "either a loader or steps"
        if self._left is not None:
            if self._left == 0:
                return None
            self._left -= 1
        fetched = self._loader.fetch()
        # By position, as readers know the step.
        position = fetched.after.get("position")
        if position is not None:
            number = position // self._loader.share.global_batch
        return _Step(fetched.batches, number, fetched)

    @torch.no_grad()
    def _prepared(self, read: Callable[[], _Step | None]) -> _Step | None:
        """The step with its keys exchanged. Collective: once for every job, whatever happens."""
        try:
            step = read()
            started = time.perf_counter()
            with self._on_stream():
                found = None if step is None else self._find(step.batches)
            stopped = time.perf_counter()
        except Exception:
            self._has_ended = True
            with contextlib.suppress(CommError):
                self._agree(_Word(_FAILED))
            raise
        refusal = self._agree(_Word(_HAS_NONE) if found is None else self._word_of(found))
        if step is None or found is None or refusal:
            self._has_ended = True
            if refusal:
                raise DataError(refusal)
            return None
        resumed = time.perf_counter()  # until then it waited for readers of other ranks
        try:
            with self._on_stream():
                batches = found.prepare()
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException:
            self._has_ended = True
            raise
        if self._lanes is not None:
            self._lanes.record("keys", step.number, started, stopped)
            self._lanes.record("keys", step.number, resumed, time.perf_counter())
        return step._replace(batches=batches)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else self._stream

    def _find(self, batches: Any) -> Found:
        device, dtype = self._parts.device, self._parts.config.precision.compute_dtype

        def cast(features: Features) -> Features:
            found: Features = cast_inputs(features, device, dtype)
            return found

        return find_features(cast_inputs(batches, device, None), self._collections, cast)

    def _word_of(self, found: Found) -> _Word:
        places: dict[Reader, int] = {each: place for place, each in enumerate(self._collections)}
        asked = [places[reader] for each in found.mappings for reader in each.readers]
        missing = self._features.index(found.missing[0]) if found.missing else _UNKNOWN
        return _Word(_HAS_STEP, len(asked), zlib.crc32(bytes(str(asked), "ascii")), missing)

    @property
    def _collections(self) -> list[EmbeddingCollection]:
        return list(self._parts.tables.collections.values())

    @property
    def _features(self) -> list[str]:
        """Of all collections, alike on all ranks."""
        return [name for each in self._collections for name in each.feature_names]

    def _agree(self, word: _Word) -> str:
        """What is wrong where ranks do not all bring a step with the same features, or have not all come to their end;
        "" where nothing is. Collective."""
        if not self._collections or self._collections[0].placed.keys_group.size == 1:
            return ""
        group = self._collections[0].placed.keys_group
        told = share(torch.tensor([word] * group.size), group, "whether there is a step")[:, 0].tolist()
        words = {rank: _Word(*each) for rank, each in zip(group.ranks, told, strict=True)}
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

    def _difference(self, words: Mapping[int, _Word]) -> str:
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


class PrefetcherMaker:
    """Makes the ``Prefetcher`` of one engine."""

    def __init__(self, parts: Parts, on_step: list[Callable[..., None]]) -> None:
        self._parts = parts
        self._on_step = on_step
        self._told_of_depth = False

    def over(self, steps: Iterable[Any] | Loader, depth: int | None, lanes: Lanes | None) -> Prefetcher:
        """See ``Engine.ahead``."""
        depth = self._parts.config.tables.prefetch_steps if depth is None else depth
        return Prefetcher(self._parts, self._on_step, steps, self._depth_here(depth), lanes)

    def _depth_here(self, depth: int) -> int:
        """0 where two threads would drive two NCCL communicators: NCCL wants their work in one order on all ranks."""
        world = self._parts.world
        if depth <= 0 or not self._parts.tables or world.backend != "nccl" or world.size == 1:
            return depth
        if not self._told_of_depth:
            _log.info(
                "keys: 0 steps ahead instead of %d: NCCL wants the messages of keys and of vectors in one order on all "
                "%d accelerators, and has not been measured yet with a thread for each",
                depth,
                world.size,
            )
        self._told_of_depth = True
        return 0


def keep_for(stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Let no tensor's memory be given to the stream that made it while ``stream`` may still read it.

    Tensors on the host, such as all keys of dynamic tables, belong to no stream.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)
