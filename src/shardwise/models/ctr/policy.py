"""The shapes of the click-through models: what stands under ``model:``.

model: {name: dlrm, width: 16, bottom: [64], top: [128, 64]}
model: {name: dcn, width: 16, cross_layers: 3, rank: 64, hidden: [256, 128]}

The tables follow from the features of the data; ``tables:`` says what differs.
"""

from typing import Literal

from pydantic import PositiveInt

from shardwise.plan.policy import Policy

Layers = tuple[PositiveInt, ...]


class LogisticRegressionPolicy(Policy):
    """The shape of a :class:`LogisticRegression`."""

    name: Literal["logistic_regression"] = "logistic_regression"
    """Which of the models that come with the package."""


class WideDeepPolicy(Policy):
    """The shape of a :class:`WideDeep`."""

    name: Literal["wide_deep"] = "wide_deep"
    """Which of the models that come with the package."""
    width: PositiveInt = 16
    """Numbers of a key's vector; its weight in the wide part comes on top."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part."""


class DeepFmPolicy(Policy):
    """The shape of a :class:`DeepFm`."""

    name: Literal["deepfm"] = "deepfm"
    """Which of the models that come with the package."""
    width: PositiveInt = 16
    """Numbers of a key's vector; its weight of first order comes on top."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part."""


class DcnPolicy(Policy):
    """The shape of a :class:`Dcn`."""

    name: Literal["dcn"] = "dcn"
    """Which of the models that come with the package."""
    width: PositiveInt = 16
    """Numbers of a key's vector."""
    cross_layers: PositiveInt = 3
    """Layers that multiply by the input: the highest order of products is one more."""
    rank: PositiveInt | None = None
    """Matrices of the cross layers as products of two thin ones with so many columns; left out: whole matrices."""
    hidden: Layers = (128, 64)
    """Outputs of each layer of the deep part; none: the cross layers alone."""
    structure: Literal["stacked", "parallel"] = "stacked"
    """The deep part reads what the cross layers give, or the same input as they."""


class DlrmPolicy(Policy):
    """The shape of a :class:`Dlrm`."""

    name: Literal["dlrm"] = "dlrm"
    """Which of the models that come with the package."""
    width: PositiveInt = 16
    """Numbers of a key's vector, and outputs of the bottom part's last layer, which is added to ``bottom``."""
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
"""By the word under ``model.name``."""
