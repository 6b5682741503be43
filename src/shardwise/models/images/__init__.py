"""Models of images: AlexNet as a list of layers, and ResNet."""

from shardwise.models.images.build import build_image_model

__all__ = ["build_image_model"]
