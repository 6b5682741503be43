"""Click logs: labels, numbers and keys by feature; from files or computed, to the batches of every rank.

``build_clicks`` opens what ``data:`` names; ``ClickDataset`` is a dataset for ``Loader`` and ``evaluation_batches``;
``convert_clicks`` makes packed files.
"""

from shardwise.data.clicks.build import ClickColumns, ClickCorpus, build_clicks, columns_of, convert_clicks
from shardwise.data.clicks.criteo import read_criteo
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.packed import PackedClicks, PackedWriter
from shardwise.data.clicks.parquet import parquet_schema, read_parquet
from shardwise.data.clicks.policy import ClickPolicy, SyntheticPolicy
from shardwise.data.clicks.rows import (
    CRITEO,
    BatchForm,
    ClickBatch,
    ClickRows,
    ClickSchema,
    FeatureKeys,
    SparseFeature,
)
from shardwise.data.clicks.source import ClickDataset, RowSource
from shardwise.data.clicks.synthetic import SyntheticClicks, TeacherScores

__all__ = [
    "CRITEO",
    "BatchForm",
    "TeacherScores",
    "ClickBatch",
    "ClickColumns",
    "ClickCorpus",
    "ClickPolicy",
    "ClickDataset",
    "SparseFeature",
    "FeatureKeys",
    "MalformedRows",
    "PackedClicks",
    "PackedWriter",
    "RowSource",
    "ClickRows",
    "ClickSchema",
    "SyntheticClicks",
    "SyntheticPolicy",
    "build_clicks",
    "columns_of",
    "convert_clicks",
    "parquet_schema",
    "read_criteo",
    "read_parquet",
]
