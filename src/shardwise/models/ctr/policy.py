"""The policies of the click-through models, for the keys under ``model:``.

model: {name: dlrm, width: 16, bottom: [64], top: [128, 64]}
model: {name: dcn, width: 16, cross_layers: 3, rank: 64, hidden: [256, 128]}

The tables follow from the features of the data; ``tables:`` contains what differs.
"""

from typing import Literal

from pydantic import PositiveInt

from shardwise.base.policy import Policy

Layers = tuple[PositiveInt, ...]


class LogisticRegressionPolicy(Policy):
    """The shape of a :class:`LogisticRegression`."""

    name: Literal["logistic_regression"] = "logistic_regression"
    """The name of the built-in model."""


class WideDeepPolicy(Policy):
    """The shape of a :class:`WideDeep`."""

    name: Literal["wide_deep"] = "wide_deep"
    """The name of the built-in model."""
    width: PositiveInt = 16
    """Numbers of a key's vector, without its weight in the wide part."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part."""


class DeepFmPolicy(Policy):
    """The shape of a :class:`DeepFm`."""

    name: Literal["deepfm"] = "deepfm"
    """The name of the built-in model."""
    width: PositiveInt = 16
    """Numbers of a key's vector, without its weight of first order."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part."""


class DcnPolicy(Policy):
    """The shape of a :class:`Dcn`."""

    name: Literal["dcn"] = "dcn"
    """The name of the built-in model."""
    width: PositiveInt = 16
    """Numbers of a key's vector."""
    cross_layers: PositiveInt = 3
    """Layers that multiply by the input; the highest order of products is one more than their number."""
    rank: PositiveInt | None = None
    """The number of columns of the two thin matrices whose product is the matrix of a cross layer; left out: whole
    matrices."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part; an empty list: only cross layers."""
    structure: Literal["stacked", "parallel"] = "stacked"
    """The input of the deep part: the output of the cross layers (stacked), or the same input as theirs (parallel)."""


class DlrmPolicy(Policy):
    """The shape of a :class:`Dlrm`."""

    name: Literal["dlrm"] = "dlrm"
    """The name of the built-in model."""
    width: PositiveInt = 16
    """Numbers of a key's vector, and outputs of the bottom part's last layer, which is appended to ``bottom``."""
    bottom: Layers = (64,)
    """Outputs of each layer between the dense features and their vector."""
    top: Layers = (128, 64)
    """Outputs of each layer between the interaction and the logit."""


CtrPolicy = LogisticRegressionPolicy | WideDeepPolicy | DeepFmPolicy | DcnPolicy | DlrmPolicy
CTR_POLICIES: dict[str, type[CtrPolicy]] = {
    "logistic_regression": LogisticRegressionPolicy,
    "wide_deep": WideDeepPolicy,
    "deepfm": DeepFmPolicy,
    "dcn": DcnPolicy,
    "dlrm": DlrmPolicy,
}
"""The policy of each word under ``model.name``."""
