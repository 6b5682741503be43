"""The model of a policy: its class, and the width of the rows of its tables."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.models.ctr.build import build_ctr, row_width
from shardwise.models.ctr.dcn import Dcn
from shardwise.models.ctr.deepfm import DeepFm
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.logistic_regression import LogisticRegression
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import CTR_POLICIES, DlrmPolicy
from shardwise.models.ctr.wide_deep import WideDeep
from shardwise.parallel.embedding.policy import TablesPolicy
from tests.models.ctr.parts import SCHEMA, small


@pytest.mark.parametrize(
    ("name", "kind", "keys", "width"),
    [
        ("logistic_regression", LogisticRegression, {}, 1),
        ("wide_deep", WideDeep, {"width": 4}, 5),
        ("deepfm", DeepFm, {"width": 4}, 5),
        ("dcn", Dcn, {"width": 4}, 4),
        ("dlrm", Dlrm, {"width": 4}, 4),
    ],
)
def test_each_policy_has_its_model(name: str, kind: type[ClickModel], keys: dict, width: int) -> None:
    assert type(small(name, **keys)) is kind and row_width(CTR_POLICIES[name](**keys)) == width


def test_a_table_of_a_feature_that_there_is_not_is_refused() -> None:
    tables = TablesPolicy.model_validate({"named": {"shop": {"rows": 3}}})
    with pytest.raises(ConfigError, match="shop"):
        build_ctr(DlrmPolicy(), SCHEMA, tables)
