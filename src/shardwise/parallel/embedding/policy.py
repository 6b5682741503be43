"""Policies of one embedding table (TablePolicy), of its optimizer (RowOptimizerPolicy) and growth (DynamicPolicy)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from shardwise.base.policy import Policy
from shardwise.kernels.tables.wire import WireName
from shardwise.tiers.row_tiers import RowTiersPolicy

Pooling = Literal["sum", "mean", "max", "concat", "none"]
"""Rule by which a sample's vectors become one: added, averaged, the largest of each column, concatenated (the same
number of keys in every sample), or not at all (a sequence). Vectors of keys with weights are added, or averaged as
Σ w·row / Σ w, where TorchRec and FBGEMM divide by the number of keys (use sum with weights w/n for their result). The
other poolings refuse weights. Weights that require gradients get them.
"""
PlacementName = Literal["data_parallel", "table", "row", "column"]
PLACEMENTS: tuple[PlacementName, ...] = ("data_parallel", "table", "row", "column")
MOST_COUNT = (1 << 20) - 1
"""Largest ``AdmissionPolicy.count``: the count of a waiting key and the step in which the key last came share one
number (``dynamic.py``), and a larger count would overwrite the step.
"""
RowOptimizerName = Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
RowDtypeName = Literal["fp32", "bf16"]


def _check_row_dtype(name: Any) -> Any:
    """Return the name of a dtype of rows; raise ValueError if it is fp16."""
    if name == "fp16":
        raise ValueError(
            "rows are not stored in fp16, whose numbers end at 65,504 and lose bits below 6e-5; use bf16, which takes "
            "as much memory and has the range of fp32"
        )
    return name


class RowOptimizerPolicy(Policy):
    """Optimizer of rows: keys under ``tables.optimizer:``, or of one table.

    Only rows that a batch touches are updated.
    """

    type: RowOptimizerName = "rowwise_adagrad"
    """SGD, SGD with momentum, Adagrad, Adagrad with one number a row, Adam, FTRL-proximal. FTRL computes its weights
    anew from its sums with the learning rate of each step, so that the weights shrink under a falling schedule: use a
    constant one.
    """
    lr: NonNegativeFloat = 0.01
    """Learning rate at the top of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the touched rows: this times the weight is added to the gradient; Adam's is decoupled; FTRL uses
    l2.
    """
    momentum: NonNegativeFloat = 0.9
    """Momentum factor of type ``momentum``."""
    nesterov: bool = False
    """True uses Nesterov's form of type ``momentum``."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: PositiveFloat = 1e-8
    """Addend in the denominator of the two Adagrads and of Adam."""
    initial_accumulator: NonNegativeFloat = 0.0
    """Start value of the sums of squares of the two Adagrads and of FTRL."""
    exact: bool = False
    """For Adam only: true replays the steps in which a row was not touched, so that the result equals Adam on the
    whole table.
    """
    l1: NonNegativeFloat = 0.0
    """FTRL's penalty on absolute weights: rows of rare keys stay 0."""
    l2: NonNegativeFloat = 0.0
    """FTRL's penalty on squared weights."""
    beta: NonNegativeFloat = 1.0
    """FTRL's addend to the square root of the sum of squares."""

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
        if (self.nesterov or self.momentum != 0.9) and self.type != "momentum":
            raise ValueError(f"momentum and nesterov are for type momentum; {self.type!r} has none")
        if self.betas != (0.9, 0.999) and self.type != "adam":
            raise ValueError(f"betas are Adam's; {self.type!r} has none")
        return self


class AdmissionPolicy(Policy):
    """Conditions for a key to get a row of its own. Keys that are not admitted read zeros and learn nothing."""

    type: Literal["always", "probability", "frequency"] = "always"
    """``probability`` admits that share of the keys, the same keys on every layout; ``frequency`` admits a key that
    has come in ``count`` steps.
    """
    probability: PositiveFloat = Field(default=1.0, le=1.0)
    """Share of the keys that ``probability`` admits."""
    count: PositiveInt = Field(default=1, le=MOST_COUNT)
    """Steps in which a key must have come before ``frequency`` admits it; below 2^20, because the count takes 20 bits
    beside a step number.
    """
    forget_steps: PositiveInt = 10_000
    """Steps after which a waiting key that has not come again is forgotten, so that keys that come once take memory for
    a limited time only.
    """
    max_waiting: PositiveInt = 1 << 20
    """Keys that may wait at once over all ranks, at about 60 bytes each; beyond it, the keys that came longest ago are
    forgotten first.
    """

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        if self.probability != 1.0 and self.type != "probability":
            raise ValueError(
                f"probability {self.probability} is for type probability; type {self.type!r} ignores it"
            )
        if self.count != 1 and self.type != "frequency":
            raise ValueError(f"count {self.count} is for type frequency; type {self.type!r} ignores it")
        return self


class EvictionPolicy(Policy):
    """Rule by which rows are evicted when the table is full: between steps, the lowest scores first."""

    type: Literal["none", "lru", "lfu", "age"] = "none"
    """``none``: a full table is an error; ``lru``: the score is the step of the last use; ``lfu``: the score is the
    number of steps in which the key came; ``age``: rows that were unused for ``max_age_steps`` are evicted, whether the
    table is full or not.
    """
    max_age_steps: PositiveInt | None = None
    """Steps without a use after which ``age`` evicts a row."""
    fraction: PositiveFloat = Field(default=0.05, le=1.0)
    """Share of the capacity that is freed when the table is full. One step frees at most four times the rows beyond the
    capacity, or 1,024 more than those, and later full steps free the rest, so that no step stalls.
    """
    pinned: tuple[int, ...] = ()
    """Keys that are never evicted."""

    @model_validator(mode="after")
    def _age_has_a_limit(self) -> Self:
        if (self.type == "age") != (self.max_age_steps is not None):
            raise ValueError(f"type {self.type!r} with max_age_steps {self.max_age_steps}; they go together")
        return self


class DynamicPolicy(Policy):
    """Growth of a table without a fixed number of rows: a key gets a row when the key first comes."""

    capacity: PositiveInt | None = None
    """Largest number of rows over all ranks; left out, as many as memory holds."""
    budget_bytes: PositiveInt | None = None
    """The same limit in bytes of weights and optimizer state over all ranks."""
    initial_rows: PositiveInt = 1024
    """Rows for which each rank lays out the index at the start; the index grows in each step as keys come."""
    admission: AdmissionPolicy = AdmissionPolicy()
    """Conditions for a key to get a row."""
    eviction: EvictionPolicy = EvictionPolicy()
    """Rule by which rows are evicted."""

    @model_validator(mode="after")
    def _eviction_has_a_limit(self) -> Self:
        if self.eviction.type in ("lru", "lfu") and self.capacity is None and self.budget_bytes is None:
            raise ValueError(
                f"eviction {self.eviction.type!r} needs capacity or budget_bytes: without one the table is never full"
            )
        return self


class TablePolicy(Policy):
    """One embedding table. Either ``rows`` or ``dynamic`` must be given."""

    name: str
    """Name of the table; its start weights depend on the name."""
    width: PositiveInt
    """Numbers in one vector."""
    rows: PositiveInt | None = None
    """Rows of a static table, whose keys are 0 to rows - 1."""
    dynamic: DynamicPolicy | None = None
    """Growth of a dynamic table, whose keys are any 64-bit numbers."""
    features: tuple[str, ...] = ()
    """Features that read the table; left out, the feature with the table's own name."""
    pooling: Pooling | Mapping[str, Pooling] = "sum"
    """Pooling of all features of the table, or by feature (``sum`` for features that are not named)."""
    optimizer: RowOptimizerPolicy | None = None
    """Optimizer of the table; left out, the optimizer of all tables."""
    placement: Literal["auto"] | PlacementName = "auto"
    """A copy on every rank, the whole table on one rank, rows spread over all ranks, or columns spread over all ranks;
    ``auto``: the placement that costs least.
    """
    exchange: Literal["auto", "rows", "pooled"] = "auto"
    """Form in which ranks exchange vectors of a table that is placed by table or by row: the distinct rows of a batch,
    or the pooled vectors of the samples (partly pooled if placed by row); ``auto``: whichever is fewer bytes.
    """
    keys_per_sample: PositiveFloat = 1.0
    """Mean number of keys of one feature in a sample, for the choice of placement."""
    distinct_ratio: PositiveFloat = Field(default=0.5, le=1.0)
    """Distinct keys of a batch over all its keys, for the choice of placement."""
    out_of_range: Literal["error", "clamp", "modulo"] = "error"
    """Treatment of a key that is not one of a static table's rows: an error, the nearest row, or the remainder by the
    number of rows.
    """
    init_bound: NonNegativeFloat | None = None
    """Start weights are uniform in ± this bound; left out, 1/sqrt(rows), and 0.01 if the table is dynamic."""
    dtype: RowDtypeName = "fp32"
    """Dtype of the stored weights. ``fp32``: the dtype of the collection. ``bf16``: half the memory; updates are
    computed in fp32 and rounded stochastically, so that small ones are kept in the mean.
    """
    state_dtype: RowDtypeName = "fp32"
    """Dtype of the stored optimizer state: ``fp32`` (the dtype of the collection), or ``bf16``, rounded as weights are.
    An ``exact`` Adam needs fp32 for both.
    """
    tiers: RowTiersPolicy | None = None
    """Tiers of a table that is larger than memory; left out, all rows are in memory."""
    marks_changes: bool = False
    """True keeps for each row the step in which it last changed, in 4 bytes, from which increments follow. An engine
    sets this under ``export.every`` and ``checkpoint.tables_full_every``.
    """

    _dtypes_are_stored = field_validator("dtype", "state_dtype", mode="before")(_check_row_dtype)

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
        """Names of the features that read the table."""
        return self.features or (self.name,)

    def pooling_of(self, feature: str) -> Pooling:
        """Return the pooling of one feature of the table."""
        return self.pooling if isinstance(self.pooling, str) else self.pooling.get(feature, "sum")

    @property
    def start_bound(self) -> float:
        """Bound of the start weights, which are uniform in ± this bound."""
        if self.init_bound is not None:
            return self.init_bound
        return 0.01 if self.rows is None else float(self.rows) ** -0.5


class TableOptions(Policy):
    """Options of a table that is made for a feature of the data: keys under ``tables.defaults:`` and ``tables.named:``.

    A key that is left out of ``named`` takes the value in ``defaults``, then that of ``TablePolicy``. ``rows`` replaces
    a default ``dynamic``, and ``dynamic`` replaces default ``rows``.
    """

    rows: PositiveInt | None = None
    """Rows of a static table, whose keys are 0 to rows - 1."""
    dynamic: DynamicPolicy | None = None
    """Growth of a dynamic table, whose keys are any 64-bit numbers."""
    pooling: Literal["sum", "mean", "max"] | None = None
    """Rule by which the vectors of a sample's keys become one."""
    optimizer: RowOptimizerPolicy | None = None
    """Optimizer of the table's rows."""
    placement: Literal["auto"] | PlacementName | None = None
    """A copy on every rank, the whole table on one rank, rows spread over all ranks, or columns spread over all ranks;
    ``auto``: the placement that costs least.
    """
    exchange: Literal["auto", "rows", "pooled"] | None = None
    """Form in which ranks exchange vectors: the distinct rows of a batch, or the (partly) pooled vectors of the
    samples.
    """
    keys_per_sample: PositiveFloat | None = None
    """Mean number of keys in a sample, for the choice of placement."""
    distinct_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Distinct keys of a batch over all its keys, for the choice of placement."""
    out_of_range: Literal["error", "clamp", "modulo"] | None = None
    """Treatment of a key that is not one of a static table's rows: an error, the nearest row, or the remainder by the
    number of rows.
    """
    init_bound: NonNegativeFloat | None = None
    """Start weights are uniform in ± this bound."""
    dtype: RowDtypeName | None = None
    """Dtype of the stored weights: ``fp32``, or ``bf16`` with stochastic rounding, which takes half the memory."""
    state_dtype: RowDtypeName | None = None
    """Dtype of the stored optimizer state: ``fp32``, or ``bf16`` with stochastic rounding."""
    tiers: RowTiersPolicy | None = None
    """Tiers of a table that is larger than memory. Each table has a cache of its own size."""

    _dtypes_are_stored = field_validator("dtype", "state_dtype", mode="before")(_check_row_dtype)

    @model_validator(mode="after")
    def _is_not_both(self) -> Self:
        if self.rows is not None and self.dynamic is not None:
            raise ValueError(
                "both of rows and dynamic are given; a table has a fixed number of rows, or grows"
            )
        return self


class ExportPolicy(Policy):
    """Export of the vectors of embedding tables from a running job: keys under ``export:``."""

    every: PositiveInt
    """Steps between two exports. The first one writes full vectors, later ones write increments: the rows that came,
    changed and went. Both hold the dense part of the model. ``shardwise.Scorer`` and ``shardwise.Vectors`` read them,
    and ``refresh`` follows them. Rows take 4 bytes more."""
    folder: str | None = None
    """The folder of the vectors; left out, ``vectors`` in the folder of the run."""
    full_every: PositiveInt = 100
    """Increments after which full vectors are written again. They replace the increments, which a reader that opens the
    folder applies one by one and keeps in memory."""


class TablesPolicy(Policy):
    """Embedding tables of a run: keys under ``tables:``."""

    defaults: TableOptions = TableOptions()
    """Options of every table of a built-in click-through model, which has one table for each feature of its data."""
    named: Mapping[str, TableOptions] = {}
    """Options of single tables of a built-in click-through model, by the feature's name."""
    optimizer: RowOptimizerPolicy | None = None
    """Optimizer of tables without one of their own; left out, the one in the model's code, or row-wise Adagrad."""
    placement: Mapping[str, PlacementName] = {}
    """Placements by patterns of table names; they take precedence over the placements of single tables."""
    wire: WireName = "fp32"
    """Dtype in which vectors and gradients travel between ranks. ``fp32``: the dtype of the collection; ``bf16`` and
    ``fp16``: half the bytes; ``int8``: a quarter, and one fp32 scale a row. Vectors are rounded to the nearest,
    gradients stochastically. A gradient beyond 65,504 is infinite in ``fp16``, so that the step is skipped.
    """
    prefetch_steps: NonNegativeInt = 1
    """Steps whose keys ``engine.prefetch`` prepares and exchanges in a thread, ahead of their computation; 0: none, and
    ``engine.train_step`` exchanges keys in each forward pass, not once for the whole step. Losses and weights do not
    depend on this number.
    """
    memory_bytes: PositiveInt | None = None
    """Memory of a rank that tables may take; left out, the host's memory divided among its ranks. On an accelerator
    this is device memory for static tables; left out, what the model state leaves free.
    """
    host_memory_bytes: PositiveInt | None = None
    """Memory of a rank's host that dynamic tables may take beside an accelerator; left out, the host's memory divided
    among its ranks. On a CPU, dynamic tables share ``memory_bytes`` with static ones.
    """

    @property
    def disk_folders(self) -> dict[str, Path]:
        """Folders of rows that are not in memory, by the key that names them."""
        given = {"tables.defaults": self.defaults, **{f"tables.named.{k}": v for k, v in self.named.items()}}
        return {
            f"{key}.tiers.disk": each.tiers.folder for key, each in given.items() if each.tiers is not None
        }
