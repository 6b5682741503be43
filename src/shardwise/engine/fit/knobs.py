"""Knobs: the keys of a configuration that change a job's memory or seconds, with the values to try for each.

    shape knobs    keys that change a pass of a microbatch on one rank: axes of the model, micro size, schedule, what is
                   computed again, tiles
    state knobs    keys that change where model state lies and how it travels: ZeRO stage, copies, exchange, tiers

``fits``, ``search``, ``solve`` and ``removals`` read this one table. A value is written as overrides, as ``--set``
takes them, so that ``load`` and the rules of the configuration (config/rules.py) decide whether it is possible.
Knobs whose values change what is computed, and not only the rounding of sums, are tried if they are freed.

Cost: a product of short lists; the values of a knob follow from the values of those above it in the table.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest
from shardwise.config.run import RunConfig
from shardwise.parallel.embedding.policy import PLACEMENTS
from shardwise.parallel.pipeline.policy import FOLDED
from shardwise.plan.mesh import DataParallelPolicy
from shardwise.plan.placement import Tier

Change = Literal["memory", "time", "numbers"]
"""What a knob changes of a step."""
Values = Mapping[str, Any]
"""Values of knobs, by key."""


class KnobScope(NamedTuple):
    """Facts about a job from which the values to try follow."""

    given: RunConfig
    ranks: int
    per_host: int
    """Ranks of one host, within which tensors are cut."""
    global_size: int
    """Samples of one step over all ranks."""
    micro_size: int
    """Configured samples of a microbatch, or those of the example."""
    blocks: int
    """Repeated blocks of the model."""
    experts: int
    """Experts of the model's largest mixture; 0 without experts."""
    has_tables: bool
    is_cpu: bool
    gives_loss: bool = False
    """True if the model's training pass returns only the loss, so that ``tiles.logits`` is ``auto`` anyway."""
    tiers: tuple[Tier, ...] = ("device",)
    """Tiers whose memory is given."""
    hosts: int = 1
    """Hosts over which the ranks lie."""
    tables: tuple[str, ...] = ()
    """Names of the embedding tables."""
    is_capped: bool = False
    """True if a router has a capacity, so that its rows may travel in blocks."""
    freed: frozenset[str] = frozenset()
    """Keys of the knobs that may change the run's numbers."""
    tokens: int = 0
    """Tokens of a sequence, if ranks can share sequences of this model; 0 if they cannot."""

    @property
    def cuts_sequences(self) -> bool:
        """True if sequences are so long that ranks that share them are tried, whether that is freed or not."""
        return self.tokens >= LONG_TOKENS


class Knob(NamedTuple):
    """A key of the configuration, and the values to try."""

    key: str
    values: Callable[[KnobScope, Values], Sequence[Any]]
    """Values for a job and the values of the knobs above in the table; empty if only the configured value is tried."""
    current: Callable[[KnobScope], Any]
    """The configured value."""
    changes: frozenset[Change]
    part: Literal["shape", "state"]
    order: Literal["", "more", "less"] = ""
    """Change of a rank's memory when the value grows; empty if the values have no order."""
    texts: Callable[[KnobScope, Values], Sequence[str]] | None = None
    """Overrides for the value; None: ``key=value``."""
    frees: bool = False
    """True if the knob has further values, which change the run's numbers and are tried if the key is freed."""

    def overrides(self, scope: KnobScope, chosen: Values) -> tuple[str, ...]:
        """Return the overrides that set the chosen value; empty if it is configured already."""
        if self.texts is not None:
            return tuple(self.texts(scope, chosen))
        value = chosen[self.key]
        return () if value == self.current(scope) else (f"{self.key}={text_of(value)}",)


class RecomputeChoice(NamedTuple):
    """Value of the knob ``recompute``."""

    scope: str = "none"
    select: str = "auto"
    blocks: Any = "all"


class Copies(NamedTuple):
    """Value of the knob ``mesh.dp``: ranks over which sharded state is copied, and over which a copy is cut."""

    replicate: int
    shard: int


def text_of(value: Any) -> str:
    """Return a value as an override's text, in one line of YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, ascending, up to ``most``."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    every = sorted({*small, *(number // each for each in small)})
    return [each for each in every if most is None or each <= most]


def data_ranks(scope: KnobScope, chosen: Values) -> int:
    """Return the number of data-parallel ranks under the chosen axes of the model."""
    return scope.ranks // model_ranks(chosen)


def model_ranks(chosen: Values) -> int:
    """Return the number of ranks that work on one sample under the chosen axes."""
    return int(chosen["mesh.pp"] * chosen["mesh.tp"] * chosen["mesh.cp"])


def _configured(*path: str) -> Callable[[KnobScope], Any]:
    def current(scope: KnobScope) -> Any:
        found: Any = scope.given
        for key in path:
            found = getattr(found, key)
        return found

    return current


def _first(value: Any, others: Sequence[Any]) -> list[Any]:
    """Return ``value`` and then the others that differ from it."""
    return [value, *(each for each in others if each != value)]


# Shape -------------------------------------------------------------------------------------------------------------


def _stages(scope: KnobScope, chosen: Values) -> Sequence[int]:
    return divisors(scope.ranks, max(scope.blocks, 1))


def _slices(scope: KnobScope, chosen: Values) -> Sequence[int]:
    return divisors(scope.ranks // chosen["mesh.pp"], scope.per_host)


def _token_ranks(scope: KnobScope, chosen: Values) -> Sequence[int]:
    """Return the numbers of ranks that may share a sequence, if the sequences are long or the key is freed.

    The method is tried if it is freed: ``auto`` takes the one that sends fewest bytes.
    """
    if "mesh.cp" not in scope.freed and not scope.cuts_sequences:
        return ()
    return divisors(scope.ranks // (chosen["mesh.pp"] * chosen["mesh.tp"]) or 1)


def _context_methods(scope: KnobScope, chosen: Values) -> Sequence[str]:
    if "context.method" not in scope.freed or chosen["mesh.cp"] == 1:
        return ()
    return _first(scope.given.context.method, ("auto", "planned", "ring", "ulysses"))


def _expert_ranks(scope: KnobScope, chosen: Values) -> Sequence[int]:
    if not scope.experts:
        return ()
    ranks = scope.ranks // chosen["mesh.pp"]
    return [each for each in divisors(ranks, scope.experts) if scope.experts % each == 0]


def _expert_slices(scope: KnobScope, chosen: Values) -> Sequence[int]:
    if not scope.experts:
        return ()
    return divisors(scope.ranks // chosen["mesh.pp"] // chosen["mesh.ep"] or 1, scope.per_host)


def _micro_sizes(scope: KnobScope, chosen: Values) -> Sequence[int]:
    """Return the sizes that divide a rank's share of the samples.

    Ranks that share sequences are tried with one sample, unless they are freed: of two samples each rank can take one
    whole, and sends no keys.
    """
    dp, total = data_ranks(scope, chosen), chosen["batch.global_size"]
    if chosen["mesh.cp"] > 1 and "mesh.cp" not in scope.freed:
        return (1,) if total % dp == 0 else ()
    return divisors(total // dp) if total % dp == 0 else ()


def _schedules(scope: KnobScope, chosen: Values) -> Sequence[str]:
    names = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "zb_greedy")
    return names if chosen["mesh.pp"] > 1 else ()


def _virtual_stages(scope: KnobScope, chosen: Values) -> Sequence[int]:
    if chosen["pipeline.schedule"] in FOLDED:
        return (1,) if scope.blocks >= 2 * chosen["mesh.pp"] else ()
    if chosen["pipeline.schedule"] != "interleaved_1f1b":
        return (1,)
    return [each for each in divisors(scope.blocks // chosen["mesh.pp"]) if each > 1]


def _recomputed(scope: KnobScope, chosen: Values) -> Sequence[RecomputeChoice]:
    half = (RecomputeChoice("full", "auto", 0.5),) if scope.blocks > 1 else ()
    others = (
        RecomputeChoice(),
        RecomputeChoice("selective"),
        RecomputeChoice("selective", "operations"),
        *half,
        RecomputeChoice("full"),
    )
    return _first(_recompute_now(scope), others)


def _recompute_now(scope: KnobScope) -> RecomputeChoice:
    policy = scope.given.recompute
    blocks = list(policy.blocks) if isinstance(policy.blocks, list) else policy.blocks
    return RecomputeChoice(policy.scope, policy.select, blocks)


def _recompute_texts(scope: KnobScope, chosen: Values) -> Sequence[str]:
    value, now = chosen["recompute"], _recompute_now(scope)
    if value == now:
        return ()
    said = [f"recompute={value.scope}"]
    said += [f"recompute.select={value.select}"] * (value.select != "auto")
    return [*said, *[f"recompute.blocks={text_of(value.blocks)}"] * (value.blocks != "all")]


def _logits(scope: KnobScope, chosen: Values) -> Sequence[Any]:
    now = scope.given.tiles.logits
    if now is None and scope.gives_loss:
        return (None,)
    return (now, "auto") if now in (None, "off") else ()


def _mlp(scope: KnobScope, chosen: Values) -> Sequence[Any]:
    return ("off", "auto") if scope.given.tiles.mlp == "off" else ()


def _expert_rows(scope: KnobScope, chosen: Values) -> Sequence[int]:
    others = [1 << power for power in (10, 12, 14, 16)]
    return _first(scope.given.experts.rows, others) if scope.experts else ()


def _global_sizes(scope: KnobScope, chosen: Values) -> Sequence[int]:
    halved = [scope.global_size // 2] if scope.global_size % 2 == 0 else []
    return [scope.global_size, *halved, 2 * scope.global_size]


def _batch_texts(scope: KnobScope, chosen: Values) -> Sequence[str]:
    batch, micro = scope.given.batch, chosen["batch.micro_size"]
    total = chosen["batch.global_size"]
    try:
        derived = batch.derived(data_ranks(scope, chosen))
    except ConfigError:
        derived = None
    if derived is not None and (derived.micro_size, derived.global_size) == (micro, total):
        return ()
    said = [f"batch.micro_size={micro}"] * (batch.micro_size != micro)
    said += [f"batch.global_size={total}"] * (batch.global_size != total)
    return said + ["batch.accumulation=null"] * (batch.accumulation is not None)


# State -------------------------------------------------------------------------------------------------------------


def _copies(scope: KnobScope, chosen: Values) -> Sequence[Copies]:
    """Return the ways to divide the data-parallel ranks into copies; ranks that cut nothing have no copies."""
    dp = data_ranks(scope, chosen)
    if chosen["zero.stage"] == 0:
        return (Copies(1, dp),)
    return [Copies(dp // shard, shard) for shard in divisors(dp) if shard > 1] or (Copies(1, dp),)


def _copies_now(scope: KnobScope) -> Copies:
    mesh = scope.given.mesh
    ranks = scope.ranks // (mesh.pp * mesh.tp * mesh.cp) or 1
    return Copies(*mesh.dp.of(ranks)) if isinstance(mesh.dp, DataParallelPolicy) else Copies(1, ranks)


def _mesh_texts(scope: KnobScope, chosen: Values) -> Sequence[str]:
    copies, dp = chosen["mesh.dp"], scope.given.mesh.dp
    if copies.replicate == 1:
        return () if dp is None or dp == copies.shard else ("mesh.dp=null",)
    if isinstance(dp, DataParallelPolicy) and dp.of(copies.replicate * copies.shard) == tuple(copies):
        return ()
    return (f"mesh.dp={{replicate: {copies.replicate}, shard: {copies.shard}}}",)


def _exchanges(scope: KnobScope, chosen: Values) -> Sequence[str]:
    others = ("auto", "sum", "all_to_all", *["two_level"] * (scope.hosts > 1))
    is_cut = chosen["zero.stage"] and chosen["mesh.dp"].shard * chosen.get("mesh.cp", 1) > 1
    return _first(scope.given.zero.exchange, others) if is_cut else ()


def _times_of_reduction(scope: KnobScope, chosen: Values) -> Sequence[str]:
    dp, total = data_ranks(scope, chosen), chosen["batch.global_size"]
    if total // dp == chosen["batch.micro_size"] or chosen["zero.stage"] < 2:
        return ()
    return ("auto", "step")


def _keeps_weights(scope: KnobScope, chosen: Values) -> Sequence[bool]:
    return (True, False) if chosen["zero.stage"] == 3 and chosen["mesh.pp"] > 1 else (True,)


def _state_tiers(scope: KnobScope, chosen: Values) -> Sequence[Tier]:
    if scope.given.offload.optimizer != "device":
        return ()
    others: list[Tier] = ["host", "disk"]
    return [
        "device",
        *(each for each in others if each in scope.tiers and not (each == "host" and scope.is_cpu)),
    ]


def _weight_tiers(scope: KnobScope, chosen: Values) -> Sequence[Tier]:
    return ("device", chosen["offload.optimizer"])


def _tier_texts(scope: KnobScope, chosen: Values) -> Sequence[str]:
    tier, now = chosen["offload.optimizer"], scope.given.offload
    said = [f"offload.optimizer={tier}"] * (tier != now.optimizer)
    return said + ["offload.disk_path=."] * (tier == "disk" and now.disk_path is None)


def _activation_tiers(scope: KnobScope, chosen: Values) -> Sequence[str]:
    return () if scope.is_cpu or "host" not in scope.tiers else ("device", "host")


def _step_times(scope: KnobScope, chosen: Values) -> Sequence[str]:
    """Return the times at which updates on another tier may end; with delayed ones a step has other numbers."""
    if chosen["offload.optimizer"] == "device":
        return ()
    others = ("before_use", "at_end", *["delayed"] * ("offload.step" in scope.freed))
    return _first(scope.given.offload.step, others)


def _placements(scope: KnobScope, chosen: Values) -> Sequence[Any]:
    """Return placements of tables by name: every combination of few tables; of many, one table or all change.

    Tables that are not named have the placement that the planner of tables chooses.
    """
    if not scope.has_tables:
        return ()
    now, tables = dict(scope.given.tables.placement), scope.tables
    if (len(PLACEMENTS) + 1) ** len(tables) <= _MOST_PLACEMENTS:
        choices = itertools.product((None, *PLACEMENTS), repeat=len(tables))
        others = [_placed(now, dict(zip(tables, each, strict=True))) for each in choices]
    else:
        others = [{"*": placement} for placement in PLACEMENTS]
        others += [_placed(now, {table: placement}) for table in tables for placement in PLACEMENTS]
    return _first(now, others)


def _placed(now: Mapping[str, str], chosen: Mapping[str, str | None]) -> dict[str, str]:
    """Return the configured placements with those of some tables in their place; None leaves a table as it is."""
    placed = {table: placement for table, placement in chosen.items() if placement is not None}
    return {**{pattern: each for pattern, each in now.items() if pattern not in placed}, **placed}


def _expert_exchanges(scope: KnobScope, chosen: Values) -> Sequence[str]:
    if not scope.is_capped or chosen["experts.rows"] is not None:
        return ()
    return ("counted", "blocks")


LONG_TOKENS = 8192
"""Tokens of a sequence from which ranks that share sequences are tried: attention is a large part of the work then."""
_MOST_PLACEMENTS = 125
"""Largest number of combinations of placements of tables that are all tried: those of three tables."""
_BOTH: frozenset[Change] = frozenset({"memory", "time"})
_ALL: frozenset[Change] = frozenset({"memory", "time", "numbers"})

KNOBS: tuple[Knob, ...] = (
    Knob("batch.global_size", _global_sizes, lambda s: s.global_size, _ALL, "shape", texts=lambda s, c: ()),
    Knob(
        "precision.compute",
        lambda s, c: _first(s.given.precision.compute, ("fp32", "bf16")),
        _configured("precision", "compute"),
        _ALL,
        "shape",
    ),
    Knob("mesh.pp", _stages, _configured("mesh", "pp"), _BOTH, "shape"),
    Knob("mesh.tp", _slices, _configured("mesh", "tp"), _BOTH, "shape"),
    Knob("mesh.cp", _token_ranks, _configured("mesh", "cp"), _BOTH, "shape", frees=True),
    Knob("context.method", _context_methods, _configured("context", "method"), _BOTH, "shape", frees=True),
    Knob("mesh.ep", _expert_ranks, _configured("mesh", "ep"), _BOTH, "shape"),
    Knob("mesh.etp", _expert_slices, _configured("mesh", "etp"), _BOTH, "shape"),
    Knob(
        "batch.micro_size",
        _micro_sizes,
        lambda s: s.micro_size,
        _BOTH,
        "shape",
        "more",
        _batch_texts,
    ),
    Knob("pipeline.schedule", _schedules, _configured("pipeline", "schedule"), _BOTH, "shape"),
    Knob(
        "pipeline.virtual_stages", _virtual_stages, _configured("pipeline", "virtual_stages"), _BOTH, "shape"
    ),
    Knob("recompute", _recomputed, _recompute_now, _BOTH, "shape", texts=_recompute_texts),
    Knob("tiles.logits", _logits, _configured("tiles", "logits"), _BOTH, "shape"),
    Knob("tiles.mlp", _mlp, _configured("tiles", "mlp"), _BOTH, "shape"),
    Knob("experts.rows", _expert_rows, _configured("experts", "rows"), _BOTH, "shape", "more"),
    Knob("experts.exchange", _expert_exchanges, _configured("experts", "exchange"), _BOTH, "shape"),
    Knob(
        "precision.reduce",
        lambda s, c: _first(s.given.precision.reduce, ("fp32", "bf16")),
        _configured("precision", "reduce"),
        _ALL,
        "state",
    ),
    Knob(
        "optimizer.type",
        lambda s, c: _first(s.given.optimizer.type, ("adamw", "lion", "sgd")),
        _configured("optimizer", "type"),
        _ALL,
        "state",
    ),
    Knob(
        "offload.state",
        lambda s, c: _first(s.given.offload.state, ("fp32", "bf16", "int8")),
        _configured("offload", "state"),
        _ALL,
        "state",
    ),
    Knob("zero.stage", lambda s, c: (0, 1, 2, 3), _configured("zero", "stage"), _BOTH, "state"),
    Knob("mesh.dp", _copies, _copies_now, _BOTH, "state", texts=_mesh_texts),
    Knob("zero.reduce", _times_of_reduction, _configured("zero", "reduce"), _BOTH, "state"),
    Knob(
        "zero.reshard_after_forward",
        _keeps_weights,
        _configured("zero", "reshard_after_forward"),
        _BOTH,
        "state",
    ),
    Knob("zero.exchange", _exchanges, _configured("zero", "exchange"), _BOTH, "state"),
    Knob("tables.placement", _placements, lambda s: dict(s.given.tables.placement), _BOTH, "state"),
    Knob("offload.activations", _activation_tiers, _configured("offload", "activations"), _BOTH, "state"),
    Knob(
        "offload.optimizer",
        _state_tiers,
        _configured("offload", "optimizer"),
        _BOTH,
        "state",
        texts=_tier_texts,
    ),
    Knob("offload.parameters", _weight_tiers, _configured("offload", "parameters"), _BOTH, "state"),
    Knob("offload.step", _step_times, _configured("offload", "step"), _BOTH, "state", frees=True),
    Knob("offload.fraction", lambda s, c: (), _configured("offload", "fraction"), _BOTH, "state", "less"),
)
"""Every knob, in the order in which values are chosen.

The fraction of the Units on another tier has no list of values: the smallest that fits is looked for by bisection.
"""
TIER_KNOBS = ("offload.activations", "offload.optimizer", "offload.parameters", "offload.fraction")
"""Keys of the knobs that move state or activations to other tiers, which never makes a step shorter."""

_DEPENDENT = ("mesh.dp", "batch.micro_size", "pipeline.schedule", "pipeline.virtual_stages", "zero.reduce")
"""Keys of knobs whose configured value may not suit other values of the knobs above."""


def knob_of(key: str) -> Knob:
    """Return the knob of a key.

    Raises:
        ConfigError: if no knob has the key; the error names the nearest.
    """
    for knob in KNOBS:
        if knob.key == key:
            return knob
    raise ConfigError(f"{key!r} is no knob of a search{nearest(key, [knob.key for knob in KNOBS])}")


def freed(keys: Collection[str]) -> frozenset[str]:
    """Return the keys of the knobs that change numbers and are freed.

    Args:
        keys: Keys of knobs, or of the blocks that contain them: ``precision`` frees every knob under it.

    Raises:
        ConfigError: if a key frees no knob.
    """
    changing = [knob.key for knob in KNOBS if "numbers" in knob.changes or knob.frees]
    found: set[str] = set()
    for key in keys:
        hits = [each for each in changing if each == key or each.startswith(f"{key}.")]
        if not hits:
            raise ConfigError(f"free: {key!r} changes no numbers of a run{nearest(key, changing)}")
        found.update(hits)
    return frozenset(found)


def assignments(
    scope: KnobScope, part: Literal["shape", "state"], chosen: Values, keys: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield every combination of values of the knobs of one part.

    Args:
        scope: Facts about the job.
        part: The part of the table.
        chosen: Values of the knobs above.
        keys: Keys of the knobs that take other values than the configured one.
    """
    knobs = [knob for knob in KNOBS if knob.part == part]
    yield from _assigned(scope, knobs, dict(chosen), keys)


def _assigned(
    scope: KnobScope, knobs: Sequence[Knob], chosen: dict[str, Any], keys: Collection[str]
) -> Iterator[dict[str, Any]]:
    if not knobs:
        yield dict(chosen)
        return
    knob, *rest = knobs
    for value in _tried(knob, scope, chosen, knob.key in keys):
        yield from _assigned(scope, rest, {**chosen, knob.key: value}, keys)


def _tried(knob: Knob, scope: KnobScope, chosen: Values, is_free: bool) -> Sequence[Any]:
    """Return the values of a knob: all, or the configured one alone."""
    now = knob.current(scope)
    values = knob.values(scope, chosen)
    if is_free:
        return values or (now,)
    if knob.key in _DEPENDENT and values and now not in values:
        return values[-1:] if knob.key == "mesh.dp" else values[:1]
    return (now,)


def overrides_of(scope: KnobScope, chosen: Values) -> tuple[str, ...]:
    """Return the overrides that turn the configuration into the chosen values, in the order of the table."""
    return tuple(
        itertools.chain.from_iterable(knob.overrides(scope, chosen) for knob in KNOBS if knob.key in chosen)
    )
