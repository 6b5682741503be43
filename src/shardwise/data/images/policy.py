"""Policy of pictures: the keys of ``data:`` for models of images.

data: {kind: images, source: cifar-10-batches-bin}              # CIFAR's binary files
data: {kind: images, source: imagenet, crop: resized}           # a folder for each class, in train/ and val/ or alone
data: {kind: images, synthetic: {samples: 4096, classes: 10}}   # computed, with planted classes

The built-in models of images read pictures, so beside them ``kind`` may be left out.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shardwise.base.policy import Policy

SYNTHETIC = "synthetic"

Channels = tuple[float, float, float]
Area = Annotated[float, Field(gt=0, le=1)]


class SyntheticImagePolicy(Policy):
    """Computed pictures: each class has a pattern, and every picture shows its class's pattern shifted, with noise."""

    samples: PositiveInt = 10_000
    """Pictures to learn from; the validation pictures follow them."""
    validation_samples: PositiveInt = 1_000
    """Validation pictures, which are held out."""
    classes: Annotated[int, Field(ge=2)] = 10
    """Planted classes, all equally frequent."""
    noise: Annotated[float, Field(ge=0)] = 32.0
    """Standard deviation of the noise on each channel of a pixel, on the scale of 0 to 255."""
    seed: int = 0
    """Seed of the set: another seed has other patterns."""


class ImagePolicy(Policy):
    """Source of the pictures, the order in which they are read, and their conversion to samples."""

    kind: Literal["images"] = "images"
    """Distinguishes pictures from text and clicks."""
    source: str | Annotated[list[str], Field(min_length=1)] = SYNTHETIC
    """``synthetic``; a folder with CIFAR's binary files (``data_batch_*.bin``, or ``train.bin`` of CIFAR-100), or a
    list of such files; a folder of pictures with a folder for each class, or with such folders in ``train`` and
    ``val``. A folder called synthetic is written ``./synthetic``.
    """
    validation: Annotated[float, Field(ge=0, lt=1)] | str | list[str] | None = None
    """Share of the pictures that is held out (0: none), or a separate source; left out: the validation set of the
    source (``test_batch.bin``, ``test.bin``, ``val``), else a tenth.
    """
    validation_samples: PositiveInt | None = None
    """Largest number of held-out pictures, evenly spread, that one evaluation uses; left out: all of them."""
    labels: Literal["fine", "coarse"] = "fine"
    """Labels of CIFAR-100: its 100 classes, or the 20 groups of them."""
    size: PositiveInt | None = None
    """Side in pixels of the pictures that the model is given; left out: ``model.size``, and 224 for a model of your
    own.
    """
    crop: Literal["pad", "resized", "none"] = "pad"
    """Cropping in training. ``pad``: the shorter side is resized to ``size``, ``padding`` black pixels are added
    around, and a square is cut out at a random place; ``resized``: a random rectangle of ``crop_area`` is resized to a
    square (as is usual for ImageNet); ``none``: the middle. Evaluations use the middle: of the shorter side, with
    ``resized`` of 8/7 ``size``.
    """
    padding: Annotated[int, Field(ge=0)] = 4
    """Pixels that are added around a picture before a square is cut out of it (``crop: pad``)."""
    crop_area: tuple[Area, Area] = (0.08, 1.0)
    """Smallest and largest share of a picture that is cut out (``crop: resized``)."""
    flip: bool = True
    """Mirror pictures left to right with probability one half in training."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean that is subtracted from red, green and blue, which lie between 0 and 1."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation by which red, green and blue are divided after that."""
    shuffle: bool = True
    """Read the pictures of each epoch in an order drawn from (seed, epoch); false: in the order of the source."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Processes of each rank that decode and augment ahead; 0: a thread."""
    synthetic: SyntheticImagePolicy = SyntheticImagePolicy()
    """Pictures of ``source: synthetic``."""

    @model_validator(mode="after")
    def _check(self) -> "ImagePolicy":
        if self.crop_area[0] > self.crop_area[1]:
            raise ValueError(f"crop_area is {list(self.crop_area)}; the least share comes first")
        return self
