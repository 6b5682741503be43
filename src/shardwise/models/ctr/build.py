"""The construction of a click-through model from a policy and the columns of the data."""

from collections.abc import Mapping

from shardwise.data.clicks.rows import ClickSchema
from shardwise.models.ctr.dcn import Dcn
from shardwise.models.ctr.deepfm import DeepFm
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.logistic_regression import LogisticRegression
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import (
    CtrPolicy,
    DcnPolicy,
    DeepFmPolicy,
    LogisticRegressionPolicy,
    WideDeepPolicy,
)
from shardwise.models.ctr.tables import tables_for
from shardwise.models.ctr.wide_deep import WideDeep
from shardwise.parallel.embedding.policy import TablesPolicy


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
    given = (len(schema.dense), tables_for(schema, row_width(policy), tables, rows), tables.optimizer, seed)
    if isinstance(policy, LogisticRegressionPolicy):
        return LogisticRegression(policy, *given)
    if isinstance(policy, WideDeepPolicy):
        return WideDeep(policy, *given)
    if isinstance(policy, DeepFmPolicy):
        return DeepFm(policy, *given)
    if isinstance(policy, DcnPolicy):
        return Dcn(policy, *given)
    return Dlrm(policy, *given)


def row_width(policy: CtrPolicy) -> int:
    """Return the numbers in a row of a table."""
    if isinstance(policy, LogisticRegressionPolicy):
        return 1
    return policy.width + isinstance(policy, WideDeepPolicy | DeepFmPolicy)
