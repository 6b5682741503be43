"""The construction of a click-through model from a policy and the columns of the data."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.data.clicks.rows import ClickSchema
from shardwise.models.ctr.dcn import Dcn
from shardwise.models.ctr.deepfm import DeepFm
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.logistic_regression import LogisticRegression
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import (
    CTR_POLICIES,
    CtrPolicy,
    DcnPolicy,
    DeepFmPolicy,
    LogisticRegressionPolicy,
    WideDeepPolicy,
)
from shardwise.models.ctr.tables import tables_for
from shardwise.models.ctr.wide_deep import WideDeep
from shardwise.parallel.embedding.policy import (
    DynamicPolicy,
    RowOptimizerPolicy,
    TablePolicy,
    TablesPolicy,
)


def build_ctr(
    policy: CtrPolicy,
    schema: ClickSchema,
    tables: TablesPolicy | None = None,
    rows: Mapping[str, int] | None = None,
    seed: int = 0,
) -> ClickModel:
    """Build the model that ``policy`` describes.

    Args:
        policy: The keys under ``model:``.
        schema: The columns of the data.
        tables: The keys under ``tables:``.
        rows: The number of rows of each feature whose keys are 0 to rows - 1.
        seed: The seed of the initial weights.

    Raises:
        ConfigError: if ``tables`` names a feature that the data does not have.
    """
    tables = tables or TablesPolicy()
    made = tables_for(schema, row_width(policy), tables, rows)
    return click_model(policy, len(schema.dense), made, tables.optimizer, seed)


def click_model(
    policy: CtrPolicy,
    dense: int,
    tables: Sequence[TablePolicy],
    optimizer: RowOptimizerPolicy | None = None,
    seed: int = 0,
) -> ClickModel:
    """Build the model that ``policy`` describes, with given tables; the arguments are those of :class:`ClickModel`."""
    given = (dense, tables, optimizer, seed)
    if isinstance(policy, LogisticRegressionPolicy):
        return LogisticRegression(policy, *given)
    if isinstance(policy, WideDeepPolicy):
        return WideDeep(policy, *given)
    if isinstance(policy, DeepFmPolicy):
        return DeepFm(policy, *given)
    if isinstance(policy, DcnPolicy):
        return Dcn(policy, *given)
    return Dlrm(policy, *given)


_READ = ("name", "width", "rows", "features", "pooling", "out_of_range")
"""The fields of a table that reading it depends on."""


def described(model: nn.Module) -> dict[str, Any] | None:
    """Return what :func:`from_description` builds the model from, as JSON values; None if the model is not built in."""
    if not isinstance(model, ClickModel):
        return None
    dumped = [table.model_dump(mode="json", exclude_none=True) for table in model.tables.tables]
    tables = [{key: table[key] for key in _READ if key in table} for table in dumped]
    return {"model": model.policy.model_dump(mode="json"), "dense": model.dense, "tables": tables}


def from_description(description: Mapping[str, Any]) -> ClickModel:
    """Build a model from what :func:`described` returned.

    Raises:
        pydantic.ValidationError: if a value does not fit.
    """
    policy = CTR_POLICIES[str(description["model"]["name"])].model_validate(description["model"])
    tables = [
        TablePolicy.model_validate(table if "rows" in table else {**table, "dynamic": DynamicPolicy()})
        for table in description["tables"]
    ]
    return click_model(policy, int(description["dense"]), tables)


def row_width(policy: CtrPolicy) -> int:
    """Return the numbers in a row of a table."""
    if isinstance(policy, LogisticRegressionPolicy):
        return 1
    return policy.width + isinstance(policy, WideDeepPolicy | DeepFmPolicy)
