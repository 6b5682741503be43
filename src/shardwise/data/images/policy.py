"""Where pictures come from: the keys of ``data:`` for models of images.

data: {kind: images, source: cifar-10-batches-bin}              # CIFAR's binary files
data: {kind: images, source: imagenet, crop: resized}           # a folder for each class, in train/ and val/ or alone
data: {kind: images, synthetic: {samples: 4096, classes: 10}}   # computed, with planted classes

The built-in models of images read pictures, so beside them ``kind`` may be left out.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shardwise.plan.policy import Policy

SYNTHETIC = "synthetic"

Channels = tuple[float, float, float]
Area = Annotated[float, Field(gt=0, le=1)]


class SyntheticImagePolicy(Policy):
    """Pictures that are computed: each class has a pattern, and every picture shows its own moved about, with noise."""

    samples: PositiveInt = 10_000
    """Pictures to learn from; those for validation follow them."""
    validation_samples: PositiveInt = 1_000
    """Pictures held out."""
    classes: Annotated[int, Field(ge=2)] = 10
    """Planted classes, all as frequent."""
    noise: Annotated[float, Field(ge=0)] = 32.0
    """Standard deviation of the noise on each channel of a pixel, of 255."""
    seed: int = 0
    """Names the set: another seed has other patterns."""


class ImagePolicy(Policy):
    """Where pictures come from, in which order they are read, and how a picture becomes a sample."""

    kind: Literal["images"] = "images"
    """Tells pictures from text and clicks."""
    source: str | Annotated[list[str], Field(min_length=1)] = SYNTHETIC
    """``synthetic``; a folder with CIFAR's binary files (``data_batch_*.bin``, or ``train.bin`` of CIFAR-100), or a
    list of such files; a folder of pictures with a folder for each class, or with such folders in ``train`` and
    ``val``. A folder called synthetic is written ``./synthetic``."""
    validation: Annotated[float, Field(ge=0, lt=1)] | str | list[str] | None = None
    """Share of the pictures that is held out (0: none), or a source of its own; left out: what the source has for it
    (``test_batch.bin``, ``test.bin``, ``val``), else a tenth."""
    validation_samples: PositiveInt | None = None
    """At most this many held-out pictures, evenly spread, are used in one evaluation; left out: all of them."""
    labels: Literal["fine", "coarse"] = "fine"
    """CIFAR-100: 100 classes, or the 20 that they fall into."""
    size: PositiveInt | None = None
    """Side of the pictures that the model is given, in pixels; left out: ``model.size``, and 224 for a model of your
    own."""
    crop: Literal["pad", "resized", "none"] = "pad"
    """In training. ``pad``: the shorter side is made ``size``, and a square is cut out at a random place after
    ``padding`` black pixels were put around; ``resized``: a random rectangle of ``crop_area`` is made a square (as is
    usual for ImageNet); ``none``: the middle. Evaluations see the middle: of the shorter side, with ``resized`` of
    8/7 ``size``."""
    padding: Annotated[int, Field(ge=0)] = 4
    """Pixels around a picture before a square is cut out of it (``crop: pad``)."""
    crop_area: tuple[Area, Area] = (0.08, 1.0)
    """Least and largest share of a picture that is cut out (``crop: resized``)."""
    flip: bool = True
    """Mirror every second picture left to right, by chance, in training."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Taken from red, green and blue, which lie between 0 and 1."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Red, green and blue are divided by it after that."""
    shuffle: bool = True
    """Read the pictures of each epoch in an order drawn from (seed, epoch); false: as they lie."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Processes of each rank that decode and augment ahead; 0: a thread."""
    synthetic: SyntheticImagePolicy = SyntheticImagePolicy()
    """What ``source: synthetic`` is."""

    @model_validator(mode="after")
    def _check(self) -> "ImagePolicy":
        if self.crop_area[0] > self.crop_area[1]:
            raise ValueError(f"crop_area is {list(self.crop_area)}; the least share comes first")
        return self
