"""The policies of the models of images, for the keys under ``model:``.

model: {name: resnet, depth: 50}                              # the paper's shape, for pictures of 224 pixels
model: {name: resnet, depth: 18, width: 16, size: 32}         # one for a CPU
model: {name: alexnet, width: 16, hidden: 256, size: 64}

The number of classes follows from the data.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from shardwise.base.policy import Policy

_LEAST_ALEXNET = 63
"""The smallest side in pixels of which AlexNet's strides and pools leave one pixel."""


class AlexNetPolicy(Policy):
    """The shape of an AlexNet, a list of layers that a pipeline cuts anywhere."""

    name: Literal["alexnet"] = "alexnet"
    """The name of the built-in model."""
    size: Annotated[int, Field(ge=_LEAST_ALEXNET)] = 224
    """Side of the pictures, in pixels."""
    width: PositiveInt = 64
    """Channels of the first convolution; the others have 3, 6, 4 and 4 times as many."""
    hidden: PositiveInt = 4096
    """Features between the three matrices at the end."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The share of features zeroed before the first two matrices at the end, in training."""
    classes: PositiveInt | None = None
    """Outputs of the model; left out: the classes of the data."""


class ResNetPolicy(Policy):
    """The shape of a :class:`ResNet`."""

    name: Literal["resnet"] = "resnet"
    """The name of the built-in model."""
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers with weights: 18 and 34 have blocks of two convolutions, the others of three."""
    size: Annotated[int, Field(ge=8)] = 224
    """Side of the pictures, in pixels."""
    width: PositiveInt = 64
    """Channels of the first stage; each of the three other stages has twice as many as the stage before."""
    stem: Literal["imagenet", "cifar"] | None = None
    """The first layers: 7 x 7 with stride 2 and a pool (imagenet), or 3 x 3 with stride 1 and no pool (cifar); left
    out: cifar if ``size`` is at most 64 pixels."""
    classes: PositiveInt | None = None
    """Outputs of the model; left out: the classes of the data."""


ImageModelPolicy = AlexNetPolicy | ResNetPolicy
IMAGE_POLICIES: dict[str, type[ImageModelPolicy]] = {"alexnet": AlexNetPolicy, "resnet": ResNetPolicy}
"""The policy of each word under ``model.name``."""
