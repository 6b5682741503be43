"""Policy of click logs: the keys of ``data:`` for click-through models.

data: {kind: clicks, synthetic: {samples: 2_000_000, tables: 8, rows: 100}}
data: {kind: clicks, source: criteo_folder}                    # or files: Criteo text (.gz), Parquet, *.clicks
data: {kind: clicks, source: [day_0.gz, day_1.gz], validation: day_2.gz, malformed_limit: 100}

The built-in click-through models read clicks, so beside them ``kind`` may be left out.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwise.base.policy import Policy

SYNTHETIC = "synthetic"

Count = Annotated[int, Field(ge=1)]


class SyntheticPolicy(Policy):
    """Computed click log, with a teacher whose AUC is the best possible."""

    samples: Count = 2_000_000
    """Rows to learn from; the validation rows follow them."""
    validation_samples: Count = 200_000
    """Validation rows, which are held out."""
    tables: Count = 8
    """Number of features, if ``rows`` is one number."""
    rows: Count | Annotated[list[Count], Field(min_length=1)] = 100
    """Distinct keys of every feature, or a list with the number for each."""
    dense: Annotated[int, Field(ge=0)] = 13
    """Dense numbers of a row."""
    exponent: Annotated[float, Field(gt=0)] = 1.05
    """Exponent of the frequency of keys: P(rank) ~ rank^-exponent."""
    keys: Literal["dense", "hashed"] = "dense"
    """``dense``: keys below ``rows``, for tables of fixed size; ``hashed``: 63 bits, for tables that grow."""
    fresh: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of keys that occur once and never again (``hashed`` only)."""
    click_rate: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Mean of the labels: the share of rows that are clicks."""
    seed: int = 0
    """Seed of the log: another seed has another teacher."""

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Distinct keys of each feature."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else tuple(self.rows)

    @model_validator(mode="after")
    def _check(self) -> "SyntheticPolicy":
        if (
            isinstance(self.rows, list)
            and "tables" in self.model_fields_set
            and len(self.rows) != self.tables
        ):
            raise ValueError(
                f"rows lists {len(self.rows)} tables, but tables is {self.tables}; leave tables out where rows "
                "is a list"
            )
        if self.fresh and self.keys == "dense":
            raise ValueError("fresh keys lie outside tables of fixed size; set keys: hashed, or fresh: 0")
        return self


class ClickPolicy(Policy):
    """Source of a click log, the order in which it is read, and the conversion of a row to a sample."""

    kind: Literal["clicks"] = "clicks"
    """Distinguishes a click log from text."""
    source: str | Annotated[list[str], Field(min_length=1)] = SYNTHETIC
    """``synthetic``, or files and folders of Criteo text, text with a header (.csv, .tsv; both also .gz), Parquet, or
    packed clicks made by ``shardwise convert``. A folder called synthetic is written ``./synthetic``."""
    pattern: str = "*"
    """Files of a folder that are read: a glob compared with the file's name and with its path inside the folder."""
    validation: Annotated[float, Field(gt=0, lt=1)] | str | list[str] = 0.1
    """Share of the rows, taken from the end of the log, that is held out; or separate files."""
    validation_samples: Count | None = None
    """Largest number of validation rows, evenly spread, that one evaluation uses; left out: all of them."""
    label: str = "label"
    """Parquet, CSV: the column of the label."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Character between the fields of text with a header; left out, a comma for .csv and a tab for .tsv, and files of
    other names are Criteo's text.
    """
    dense: list[str] | None = None
    """Parquet, CSV: columns that are numbers; left out with ``sparse``: by type, and a column whose type does not
    decide is refused. Columns in neither list are left out.
    """
    sparse: list[str] | None = None
    """Parquet, CSV: columns that are keys; lists of keys are features with many keys. Text becomes a number by its
    SHA-256, the same everywhere.
    """
    dense_transform: Literal["log", "none"] = "log"
    """Transform of dense features: ``log``: sign(x) · log(1 + |x|); ``none``: none. Missing numbers are 0."""
    missing_key: int | None = None
    """Key that replaces a missing category; left out: no key, which pools to zeros."""
    malformed_limit: Annotated[int, Field(ge=0)] = 0
    """Rows that may be skipped because they cannot be read; one more is an error that names file and line."""
    shuffle: bool = False
    """Read the rows of each epoch in an order drawn from (seed, epoch); false: in the order of the log, which is that
    of time.
    """
    epochs: Count | None = None
    """Passes over the rows, after which ranks get empty batches; left out: without end."""
    workers: Count = 1
    """Threads of each rank that read ahead."""
    cache: str | None = None
    """Folder that keeps converted text and Parquet; left out: ``cache`` inside the run folder."""
    synthetic: SyntheticPolicy = SyntheticPolicy()
    """Click log of ``source: synthetic``; another source ignores it, so that ``--set data.source=FILE`` is enough."""

    @model_validator(mode="after")
    def _check(self) -> "ClickPolicy":
        if (self.dense is None) != (self.sparse is None):
            raise ValueError("dense and sparse name the columns together; give both lists, or neither")
        return self
