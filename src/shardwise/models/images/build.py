"""The construction of a model of images from a policy and the number of classes in the data."""

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.models.images.alexnet import alexnet
from shardwise.models.images.policy import AlexNetPolicy, ImageModelPolicy
from shardwise.models.images.resnet import ResNet


def build_image_model(policy: ImageModelPolicy, classes: int, seed: int = 0) -> nn.Module:
    """Build the model that ``policy`` describes, for data of ``classes`` classes.

    Args:
        policy: The keys under ``model:``.
        classes: The number of classes in the data.
        seed: The seed of the initial weights.

    Raises:
        ConfigError: if the policy gives fewer outputs than the data has classes.
    """
    outputs = policy.classes or classes
    if outputs < classes:
        raise ConfigError(
            f"model.classes is {outputs}, but the data has {classes} classes; leave model.classes out, or set at least "
            f"{classes}"
        )
    if isinstance(policy, AlexNetPolicy):
        return alexnet(policy, outputs, seed)
    return ResNet(policy, outputs, seed)
