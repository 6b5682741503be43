"""TablePolicy: one embedding table. RowOptimizerPolicy: what updates its rows. DynamicPolicy: how it grows, shrinks."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shardwise.plan.policy import Policy

Pooling = Literal["sum", "mean", "max", "concat", "none"]
"""How a sample's vectors become one: added, averaged, the largest of each column, one after another (the same number of
keys in every sample), or not at all (a sequence). Keys with weights are added, or averaged: Σ w·row / Σ w, where
TorchRec and FBGEMM divide by the number of keys (use sum with weights w/n for theirs). The other poolings refuse them.
Weights that want gradients get them."""
PlacementName = Literal["data_parallel", "table", "row", "column"]
PLACEMENTS: tuple[PlacementName, ...] = ("data_parallel", "table", "row", "column")
MOST_COUNT = (1 << 20) - 1
"""Of ``AdmissionPolicy``: a key that waits has its count and the step of the last one in one number (``dynamic.py``),
where a larger count would run into the step."""
RowOptimizerName = Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "ftrl"]


class RowOptimizerPolicy(Policy):
    """Keys under ``tables.optimizer:``, or one table's own. Only rows that a batch touches are updated."""

    type: RowOptimizerName = "rowwise_adagrad"
    """SGD, with momentum, Adagrad, Adagrad with one number a row, Adam, FTRL-proximal. FTRL's weights follow anew from
    its sums by the rate of each step, so that they shrink with a schedule that falls: give it a constant one."""
    lr: NonNegativeFloat = 0.01
    """Learning rate at the top of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Of the rows that are touched: added to the gradient times their weight; decoupled for Adam; FTRL has l2."""
    momentum: NonNegativeFloat = 0.9
    """Of ``momentum``."""
    nesterov: bool = False
    """Nesterov's form of ``momentum``."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of Adam's two moments."""
    eps: PositiveFloat = 1e-8
    """Addend in the denominator of the two Adagrads and of Adam."""
    initial_accumulator: NonNegativeFloat = 0.0
    """What the sums of squares of the two Adagrads and of FTRL start with."""
    exact: bool = False
    """Adam alone: true replays the steps in which a row was not touched, so that it equals Adam on the whole table."""
    l1: NonNegativeFloat = 0.0
    """FTRL's penalty on absolute weights: rows of rare keys stay 0."""
    l2: NonNegativeFloat = 0.0
    """FTRL's penalty on squared weights."""
    beta: NonNegativeFloat = 1.0
    """FTRL's addend to the root of the sum of squares."""

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; each lies in [0, 1)")
        if self.exact and self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr {self.lr} times weight_decay {self.weight_decay} is 1 or more: a step would turn weights round"
            )
        if self.exact and self.type != "adam":
            raise ValueError(
                f"exact is for adam alone; {self.type!r} does nothing in steps without a gradient"
            )
        if (self.l1 or self.l2 or self.beta != 1.0) and self.type != "ftrl":
            raise ValueError(f"l1, l2 and beta are FTRL's; {self.type!r} takes weight_decay")
        if self.type == "ftrl" and self.weight_decay:
            raise ValueError("weight_decay is not FTRL's; it takes l2")
        return self


class AdmissionPolicy(Policy):
    """Which keys get a row of their own. The others read zeros and learn nothing."""

    type: Literal["always", "probability", "frequency"] = "always"
    """``probability`` admits that share of keys, the same on every layout; ``frequency`` one that came often."""
    probability: PositiveFloat = Field(default=1.0, le=1.0)
    """Share of the keys."""
    count: PositiveInt = Field(default=1, le=MOST_COUNT)
    """Steps in which a key has come before it is admitted; below 2^20, for it is kept in 20 bits beside a step."""
    forget_steps: PositiveInt = 10_000
    """A key that waits is forgotten when it has not come for about so many steps, so that those that come once take
    memory for a while alone."""
    max_waiting: PositiveInt = 1 << 20
    """Keys that may wait at once, over all ranks and about 60 bytes each; beyond, those that came longest ago are
    forgotten first."""


class EvictionPolicy(Policy):
    """Which rows go when the table is full; between steps, the lowest scores first."""

    type: Literal["none", "lru", "lfu", "age"] = "none"
    """``none``: a full table is an error; ``lru``: the step of the last use; ``lfu``: the number of uses; ``age``: rows
    unused for ``max_age_steps`` go, full or not."""
    max_age_steps: PositiveInt | None = None
    """Of ``age``."""
    fraction: PositiveFloat = Field(default=0.05, le=1.0)
    """Part of the capacity that is freed at once."""
    pinned: tuple[int, ...] = ()
    """Keys that never go."""

    @model_validator(mode="after")
    def _age_has_a_limit(self) -> Self:
        if (self.type == "age") != (self.max_age_steps is not None):
            raise ValueError(f"type {self.type!r} with max_age_steps {self.max_age_steps}; they go together")
        return self


class DynamicPolicy(Policy):
    """A table without a number of rows: keys get one when they first come."""

    capacity: PositiveInt | None = None
    """Rows at most, over all ranks; left out: as many as memory holds."""
    budget_bytes: PositiveInt | None = None
    """The same as bytes of weights and optimizer state over all ranks."""
    initial_rows: PositiveInt = 1024
    """Rows that memory is taken for at the start, on each rank; it doubles as keys come."""
    admission: AdmissionPolicy = AdmissionPolicy()
    """Which keys get a row."""
    eviction: EvictionPolicy = EvictionPolicy()
    """Which rows go."""

    @model_validator(mode="after")
    def _eviction_has_a_limit(self) -> Self:
        if self.eviction.type in ("lru", "lfu") and self.capacity is None and self.budget_bytes is None:
            raise ValueError(
                f"eviction {self.eviction.type!r} needs capacity or budget_bytes: without one the table is never full"
            )
        return self


class TablePolicy(Policy):
    """One table; give ``rows``, or ``dynamic``."""

    name: str
    """Its start weights depend on it."""
    width: PositiveInt
    """Numbers in a vector."""
    rows: PositiveInt | None = None
    """A static table: keys are 0 to rows - 1."""
    dynamic: DynamicPolicy | None = None
    """Keys are any numbers of 64 bits."""
    features: tuple[str, ...] = ()
    """Features that read it; left out, the one of the table's own name."""
    pooling: Pooling | Mapping[str, Pooling] = "sum"
    """For all its features, or by feature (``sum`` for those not named)."""
    optimizer: RowOptimizerPolicy | None = None
    """Left out, that of all tables."""
    placement: Literal["auto"] | PlacementName = "auto"
    """A copy on every rank, whole on one, rows over all, columns over all; ``auto``: what costs least."""
    exchange: Literal["auto", "rows", "pooled"] = "auto"
    """What ranks exchange for a table that is cut by table or by row: the distinct rows of a batch, or the pooled (of
    rows, partly pooled) vectors of the samples; ``auto``: what is fewer bytes."""
    keys_per_sample: PositiveFloat = 1.0
    """Mean number of keys of one feature in a sample, for the choice of placement."""
    distinct_ratio: PositiveFloat = Field(default=0.5, le=1.0)
    """Distinct keys of a batch over all its keys, for the choice of placement."""
    out_of_range: Literal["error", "clamp", "modulo"] = "error"
    """A key that is not one of a static table's rows: an error, the nearest row, or the remainder by their number."""
    init_bound: NonNegativeFloat | None = None
    """Start weights are uniform in ± this; left out, 1/sqrt(rows), and 0.01 where the table is dynamic."""

    @model_validator(mode="after")
    def _is_static_or_dynamic(self) -> Self:
        if (self.rows is None) == (self.dynamic is None):
            given = "both" if self.rows else "neither"
            raise ValueError(f"table {self.name!r} has {given} of rows and dynamic; give one of them")
        if isinstance(self.pooling, Mapping):
            for feature in self.pooling:
                if feature not in self.feature_names:
                    raise ValueError(
                        f"table {self.name!r}: pooling names feature {feature!r}, which is none of its features "
                        f"({', '.join(self.feature_names)})"
                    )
        if self.exchange == "pooled":
            if self.placement in ("data_parallel", "column"):
                raise ValueError(f"table {self.name!r}: exchange: pooled is for placements table and row")
            if any(self.pooling_of(feature) not in ("sum", "mean") for feature in self.feature_names):
                raise ValueError(f"table {self.name!r}: exchange: pooled needs pooling sum or mean")
            if self.dynamic:
                raise ValueError(f"table {self.name!r}: a dynamic table has exchange: rows")
        return self

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features that read it."""
        return self.features or (self.name,)

    def pooling_of(self, feature: str) -> Pooling:
        """Pooling of one of its features."""
        return self.pooling if isinstance(self.pooling, str) else self.pooling.get(feature, "sum")

    @property
    def start_bound(self) -> float:
        """Start weights are uniform in ± this."""
        if self.init_bound is not None:
            return self.init_bound
        return 0.01 if self.rows is None else float(self.rows) ** -0.5


class TableOptions(Policy):
    """What may be said of a table that follows from a feature: keys under ``tables.defaults:`` and ``tables.named:``.

    A key that is left out is the default's, then that of ``TablePolicy``; ``rows`` takes the place of a default's
    ``dynamic``, and the other way round.
    """

    rows: PositiveInt | None = None
    """A static table: keys are 0 to rows - 1."""
    dynamic: DynamicPolicy | None = None
    """Keys are any numbers of 64 bits."""
    pooling: Literal["sum", "mean", "max"] | None = None
    """How the vectors of a sample's keys become one."""
    optimizer: RowOptimizerPolicy | None = None
    """What updates its rows."""
    placement: Literal["auto"] | PlacementName | None = None
    """A copy on every rank, whole on one, rows over all, columns over all; ``auto``: what costs least."""
    exchange: Literal["auto", "rows", "pooled"] | None = None
    """What ranks exchange: the distinct rows of a batch, or the (partly) pooled vectors of the samples."""
    keys_per_sample: PositiveFloat | None = None
    """Mean number of keys in a sample, for the choice of placement."""
    distinct_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Distinct keys of a batch over all its keys, for the choice of placement."""
    out_of_range: Literal["error", "clamp", "modulo"] | None = None
    """A key that is not one of a static table's rows: an error, the nearest row, or the remainder by their number."""
    init_bound: NonNegativeFloat | None = None
    """Start weights are uniform in ± this."""

    @model_validator(mode="after")
    def _is_not_both(self) -> Self:
        if self.rows is not None and self.dynamic is not None:
            raise ValueError(
                "both of rows and dynamic are given; a table has a fixed number of rows, or grows"
            )
        return self


class TablesPolicy(Policy):
    """Keys under ``tables:``."""

    defaults: TableOptions = TableOptions()
    """Of every table of a built-in click-through model, which has one for each feature of its data."""
    named: Mapping[str, TableOptions] = {}
    """Of single tables of such a model, by the feature's name."""
    optimizer: RowOptimizerPolicy | None = None
    """Of tables without their own; left out, what the model's code says, or row-wise Adagrad."""
    placement: Mapping[str, PlacementName] = {}
    """Placements by patterns of table names, before what the tables' own entries say."""
    prefetch_steps: NonNegativeInt = 1
    """Steps whose keys ``engine.prefetch`` prepares and exchanges in a thread, ahead of their computation; 0: none.
    Losses and weights do not depend on it."""
    memory_bytes: PositiveInt | None = None
    """Memory of a rank that tables may take; left out, what the host has, shared by its ranks. On an accelerator its
    memory, for static tables; left out, what is free of it beside the model state."""
    host_memory_bytes: PositiveInt | None = None
    """Memory of a rank's host that dynamic tables may take; left out, on an accelerator what the host has, shared by
    its ranks; on a CPU they share ``memory_bytes``."""
