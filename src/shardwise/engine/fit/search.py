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
    5  tiles of feed-forward parts, recomputation and moves of state to another tier are tried only for what does not
       fit without them, because they never make a step shorter

Samples of a step, optimizer and precision are the same in all points, unless they are freed; then points are compared
by seconds for each sample.

Cost: a pass on shapes for each shape that is looked at, and a Plan for each point.
"""

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
from shardwise.base.words import bytes_text
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.bound import PassWork, work_of
from shardwise.engine.fit.fits import Memory, budget, is_within, on_tiers, seconds_of
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate
from shardwise.engine.fit.jobs import JobShelf, rows_of
from shardwise.engine.fit.knobs import (
    KNOBS,
    TIER_KNOBS,
    Copies,
    KnobScope,
    RecomputeChoice,
    assignments,
    data_ranks,
    freed,
    knob_of,
    overrides_of,
)
from shardwise.engine.parts.inputs import Loss
from shardwise.plan.action import Kind
from shardwise.plan.placement import Tier
from shardwise.simulate.bound import pipeline_bound, stage_seconds
from shardwise.simulate.rates import measured_hardware

_BEST = 3
"""Number of configurations that a search returns."""
_REJECTED = 8
"""Number of configurations that lost narrowly, with reasons."""
_ROUNDS = 2
"""Microbatches for each stage with which a point's memory is counted first."""
_ALONE = (
    "mesh={}",
    "batch={}",
    "pipeline.schedule=1f1b",
    "pipeline.virtual_stages=1",
    "zero.reshard_after_forward=true",
)
"""Overrides that put a job on one rank."""
_SHARE_OF_KEPT = 0.9
"""Share of the even part of the kept activations that the heaviest stage holds at least."""


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
            ``offload.state``.
        limit_s: seconds after which the search ends with what it has found; None: it ends when nothing can be better.
        loss: the loss function, as ``initialize`` takes it.
        knobs: keys of the knobs that are tried; None: all.
        per_host: ranks of one host, within which tensors are cut; None: 8.

    Returns:
        The best configurations, and why others lost.

    Raises:
        ShardwiseError: as ``foresee``.
        ConfigError: if ``memory``, or a key of ``free`` or ``knobs``, is not valid.
        UsageError: if the samples of a step are not known.
    """
    device, given, have = device or torch.device("cpu"), load(config), budget(memory)
    shelf = JobShelf(make, device, example, loss)
    keys = _searched(free, knobs)
    counts = [ranks] if isinstance(ranks, int) else sorted(set(ranks))
    sizes = batch_of(given, counts, None if callable(example) else rows_of(example))
    hardware = hardware_of(hardware, given, device)
    ends_s = None if limit_s is None else time.monotonic() + limit_s
    run = _Search(shelf, given, have, hardware, keys, ends_s)
    for count in counts:
        run.add(scope_of(shelf, given, count, have, sizes, per_host or 8))
    run.run()
    return run.report()


def scope_of(
    shelf: JobShelf,
    given: RunConfig,
    ranks: int,
    have: Mapping[Tier, int],
    sizes: tuple[int, int],
    per_host: int,
) -> KnobScope:
    """Return the facts from which the values of the knobs follow.

    Args:
        shelf: Maker of jobs.
        given: The configuration.
        ranks: Number of ranks.
        have: Bytes of a rank by tier.
        sizes: Samples of a step and of a microbatch.
        per_host: Ranks of one host.
    """
    alone = load(given, _ALONE)
    facts = shelf.facts(alone, 1)
    experts = max((layer.experts for layer in facts.spec.experts.values()), default=0)
    return KnobScope(
        given,
        ranks,
        per_host,
        *sizes,
        len(facts.blocks),
        experts,
        bool(facts.tables.everywhere),
        shelf.device.type == "cpu",
        shelf.gives_loss,
        tuple(have),
    )


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
        batch = batch.derived(given.mesh.mesh(ranks[0]).size("dp"))
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
        total = micro * (batch.accumulation or 1) * given.mesh.mesh(ranks[0]).size("dp")
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


@dataclass(order=True)
class _Shape:
    """Points that have their passes in common, ordered by the bound of their time."""

    bound_s: float
    """Seconds that a step takes at least, for each sample of the configured step."""
    number: int
    """Place in the order of the table, which decides between equal bounds."""
    scope: KnobScope = field(compare=False)
    chosen: Mapping[str, Any] = field(compare=False)
    points: int = field(compare=False)
    """Number of the shape's points."""
    level: Literal["scaled", "whole", "stages"] = field(default="scaled", compare=False)
    """Pass from which the bound comes: of another size, of the whole model, of the stages."""
    children: "list[_Shape]" = field(default_factory=list, compare=False)
    """Shapes that differ by further recomputation or tiles."""

    @property
    def all_points(self) -> int:
        """Number of points of the shape and of all below it."""
        return self.points + sum(child.all_points for child in self.children)


_SCALED = ("batch.global_size", "batch.micro_size", "mesh.pp", "pipeline.schedule", "pipeline.virtual_stages")
"""Keys of the knobs that change the samples of a pass, or the stage, but not the work for a sample."""
_PLAIN: Mapping[str, Any] = {
    "mesh.pp": 1,
    "mesh.tp": 1,
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
    if scope.ranks % (chosen["mesh.pp"] * chosen["mesh.tp"]):
        return False
    share = data_ranks(scope, chosen) * chosen["batch.micro_size"]
    return bool(chosen["batch.global_size"] % share == 0)


def _parent_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the shape that computes less again, and keeps more."""
    if chosen["tiles.mlp"] == "auto":
        return {**chosen, "tiles.mlp": "off"}
    return {**chosen, "recompute": RecomputeChoice()}


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
    ):
        self._shelf = shelf
        self._given = given
        self._have = have
        self._hardware = hardware
        self._keys = keys
        self._ends_s = ends_s
        self._shapes: list[_Shape] = []
        self._whole: dict[Any, PassWork | None] = {}
        """Work of one sample of the whole model on one rank, by dtype; None if such a pass is refused."""
        self._works: dict[Any, list[tuple[int, PassWork]]] = {}
        """Work of measured passes with their samples, by the values that do not scale them."""
        self._too_large: dict[Any, int] = {}
        """Smallest microbatch that does not fit, by the rest of the shape."""
        self._priced: list[tuple[float, int, SearchedPoint]] = []
        """Points that fit, with (seconds for each sample, place in the search)."""
        self._lost: list[tuple[float, int, SearchedPoint]] = []
        """Points that do not fit or are refused, with (bound of their seconds, place)."""
        self._counts: dict[Any, int] = {}
        self._causes: Counter[str] = Counter()
        self._numbers = itertools.count()

    # Shapes ----------------------------------------------------------------------------------------------------------

    def add(self, scope: KnobScope) -> None:
        """Add every shape of a job that has no parent, and keep the others with their parents."""
        shapes: dict[Any, _Shape] = {}
        for chosen in assignments(scope, "shape", {}, self._keys):
            if _divides(scope, chosen):
                points = self._count(scope, chosen)
                shapes[_key(chosen)] = _Shape(0.0, next(self._numbers), scope, chosen, points)
            else:
                self._causes["rules"] += 1
        for shape in shapes.values():
            parent = shapes.get(_key(_parent_of(shape.chosen)))
            if parent is None or parent is shape:
                self._push(shape)
            else:
                parent.children.append(shape)

    def _push(self, shape: _Shape) -> None:
        """Add a shape to those that are looked at, with the bound that is known."""
        if shape.level == "scaled":
            shape.bound_s = max(shape.bound_s, self._scaled_bound(shape))
        heapq.heappush(self._shapes, shape)

    def _leave(self, shape: _Shape, is_needed: bool) -> None:
        """End the look at a shape; its children are needed if a point of it did not fit or is not possible."""
        for child in shape.children:
            if is_needed:
                self._push(child)
            else:
                self._causes["time"] += child.all_points

    def _states(self, scope: KnobScope, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the values of the state knobs, all state on the device: tiers are tried where a point does not fit."""
        yield from assignments(scope, "state", chosen, self._keys - set(TIER_KNOBS))

    def _count(self, scope: KnobScope, chosen: Mapping[str, Any]) -> int:
        """Return the number of points of a shape, which follows from its ranks and samples."""
        sizes = (chosen[key] for key in ("mesh.pp", "mesh.tp", "batch.global_size", "batch.micro_size"))
        key = scope.ranks, *sizes
        if key not in self._counts:
            self._counts[key] = sum(1 for _ in self._states(scope, chosen))
        return self._counts[key]

    def _microbatches(self, shape: _Shape) -> int:
        chosen = shape.chosen
        return chosen["batch.global_size"] // data_ranks(shape.scope, chosen) // chosen["batch.micro_size"]

    def _per_sample(self, seconds: float, chosen: Mapping[str, Any], scope: KnobScope) -> float:
        return seconds * scope.global_size / chosen["batch.global_size"]

    def _even_bound(self, shape: _Shape, work: PassWork) -> float:
        """Return the bound if the work of a microbatch is dealt evenly to the stages."""
        chosen, pp = shape.chosen, shape.chosen["mesh.pp"]
        stages = pp * chosen["pipeline.virtual_stages"]
        each_s = work.seconds / stages
        bound_s = pipeline_bound([each_s] * stages, pp, self._microbatches(shape))
        return self._per_sample(bound_s, chosen, shape.scope)

    def _scaled_bound(self, shape: _Shape) -> float:
        """Return the largest bound from the passes of other sizes; one sample of the whole model is always known."""
        chosen = shape.chosen
        size = chosen["batch.micro_size"]
        whole = self._whole_model(shape.scope, chosen)
        found = 0.0
        if whole is not None:
            found = self._even_bound(shape, whole.scaled(size / chosen["mesh.tp"]))
        for rows, work in self._works.get(_key(chosen, *_SCALED), ()):
            found = max(found, self._even_bound(shape, work.scaled(size / rows)))
        return found

    def _whole_model(self, scope: KnobScope, chosen: Mapping[str, Any]) -> PassWork | None:
        """Return the work of one sample of the model on one rank without recomputation and tiles; None if refused."""
        alone = {
            **chosen,
            **_PLAIN,
            "batch.micro_size": scope.micro_size,
            "batch.global_size": scope.micro_size,
        }
        alone = {key: value for key, value in alone.items() if key in chosen}
        key = _key(alone)
        if key not in self._whole:
            try:
                config = load(self._given, self._overrides(scope._replace(ranks=1), alone))
                work = work_of(self._shelf.whole_pass(config, 1), self._hardware, scope.is_cpu)
                self._whole[key] = PassWork(*(each / scope.micro_size for each in work))
            except (ConfigError, PlanError, MeshError, UsageError):
                self._whole[key] = None
        return self._whole[key]

    def _overrides(self, scope: KnobScope, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        return overrides_of(scope, {"mesh.dp": Copies(1, data_ranks(scope, chosen)), **chosen})

    # Walking ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look at the shapes, the smallest bound first, until no other can be among the best."""
        while self._shapes:
            shape = heapq.heappop(self._shapes)
            is_late = self._ends_s is not None and time.monotonic() > self._ends_s
            if is_late or shape.bound_s >= self._worst_s:
                self._shapes.append(shape)
                self._prune("limit" if is_late else "time")
                return
            if self._is_too_large(shape):
                self._causes["memory"] += shape.points
                self._leave(shape, True)
            elif shape.level == "stages":
                self._expand(shape)
            elif shape.level == "scaled" and (better_s := self._scaled_bound(shape)) > shape.bound_s:
                shape.bound_s = better_s
                heapq.heappush(self._shapes, shape)
            else:
                self._refine(shape)

    @property
    def _worst_s(self) -> float:
        """Seconds for each sample of the third best point."""
        return self._priced[_BEST - 1][0] if len(self._priced) >= _BEST else float("inf")

    def _prune(self, cause: str) -> None:
        """Pass over all shapes that are left."""
        for shape in sorted(self._shapes)[:_REJECTED]:
            if cause == "time":
                self._lose(shape, None, f"takes {shape.bound_s:.3g} s at least")
        self._causes[cause] += sum(shape.all_points for shape in self._shapes)
        self._shapes.clear()

    def _refine(self, shape: _Shape) -> None:
        """Replace the bound of a shape by one from its own passes."""
        chosen, scope = shape.chosen, shape.scope
        try:
            config = load(self._given, self._overrides(scope, chosen))
            if shape.level == "scaled":
                passed = self._shelf.whole_pass(config, scope.ranks)
                work = work_of(passed, self._hardware, scope.is_cpu)
                self._works.setdefault(_key(chosen, *_SCALED), []).append((chosen["batch.micro_size"], work))
                bound_s = self._even_bound(shape, work if chosen["mesh.pp"] == 1 else work.scaled(1.0))
                shape.level = "stages" if chosen["mesh.pp"] == 1 else "whole"
                if self._keeps_too_much(shape, passed):
                    self._pass_over(shape)
                    return
            else:
                job = self._shelf.job(config, scope.ranks)
                stages = stage_seconds(job.passed, self._hardware, job.device.type)
                bound_s = pipeline_bound(stages, chosen["mesh.pp"], self._microbatches(shape))
                bound_s = self._per_sample(bound_s, chosen, scope)
                shape.level = "stages"
        except (ConfigError, PlanError, MeshError) as error:
            self._causes["rules"] += shape.points
            self._lose(shape, None, str(error))
            self._leave(shape, True)
            return
        shape.bound_s = max(shape.bound_s, bound_s)
        heapq.heappush(self._shapes, shape)

    def _pass_over(self, shape: _Shape) -> None:
        """End the look at a shape that keeps more activations than the memory."""
        self._remember_size(shape)
        self._causes["memory"] += shape.points
        self._lose(shape, None, f"keeps more activations than {bytes_text(self._have['device'])}")
        self._leave(shape, True)

    def _keeps_too_much(self, shape: _Shape, passed: Any) -> bool:
        """Return True if the activations that an average stage keeps exceed the memory of the device."""
        if "host" in self._have and not shape.scope.is_cpu:
            return False
        kept = sum(share.net_bytes for (kind, _), share in passed.shares.items() if kind is Kind.F)
        pp, count = shape.chosen["mesh.pp"], self._microbatches(shape)
        in_flight = sum(min(count, pp - place) for place in range(pp)) / pp
        return _SHARE_OF_KEPT * kept / pp * in_flight > self._have["device"]

    def _rest(self, shape: _Shape) -> Any:
        """Return a key that shapes share which differ in the size of the microbatch alone."""
        return shape.scope.ranks, _key(shape.chosen, "batch.micro_size")

    def _remember_size(self, shape: _Shape) -> None:
        key, size = self._rest(shape), shape.chosen["batch.micro_size"]
        self._too_large[key] = min(size, self._too_large.get(key, size))

    def _is_too_large(self, shape: _Shape) -> bool:
        return shape.chosen["batch.micro_size"] >= self._too_large.get(self._rest(shape), 1 << 62)

    # Points ----------------------------------------------------------------------------------------------------------

    def _expand(self, shape: _Shape) -> None:
        """Price every point of a shape that fits."""
        least: tuple[int, tuple[str, ...]] | None = None
        is_found, all_fit = False, True
        for chosen in self._states(shape.scope, shape.chosen):
            said = self._overrides(shape.scope, chosen)
            try:
                job = self._shelf.job(load(self._given, said), shape.scope.ranks)
                needs, is_moved = self._try_point(shape, chosen, said, job)
            except (ConfigError, PlanError, MeshError) as error:
                self._causes["rules"] += 1
                self._lose(shape, None, str(error), said)
                continue
            is_found |= needs is None
            all_fit &= needs is None and not is_moved
            if needs is not None and (least is None or needs < least[0]):
                least = needs, said
        if least is not None:
            self._lose(shape, least[0], f"more than {bytes_text(self._have['device'])}", least[1])
            if not is_found:
                self._remember_size(shape)
        self._leave(shape, not all_fit or not is_found)

    def _try_point(
        self, shape: _Shape, chosen: Mapping[str, Any], said: tuple[str, ...], job: JobFacts
    ) -> tuple[int | None, bool]:
        """Price a point if it fits, with state on another tier if need be.

        Returns:
            The bytes of the device that the point needs, or None if it fits; True if it does not fit without moves.
        """
        few = _ROUNDS * job.mesh.pp * job.settings.pipeline.virtual_stages
        count = job.policies.microbatches
        short = job if count <= few else job._replace(policies=job.policies._replace(microbatches=few))
        outlook = short.outlook(job.settings.offload)
        if is_within(outlook, self._have):
            return self._price(shape, chosen, said, job, outlook if short is job else None), False
        least = outlook.bytes_by_tier["device"]
        fits_on_tier = False
        for words in self._moves(short):
            needs = self._price_moved(shape, chosen, (*said, *words))
            fits_on_tier |= needs is None
            least = least if needs is None else min(least, needs)
        if fits_on_tier:
            return None, True
        self._causes["memory"] += 1
        return least, True

    def _moves(self, short: JobFacts) -> list[tuple[str, ...]]:
        """Return overrides that move state or activations to other tiers, each with the smallest fraction that fits."""
        process = self._shelf.process_bytes(False), self._shelf.process_bytes("disk" in self._have)
        allowed = self._keys & set(TIER_KNOBS)
        found = []
        for change in on_tiers(short, (), self._have, self._hardware, 0.0, process):
            keys = {text.partition("=")[0] for text in change.overrides} - {"offload.disk_path"}
            if change.overrides and keys <= allowed and is_within(change.outlook, self._have):
                found.append(change.overrides)
        return found

    def _price_moved(self, shape: _Shape, chosen: Mapping[str, Any], said: tuple[str, ...]) -> int | None:
        job = self._shelf.job(load(self._given, said), shape.scope.ranks)
        return self._price(shape, chosen, said, job, None)

    def _price(
        self,
        shape: _Shape,
        chosen: Mapping[str, Any],
        said: tuple[str, ...],
        job: JobFacts,
        outlook: MemoryEstimate | None,
    ) -> int | None:
        """Price a point; return the bytes that it needs if it does not fit with all of its microbatches."""
        offload = job.settings.offload
        outlook = outlook or job.outlook(offload)
        peak = outlook.bytes_by_tier["device"]
        if not is_within(outlook, self._have):
            self._causes["memory"] += 1
            return peak
        step_s = seconds_of(job, outlook, offload, self._hardware, shape.scope.per_host).total
        self._causes["priced"] += 1
        point = SearchedPoint(said, shape.scope.ranks, step_s, peak)
        if any(point[1:] == other[1:] for _, _, other in self._priced):
            return None  # a key without effect on this job
        self._priced.append((self._per_sample(step_s, chosen, shape.scope), next(self._numbers), point))
        self._priced.sort(key=lambda each: each[:2])
        return None

    def _lose(
        self, shape: _Shape, peak: int | None, reason: str, said: tuple[str, ...] | None = None
    ) -> None:
        said = self._overrides(shape.scope, shape.chosen) if said is None else said
        point = SearchedPoint(said, shape.scope.ranks, None, peak, reason)
        self._lost.append((shape.bound_s, next(self._numbers), point))

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
