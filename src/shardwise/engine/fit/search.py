"""Search: the fastest configurations of a job that fit a memory, over every combination of the knobs.

    points      every combination of the knobs (knobs.py) that the rules of the configuration and the model allow
    shapes      points that have the passes of a microbatch in common; their state knobs differ

Nothing is drawn at random, and the points are looked at in the order of a bound of their time:

    1  a shape's bound comes from passes of other sizes (bound.py), then from its own; the shape with the smallest bound
       goes first
    2  a shape whose bound is not below the third best price ends the search, because no later one can be better
    3  a shape whose kept activations alone exceed the memory is passed over, and so is each shape with a larger
       microbatch and all else equal
    4  the points of a shape are counted with few microbatches, by which a rank holds as much as with many or less, and
       those that fit are priced as the job itself
    5  ranks that share sequences (``mesh.cp``), unless they are freed, are tried if nothing fits without them, because
       a pass of cut attention takes ten times as long to measure
    6  tiles of feed-forward parts, recomputation and moves of state to another tier are tried only for what does not
       fit without them, because they never make a step shorter

Samples of a step, optimizer and precision are the same in all points, unless they are freed; then points are compared
by seconds for each sample.

Cost: a pass on shapes for each shape that is looked at, and a Plan for each point.
"""

import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, MeshError, PlanError, UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.ragged import samples_in
from shardwise.base.words import bytes_text
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.bound import JobBounds, PassWork, ShapeBound, state_key, work_of
from shardwise.engine.fit.fits import ConfigChange, Memory, budget, is_within, on_tiers, seconds_of
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate
from shardwise.engine.fit.jobs import JobShelf
from shardwise.engine.fit.knobs import (
    KNOBS,
    LONG_TOKENS,
    TIER_KNOBS,
    Copies,
    KnobScope,
    RecomputeChoice,
    assignments,
    data_ranks,
    freed,
    knob_of,
    model_ranks,
    overrides_of,
)
from shardwise.engine.parts.inputs import Loss
from shardwise.parallel.pipeline.policy import SPLIT
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Tier
from shardwise.simulate.rates import measured_hardware

_BEST = 3
"""Number of configurations that a search returns."""
_REJECTED = 8
"""Number of configurations that lost narrowly, with reasons."""
_ROUNDS = 2
"""Microbatches for each stage with which a point's memory is counted first."""
_SLICES = 8
"""Most ranks over which tensors are cut if the ranks of a host are not given."""
_ALONE = (
    "mesh={}",
    "batch={}",
    "pipeline.schedule=1f1b",
    "pipeline.virtual_stages=1",
    "zero.reshard_after_forward=true",
)
"""Overrides that put a job on one rank."""


class SearchedPoint(NamedTuple):
    """One configuration that a search looked at."""

    set: tuple[str, ...]
    """Overrides of the configuration, as ``--set`` takes them."""
    ranks: int
    step_s: float | None
    """Seconds of a step; None if it was not priced."""
    peak_bytes: int | None
    """Bytes of the device's memory at the peak of a step; None if they were not counted."""
    reason: str = ""
    """Reason why the configuration lost; empty for those that did not."""

    def plain(self) -> dict[str, Any]:
        """Return the point as values for programs."""
        return {**self._asdict(), "set": list(self.set)}


class SearchReport(NamedTuple):
    """Result of a search."""

    given: RunConfig
    """The configuration without overrides."""
    best: tuple[SearchedPoint, ...]
    """The three fastest configurations that fit, the fastest first; fewer if fewer fit."""
    front: tuple[SearchedPoint, ...]
    """The priced configurations of which no other is better in seconds, bytes and ranks at once, the fastest first."""
    rejected: tuple[SearchedPoint, ...]
    """Configurations that lost narrowly, with reasons."""
    tried: int
    """Number of points that were priced."""
    pruned: int
    """Number of points that were not priced, because rules, memory or a bound of time exclude them."""
    causes: Mapping[str, int]
    """Number of points that were not priced, by cause: rules, memory, time, limit."""
    passes: int
    """Number of passes on shapes that were measured."""

    def config(self, place: int = 0) -> RunConfig:
        """Return the configuration of one of the best.

        Args:
            place: index in ``best``.

        Raises:
            UsageError: if nothing fits.
        """
        if place >= len(self.best):
            raise UsageError(
                f"search: {len(self.best)} configurations fit, and number {place + 1} was asked for"
            )
        return load(self.given, self.best[place].set)

    def write(self, path: str | Path, place: int = 0) -> None:
        """Write the configuration of one of the best as YAML, with every key.

        Args:
            path: the file.
            place: index in ``best``.

        Raises:
            UsageError: if nothing fits.
        """
        Path(path).write_text(self.config(place).to_yaml(), encoding="utf-8")

    def plain(self) -> dict[str, Any]:
        """Return the result as values for programs."""
        return {
            "best": [each.plain() for each in self.best],
            "front": [each.plain() for each in self.front],
            "rejected": [each.plain() for each in self.rejected],
            "tried": self.tried,
            "pruned": self.pruned,
        }

    def lines(self) -> list[str]:
        """Return the result as lines of text for people."""
        said = [f"{self.tried} configurations priced, {self.pruned} excluded: {_counted(self.causes)}"]
        said += [f"  {_point_text(each)}" for each in self.best] or ["  nothing fits"]
        if len(self.front) > 1:
            said += ["no other is better in seconds, bytes and ranks at once:"]
            said += [f"  {_point_text(each)}" for each in self.front]
        said += ["lost:"] * bool(self.rejected)
        return said + [f"  {_point_text(each)}" for each in self.rejected]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def search(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    memory: Memory,
    example: Any,
    *,
    ranks: int | Sequence[int] = 1,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
    free: Collection[str] = (),
    limit_s: float | None = None,
    loss: Loss | None = None,
    knobs: Collection[str] | None = None,
    per_host: int | None = None,
) -> SearchReport:
    """Return the fastest configurations of a job that fit ``memory``.

    All configurations have the numbers of ``config``: samples of a step, optimizer and precision, unless ``free`` names
    them. Their results differ in the rounding of sums.

    Args:
        make: function that builds the model anew each time, on meta or not.
        config: the configuration, as ``initialize`` takes it.
        memory: bytes of one rank by tier, as for ``fits``.
        example: a microbatch, or tensors of its shapes, whose first dim counts samples; or a function from a number of
            samples to such a microbatch.
        ranks: number of ranks of the job, or several numbers to compare.
        device: device of the ranks; None: CPU.
        hardware: rates of a rank; None: measured in this process, in about a second.
        free: keys that may change the numbers of the run: ``batch.global_size``, ``precision``, ``optimizer``,
            ``offload.state``, ``offload.step``. Ranks that share sequences (``mesh.cp``) and their method
            (``context.method``) are tried if they are named. If they are not, and the example has 8,192 tokens or more,
            such ranks are tried with one sample if nothing fits without them, or if a step has fewer samples than
            there are ranks.
        limit_s: seconds after which the search ends with what it has found; None: it ends when nothing can be better.
        loss: the loss function, as ``initialize`` takes it.
        knobs: keys of the knobs that are tried; None: all.
        per_host: ranks of one host, within which tensors are cut; None: all ranks lie on one host, and tensors are cut
            over 8 at most.

    Returns:
        The best configurations, and why others lost.

    Raises:
        ShardwiseError: as ``foresee``.
        ConfigError: if ``memory``, or a key of ``free`` or ``knobs``, is not valid.
        UsageError: if the samples of a step are not known.
    """
    device, given, have = device or torch.device("cpu"), load(config), budget(memory)
    shelf = JobShelf(make, device, example, loss, per_host)
    keys = _searched(free, knobs)
    counts = [ranks] if isinstance(ranks, int) else sorted(set(ranks))
    sizes = batch_of(given, counts, None if callable(example) else samples_in(example))
    hardware = hardware_of(hardware, given, device)
    ends_s = None if limit_s is None else time.monotonic() + limit_s
    run = _Search(shelf, given, have, hardware, keys, ends_s, per_host)
    for count in counts:
        run.add(scope_of(shelf, given, count, have, sizes, per_host, freed(free)))
    run.run()
    return run.report()


def scope_of(
    shelf: JobShelf,
    given: RunConfig,
    ranks: int,
    have: Mapping[Tier, int],
    sizes: tuple[int, int],
    per_host: int | None,
    free: frozenset[str] = frozenset(),
) -> KnobScope:
    """Return the facts from which the values of the knobs follow.

    Args:
        shelf: Maker of jobs.
        given: The configuration.
        ranks: Number of ranks.
        have: Bytes of a rank by tier.
        sizes: Samples of a step and of a microbatch.
        per_host: Ranks of one host; None: all ranks lie on one host.
        free: Keys of the knobs that may change the run's numbers.
    """
    alone = load(given, _ALONE)
    facts = shelf.facts(alone, 1)
    experts = max((layer.experts for layer in facts.spec.experts.values()), default=0)
    names = (table.name for _, _, table in facts.tables.each())
    tokens = shelf.longest_sequence
    if tokens < LONG_TOKENS or not _can_share_sequences(shelf, alone):
        tokens = 0
    return KnobScope(
        given,
        ranks,
        per_host or _SLICES,
        *sizes,
        len(facts.blocks),
        experts,
        bool(facts.tables.everywhere),
        shelf.device.type == "cpu",
        shelf.gives_loss,
        tuple(have),
        -(-ranks // (per_host or ranks)),
        tuple(dict.fromkeys(names)),
        any(layer.capacity is not None for layer in facts.spec.experts.values()),
        free,
        tokens,
    )


def _can_share_sequences(shelf: JobShelf, alone: RunConfig) -> bool:
    """Return True if ranks can share the sequences of the model.

    Args:
        shelf: Maker of jobs.
        alone: The configuration on one rank.
    """
    try:
        attention = shelf.facts(load(alone, ("mesh={cp: 2}",)), 2).spec.attention
    except (ConfigError, PlanError, MeshError):
        return False
    return attention is not None and bool(attention.layers)


def batch_of(given: RunConfig, ranks: Sequence[int], rows: int | None) -> tuple[int, int]:
    """Return the samples of a step over all ranks, and those of a microbatch.

    Raises:
        UsageError: if the configuration and the example do not give them.
    """
    batch = given.batch
    if (
        batch.micro_size is None
        and rows is not None
        and batch.accumulation is None
        and batch.global_size is None
    ):
        batch = batch.model_copy(update={"micro_size": rows})
    try:
        batch = batch.derived(given.mesh.mesh(ranks[0]).size("data"))
    except (MeshError, ConfigError):
        if batch.global_size is None:
            raise
    micro = batch.micro_size or rows
    if micro is None or (batch.global_size is None and batch.accumulation is None):
        raise UsageError(
            "search: the samples of a step are not known; set batch.global_size and batch.micro_size"
        )
    total = batch.global_size
    if total is None:
        total = micro * (batch.accumulation or 1) * given.mesh.mesh(ranks[0]).size("data")
    return total, micro


def hardware_of(hardware: Hardware | None, given: RunConfig, device: torch.device) -> Hardware:
    """Return the hardware by which steps are priced; None: measured in this process."""
    if hardware is not None:
        return hardware
    dtype = given.precision.compute_dtype or torch.float32
    return measured_hardware(device, dtype, given.offload.disk_path)


def _searched(free: Collection[str], knobs: Collection[str] | None) -> frozenset[str]:
    """Return the keys of the knobs that are tried."""
    open_keys = freed(free)
    plain = {knob.key for knob in KNOBS if "numbers" not in knob.changes}
    if knobs is not None:
        plain = {knob_of(key).key for key in knobs}
        if changing := sorted(plain - open_keys - {k.key for k in KNOBS if "numbers" not in k.changes}):
            raise ConfigError(
                f"knobs: {', '.join(changing)} changes the numbers of the run; name it in free too"
            )
    return frozenset(plain | open_keys)


@dataclass
class _Shape:
    """Points that have their passes in common."""

    number: int
    """Place in the order of the table, which decides between equal bounds."""
    scope: KnobScope
    chosen: Mapping[str, Any]
    left: int
    """Number of the shape's points of which nothing is known yet."""
    bound: ShapeBound = ShapeBound(0.0)
    level: Literal["scaled", "whole", "stages"] = "scaled"
    """Pass from which the bound comes: of another size, of the whole model, of the stages."""
    children: "list[_Shape]" = field(default_factory=list)
    """Shapes that differ by further recomputation or tiles."""
    wanted: list[Mapping[str, Any]] | None = None
    """Values of the state knobs that are tried, if the shape is a child: those that did not fit above it."""
    waits: bool = False
    """True if the shape is tried only if nothing fits without it."""
    is_open: bool = False
    """True if the shape's points are looked at."""
    is_passed: bool = False
    """True if the shape is excluded, and its points are tried in its children."""
    is_found: bool = False
    """True if a point of the shape fits."""
    is_small: bool = False
    """True if a point was left out for another reason than memory."""


@dataclass
class _Point:
    """One configuration, which is looked at if its bound is the smallest."""

    shape: _Shape
    state: Mapping[str, Any]
    said: tuple[str, ...]
    held_bytes: int | None = None
    """Bytes that a rank holds at least; None if they and the point's own bound are not computed yet."""


_SCALED = ("batch.global_size", "batch.micro_size", "mesh.pp", "pipeline.schedule", "pipeline.virtual_stages")
"""Keys of the knobs that change the samples of a pass, or the stage, but not the work for a sample."""
_PLAIN: Mapping[str, Any] = {
    "mesh.pp": 1,
    "mesh.tp": 1,
    "mesh.cp": 1,
    "context.method": "auto",
    "mesh.ep": 1,
    "mesh.etp": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.virtual_stages": 1,
    "recompute": RecomputeChoice(),
    "tiles.logits": None,
    "tiles.mlp": "off",
    "experts.rows": None,
}
"""Values with which a pass has the least work for a sample."""


def _key(chosen: Mapping[str, Any], *without: str) -> Hashable:
    return tuple((key, repr(value)) for key, value in sorted(chosen.items()) if key not in without)


def _divides(scope: KnobScope, chosen: Mapping[str, Any]) -> bool:
    """Return True if the ranks and the samples divide evenly."""
    if scope.ranks % model_ranks(chosen):
        return False
    share = data_ranks(scope, chosen) * chosen["batch.micro_size"]
    return bool(chosen["batch.global_size"] % share == 0)


def _waits(shape: _Shape) -> bool:
    """Return True if ranks of the shape share sequences, which is tried if nothing fits otherwise."""
    scope, chosen = shape.scope, shape.chosen
    is_free = "mesh.cp" in scope.freed or scope.global_size < scope.ranks
    return bool(chosen["mesh.cp"] != scope.given.mesh.cp and chosen["mesh.cp"] > 1 and not is_free)


def _parent_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the shape that computes less again, and keeps more."""
    if chosen["tiles.mlp"] == "auto":
        return {**chosen, "tiles.mlp": "off"}
    return {**chosen, "recompute": RecomputeChoice()}


def _microbatches(shape: _Shape) -> int:
    chosen = shape.chosen
    ranks = data_ranks(shape.scope, chosen)
    return int(chosen["batch.global_size"] // ranks // chosen["batch.micro_size"])


class _Search:
    """A search under way."""

    def __init__(
        self,
        shelf: JobShelf,
        given: RunConfig,
        have: Mapping[Tier, int],
        hardware: Hardware,
        keys: frozenset[str],
        ends_s: float | None,
        per_host: int | None,
    ):
        self._shelf = shelf
        self._given = given
        self._have = have
        self._hardware = hardware
        self._keys = keys
        self._ends_s = ends_s
        self._bounds = JobBounds(hardware, shelf.device.type == "cpu", per_host)
        self._shapes: list[_Shape] = []
        self._heap: list[tuple[float, int, _Shape | _Point]] = []
        """Shapes and points that are looked at next, by (bound of the seconds for each sample, number)."""
        self._works: dict[Any, list[tuple[int, PassWork]] | None] = {}
        """Work of measured passes with their samples, by the values that do not scale them; None: refused."""
        self._too_large: dict[Any, int] = {}
        """Smallest microbatch that does not fit, by the rest of the shape."""
        self._priced: list[tuple[float, int, SearchedPoint]] = []
        """Points that fit, with (seconds for each sample, place in the search)."""
        self._lost: list[tuple[float, int, SearchedPoint]] = []
        """Points that do not fit or are refused, with (bound of their seconds, place)."""
        self._causes: Counter[str] = Counter()
        self._numbers = itertools.count()

    # Shapes ----------------------------------------------------------------------------------------------------------

    def add(self, scope: KnobScope) -> None:
        """Add every shape of a job that has no parent, and keep the others with their parents."""
        shapes: dict[Any, _Shape] = {}
        counts: dict[Any, int] = {}
        for chosen in assignments(scope, "shape", {}, self._keys):
            if not _divides(scope, chosen):
                self._causes["rules"] += 1
                continue
            sizes = ("mesh.pp", "mesh.tp", "mesh.cp", "batch.global_size", "batch.micro_size")
            key = tuple(chosen[each] for each in sizes)
            if key not in counts:
                counts[key] = sum(1 for _ in self._states(scope, chosen))
            shapes[_key(chosen)] = _Shape(next(self._numbers), scope, chosen, counts[key])
        self._shapes += shapes.values()
        for shape in shapes.values():
            parent = shapes.get(_key(_parent_of(shape.chosen)))
            shape.waits = _waits(shape)
            if parent is None or parent is shape:
                if shape.waits:
                    continue
                self._push(shape, 0.0 if self._is_late else self._scaled_bound(shape))
            else:
                parent.children.append(shape)
                shape.wanted = []

    def _push(self, shape: _Shape, step_s: float) -> None:
        """Add a shape to those that are looked at, with a bound of its step's seconds."""
        shape.bound = shape.bound._replace(step_s=max(shape.bound.step_s, step_s))
        heapq.heappush(self._heap, (self._per_sample(shape, shape.bound.step_s), shape.number, shape))

    def _states(self, scope: KnobScope, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the values of the state knobs, all state on the device: tiers are tried where a point does not fit."""
        for each in assignments(scope, "state", chosen, self._keys - set(TIER_KNOBS)):
            yield {key: value for key, value in each.items() if key not in chosen}

    def _per_sample(self, shape: _Shape, seconds: float) -> float:
        return seconds * shape.scope.global_size / shape.chosen["batch.global_size"]

    def _mesh(self, shape: _Shape) -> Mesh:
        chosen = shape.chosen
        axes = {key: chosen[f"mesh.{key}"] for key in ("pp", "tp", "cp", "ep", "etp")}
        return Mesh(dp_shard=data_ranks(shape.scope, chosen) * chosen["mesh.cp"], **axes)

    def _scaled_bound(self, shape: _Shape) -> float:
        """Return the largest bound from the passes of other sizes; one sample of the whole model is always known."""
        chosen = shape.chosen
        size, found = chosen["batch.micro_size"], 0.0
        virtual = 2 if chosen["pipeline.schedule"] in SPLIT else chosen["pipeline.virtual_stages"]
        rest = virtual, _microbatches(shape)
        try:
            mesh = self._mesh(shape)
        except MeshError:
            return found  # which the look at the shape's own pass reports
        # Ranks that share sequences compute no tile of attention that nobody sees, and one rank may.
        whole = self._whole_model(shape.scope, chosen) if chosen["mesh.cp"] == 1 else ()
        for rows, work in whole:
            sample = work.scaled(size / rows, chosen["mesh.tp"])._replace(sent=())
            found = max(found, self._bounds.scaled(sample, mesh, *rest))
        for rows, work in self._works.get(_key(chosen, *_SCALED)) or ():
            alike = work.scaled(size / rows)
            if chosen["tiles.mlp"] != "off":  # whose calls grow in number
                alike = alike._replace(sent=())
            found = max(found, self._bounds.scaled(alike, mesh, *rest))
        return found

    def _whole_model(self, scope: KnobScope, chosen: Mapping[str, Any]) -> Sequence[tuple[int, PassWork]]:
        """Return the work of the model on one rank without recomputation and tiles, with its samples."""
        sizes = dict.fromkeys(("batch.micro_size", "batch.global_size"), scope.micro_size)
        alone = {key: value for key, value in {**chosen, **_PLAIN, **sizes}.items() if key in chosen}
        key = _key(alone)
        if key not in self._works:
            try:
                config = load(self._given, self._overrides(scope._replace(ranks=1), alone))
                work = work_of(self._shelf.whole_pass(config, 1), self._hardware, scope.is_cpu)
                self._works[key] = [(scope.micro_size, work)]
            except (ConfigError, PlanError, MeshError, UsageError):
                self._works[key] = None
        return self._works[key] or ()

    def _overrides(self, scope: KnobScope, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        return overrides_of(scope, {"mesh.dp": Copies(1, data_ranks(scope, chosen)), **chosen})

    # Walking ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look at shapes and points, the smallest bound first, until no other can be among the best."""
        cause = self._walk()
        waiting = [shape for shape in self._shapes if shape.waits]
        if waiting and not self._priced and cause != "limit":
            self._leave_rest(cause)
            self._shapes = waiting
            for shape in waiting:
                shape.waits = False
                if shape.wanted is None:
                    self._push(shape, 0.0)
            cause = self._walk()
        self._leave_rest(cause)
        if cause == "limit" and not self._priced:
            self._price_given()

    def _walk(self) -> str:
        """Look at shapes and points, and return the cause for which the rest is left."""
        cause = "time"
        while self._heap:
            bound_s, number, item = heapq.heappop(self._heap)
            is_late = self._is_late
            if is_late or bound_s >= self._worst_s:
                cause = "limit" if is_late else cause
                heapq.heappush(self._heap, (bound_s, number, item))
                break
            if isinstance(item, _Point):
                self._look(item, bound_s, number)
            elif self._is_too_large(item):
                self._pass_over(item, "memory")
            elif item.level == "scaled" and (better_s := self._scaled_bound(item)) > item.bound.step_s:
                self._push(item, better_s)
            elif item.level == "stages":
                self._open(item)
            else:
                self._refine(item)
        return cause

    def _price_given(self) -> None:
        """Price the configuration as it was given, so that a search without time has an answer if that one fits."""
        for scope in {shape.scope.ranks: shape.scope for shape in self._shapes}.values():
            given = _Shape(next(self._numbers), scope, {"batch.global_size": scope.global_size}, 0)
            said = () if self._given.batch.micro_size else (f"batch.micro_size={scope.micro_size}",)
            with contextlib.suppress(ConfigError, PlanError, MeshError):
                self._price(given, said, self._shelf.job(load(self._given, said), scope.ranks), None)

    @property
    def _is_late(self) -> bool:
        """True if the seconds that the search may take are over."""
        return self._ends_s is not None and time.monotonic() > self._ends_s

    @property
    def _worst_s(self) -> float:
        """Seconds for each sample of the third best point."""
        return self._priced[_BEST - 1][0] if len(self._priced) >= _BEST else float("inf")

    def _leave_rest(self, cause: str) -> None:
        """Count what is left as excluded, and note what was nearest to being looked at."""
        for bound_s, _, item in sorted(self._heap, key=lambda each: each[:2])[:_REJECTED]:
            shape, said = (item.shape, item.said) if isinstance(item, _Point) else (item, None)
            if cause == "time":
                self._lose(shape, None, f"takes {bound_s:.3g} s at least", said, bound_s)
        self._heap.clear()
        self._causes[cause] += sum(shape.left for shape in self._shapes if not shape.waits)

    def _refine(self, shape: _Shape) -> None:
        """Replace the bound of a shape by one from its own passes."""
        chosen, scope = shape.chosen, shape.scope
        try:
            config = load(self._given, self._overrides(scope, chosen))
            if shape.level == "scaled":
                passed = self._shelf.whole_pass(config, scope.ranks)
                work = work_of(passed, self._hardware, scope.is_cpu)
                works = self._works.setdefault(_key(chosen, *_SCALED), [])
                if works is not None:
                    works.append((chosen["batch.micro_size"], work))
                if chosen["mesh.pp"] > 1:
                    bound = self._bounds.whole(passed, self._shelf.facts(config, scope.ranks))
                    shape.level = "whole"
                else:
                    bound = self._bounds.stages(self._shelf.job(config, scope.ranks))
                    shape.level = "stages"
            else:
                bound = self._bounds.stages(self._shelf.job(config, scope.ranks))
                shape.level = "stages"
        except (ConfigError, PlanError, MeshError) as error:
            self._lose(shape, None, str(error))
            self._pass_over(shape, "rules")
            return
        shape.bound = bound._replace(step_s=max(shape.bound.step_s, bound.step_s))
        if max(bound.kept) > self._have["device"] and not self._moves_activations(shape):
            self._remember_size(shape)
            self._lose(shape, None, f"keeps more activations than {bytes_text(self._have['device'])}")
            self._pass_over(shape, "memory")
            return
        self._push(shape, bound.step_s)

    def _moves_activations(self, shape: _Shape) -> bool:
        """Return True if activations may move to the host, so that kept ones do not exclude a point."""
        return "offload.activations" in self._keys and "host" in self._have and not shape.scope.is_cpu

    def _moves_state(self, shape: _Shape) -> bool:
        """Return True if state may move to another tier, so that its size does not exclude a point."""
        tiers = {tier for tier in self._have if tier == "disk" or not shape.scope.is_cpu} - {"device"}
        return bool(tiers and self._keys & set(TIER_KNOBS))

    def _pass_over(self, shape: _Shape, cause: str) -> None:
        """Exclude all points of a shape that are not known; those of its children are tried."""
        self._causes[cause] += shape.left
        states = self._states(shape.scope, shape.chosen) if shape.wanted is None else shape.wanted
        for state in list(states):
            self._want(shape, state)
        shape.left, shape.is_passed = 0, True

    def _rest(self, shape: _Shape) -> Any:
        """Return a key that shapes share which differ in the size of the microbatch alone."""
        return shape.scope.ranks, _key(shape.chosen, "batch.micro_size")

    def _remember_size(self, shape: _Shape) -> None:
        if shape.wanted is None:  # all states were tried
            key, size = self._rest(shape), shape.chosen["batch.micro_size"]
            self._too_large[key] = min(size, self._too_large.get(key, size))

    def _is_too_large(self, shape: _Shape) -> bool:
        return shape.chosen["batch.micro_size"] >= self._too_large.get(self._rest(shape), 1 << 62)

    # Points ----------------------------------------------------------------------------------------------------------

    def _open(self, shape: _Shape) -> None:
        """Add the points of a shape to those that are looked at; of a child, those that did not fit above it."""
        shape.is_open = True
        for state in self._states(shape.scope, shape.chosen) if shape.wanted is None else shape.wanted:
            self._push_point(shape, state)

    def _push_point(self, shape: _Shape, state: Mapping[str, Any]) -> None:
        said = self._overrides(shape.scope, {**shape.chosen, **state})
        point = _Point(shape, state, said)
        bound_s = self._per_sample(shape, shape.bound.step_s)
        heapq.heappush(self._heap, (bound_s, next(self._numbers), point))

    def _want(self, shape: _Shape, state: Mapping[str, Any]) -> None:
        """Try the children of a shape, which keep less, with values of the state knobs that did not fit in it."""
        for child in shape.children:
            assert child.wanted is not None, "it is a child"
            is_new = not child.wanted
            child.wanted.append(state)
            if child.is_open:
                self._push_point(child, state)
            elif child.is_passed:
                self._want(child, state)
            elif is_new:
                self._push(child, max(self._scaled_bound(child), shape.bound.step_s))

    def _look(self, point: _Point, bound_s: float, number: int) -> None:
        """Compute a point's own bound, or price the point if it fits."""
        shape = point.shape
        needs: int | None
        try:
            config = load(self._given, point.said)
            if point.held_bytes is None:
                own_s = self._bound_point(point, config)
                if own_s > bound_s:
                    heapq.heappush(self._heap, (own_s, number, point))
                    return
            assert point.held_bytes is not None, "its bound is computed"
            job = self._shelf.job(config, shape.scope.ranks)
            if point.held_bytes > self._have["device"] and not self._moves_state(shape):
                self._causes["memory"] += 1
                needs, is_moved = point.held_bytes, True
            else:
                needs, is_moved = self._try_point(shape, point.said, job)
        except (ConfigError, PlanError, MeshError) as error:
            self._causes["rules"] += 1
            self._lose(shape, None, str(error), point.said)
            needs, is_moved, shape.is_small = None, True, True
        else:
            shape.is_found |= needs is None
        shape.left -= 1
        if needs is not None:
            self._lose(shape, needs, f"more than {bytes_text(self._have['device'])}", point.said)
        if is_moved:
            self._want(shape, point.state)
        if not shape.left and not shape.is_found and not shape.is_small:
            self._remember_size(shape)

    def _bound_point(self, point: _Point, config: RunConfig) -> float:
        """Return the bound of the seconds for each sample, and note the bytes that the point holds at least."""
        shape, ranks = point.shape, point.shape.scope.ranks
        if shape.scope.has_tables:
            job = self._shelf.job(config, ranks)
            key: Hashable = point.said
        else:
            job = self._shelf.facts(config, ranks)
            key = state_key(config, ranks, job.mesh)
        found = self._bounds.point(job, shape.bound, key)
        point.held_bytes = found.held_bytes
        return self._per_sample(shape, found.step_s)

    def _try_point(self, shape: _Shape, said: tuple[str, ...], job: JobFacts) -> tuple[int | None, bool]:
        """Price a point if it fits, with state on another tier if need be.

        Returns:
            The bytes of the device that the point needs, or None if it fits; True if it does not fit without moves.
        """
        few = _ROUNDS * job.mesh.pp * job.settings.pipeline.stages_per_rank
        count = job.policies.microbatches
        short = job if count <= few else job._replace(policies=job.policies._replace(microbatches=few))
        outlook = short.outlook(job.settings.offload, only_counted=True)
        if is_within(outlook, self._have):
            return self._price(shape, said, job, outlook if short is job else None), False
        least = outlook.bytes_by_tier["device"]
        fits_on_tier = False
        for words in self._moves(shape, short) if self._moves_state(shape) else ():
            try:
                moved = self._shelf.job(load(self._given, (*said, *words)), shape.scope.ranks)
                needs = self._price(shape, (*said, *words), moved, None)
            except (ConfigError, PlanError):
                continue  # such as delayed updates of a part of the Units
            fits_on_tier |= needs is None
            least = least if needs is None else min(least, needs)
        if fits_on_tier:
            return None, True
        self._causes["memory"] += 1
        return least, True

    def _moves(self, shape: _Shape, short: JobFacts) -> list[tuple[str, ...]]:
        """Return overrides that move state or activations to other tiers, each with the smallest fraction that fits."""
        process = self._shelf.process_bytes(False), self._shelf.process_bytes("disk" in self._have)
        allowed = self._keys & set(TIER_KNOBS)
        found = []
        for change in on_tiers(short, (), self._have, self._hardware, 0.0, process):
            if self._is_late:
                break
            keys = {text.partition("=")[0] for text in change.overrides} - {"offload.disk_path"}
            if change.overrides and keys <= allowed and is_within(change.outlook, self._have):
                found += [(*change.overrides, *words) for words in self._step_times(shape, change)]
        return found

    def _step_times(self, shape: _Shape, change: ConfigChange) -> list[tuple[str, ...]]:
        """Return overrides of the time at which updates on another tier end, the configured time first."""
        moved = next(
            (text.partition("=")[2] for text in change.overrides if text.startswith("offload.optimizer=")), ""
        )
        if not moved or "offload.step" not in self._keys:
            return [()]
        knob = knob_of("offload.step")
        values = knob.values(shape.scope, {"offload.optimizer": moved})
        return [knob.overrides(shape.scope, {"offload.step": value}) for value in values]

    def _price(
        self, shape: _Shape, said: tuple[str, ...], job: JobFacts, outlook: MemoryEstimate | None
    ) -> int | None:
        """Price a point; return the bytes that it needs if it does not fit with all of its microbatches."""
        offload = job.settings.offload
        outlook = outlook or job.outlook(offload, only_counted=True)
        peak = outlook.bytes_by_tier["device"]
        if not is_within(outlook, self._have):
            self._causes["memory"] += 1
            return peak
        step_s = seconds_of(job, outlook, offload, self._hardware).total
        self._causes["priced"] += 1
        point = SearchedPoint(said, shape.scope.ranks, step_s, peak)
        if any(point[1:] == other[1:] for _, _, other in self._priced):
            return None  # a key without effect on this job
        self._priced.append((self._per_sample(shape, step_s), next(self._numbers), point))
        self._priced.sort(key=lambda each: each[:2])
        return None

    def _lose(
        self,
        shape: _Shape,
        peak: int | None,
        reason: str,
        said: tuple[str, ...] | None = None,
        bound_s: float | None = None,
    ) -> None:
        said = self._overrides(shape.scope, shape.chosen) if said is None else said
        point = SearchedPoint(said, shape.scope.ranks, None, peak, reason)
        bound_s = self._per_sample(shape, shape.bound.step_s) if bound_s is None else bound_s
        self._lost.append((bound_s, next(self._numbers), point))

    # Result ----------------------------------------------------------------------------------------------------------

    def report(self) -> SearchReport:
        """Return the result."""
        best = tuple(point for _, _, point in self._priced[:_BEST])
        slower = [
            (each_s, number, point._replace(reason=f"takes {each_s / self._priced[0][0]:.3g} x the best"))
            for each_s, number, point in self._priced[_BEST : _BEST + _REJECTED // 2]
        ]
        lost = sorted(self._lost, key=lambda each: each[:2])
        rejected: list[SearchedPoint] = []
        reasons = Counter[str]()
        for _, _, point in (*slower, *lost):
            reasons[point.reason] += 1
            if reasons[point.reason] == 1 and len(rejected) < _REJECTED:
                rejected.append(point)
        tried = self._causes.pop("priced", 0)
        causes = {cause: count for cause, count in sorted(self._causes.items()) if count}
        front = _front([point for _, _, point in self._priced])
        return SearchReport(
            self._given,
            best,
            front,
            tuple(rejected),
            tried,
            sum(causes.values()),
            causes,
            self._shelf.passes,
        )


def _front(points: Sequence[SearchedPoint]) -> tuple[SearchedPoint, ...]:
    """Return the points, in their order, of which no earlier one is at least as good in every figure."""
    found: list[SearchedPoint] = []
    for point in points:
        if not any(_is_as_good(other, point) for other in found):
            found.append(point)
    return tuple(found)


def _is_as_good(one: SearchedPoint, other: SearchedPoint) -> bool:
    assert one.step_s and other.step_s and one.peak_bytes and other.peak_bytes, "priced"
    return one.step_s <= other.step_s and one.peak_bytes <= other.peak_bytes and one.ranks <= other.ranks


def _point_text(point: SearchedPoint) -> str:
    words = " ".join(f"--set {each}" for each in point.set) or "as it is"
    said = [] if point.step_s is None else [f"{point.step_s:.3g} s a step"]
    said += [] if point.peak_bytes is None else [bytes_text(point.peak_bytes)]
    said += [point.reason] if point.reason else []
    return f"{words}: {', '.join(said)}"


def _counted(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} by {cause}" for cause, count in causes.items()) or "none"
