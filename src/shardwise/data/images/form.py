"""Conversion of a picture to a sample: cropped, mirrored, resized and normalised.

    training      crop pad        shorter side S, P black pixels around, a square of S at a random place
                  crop resized    a random rectangle of a share of the area and of 3/4 to 4/3, made S x S
                                  then mirrored by chance
    evaluation    the middle square of S; of the shorter side S, or 8/7·S with crop resized

    value = (byte / 255 - mean) / std, fp32

The random numbers of a sample depend on (seed, position) only (placed.py). Papers: He et al. 2015, arXiv:1512.03385,
4.2; Szegedy et al. 2014, arXiv:1409.4842 (resized).
Shapes: B batch, S side.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.data.images.pictures import Pictures, Pixels
from shardwise.data.images.policy import ImagePolicy
from shardwise.data.placed import PlacedDataset, PositionedSample, draws_at

_TRIES = 10
"""Number of rectangles that are drawn until one fits into the picture."""
_ASPECT = 4 / 3


class ImageBatch(NamedTuple):
    """Arguments of a model: ``model(images, labels)``, or ``model(images)`` for its outputs."""

    images: Tensor | None
    """Pictures: [B, 3, S, S], fp32; None on a rank whose stages read only labels."""
    labels: Tensor
    """Classes: [B], int64."""


class ImageSamples(PlacedDataset):
    """Some pictures of a source as samples of one size.

    Args:
        pictures: the source.
        chosen: indices of the pictures.
        policy: the policy.
        size: side of a sample in pixels, S.
        augments: True in training, False in evaluation.
    """

    def __init__(
        self,
        pictures: Pictures,
        chosen: npt.NDArray[np.int64],
        policy: ImagePolicy,
        size: int,
        augments: bool,
    ) -> None:
        self.pictures, self._chosen, self._policy = pictures, chosen, policy
        self._size, self._augments = size, augments
        self._scale = (1 / (255 * np.array(policy.std))).astype(np.float32)
        self._offset = (np.array(policy.mean) / np.array(policy.std)).astype(np.float32)

    def __len__(self) -> int:
        return len(self._chosen)

    def batch(self, places: Sequence[PositionedSample], key: int) -> ImageBatch:
        """Return the samples at these places; see ``PlacedDataset.batch``."""
        pixels = np.empty((len(places), self._size, self._size, 3), dtype=np.uint8)
        for row, place in zip(pixels, places, strict=True):
            picture = self.pictures.picture(int(self._chosen[place.sample]))
            row[:] = (
                self._drawn(picture, draws_at(key, place.position))
                if self._augments
                else self._middle(picture)
            )
        labels = self.labels(places)
        values = np.empty((len(places), 3, self._size, self._size), dtype=np.float32)
        np.multiply(pixels.transpose(0, 3, 1, 2), self._scale[:, None, None], out=values)
        values -= self._offset[:, None, None]
        return ImageBatch(torch.from_numpy(values), torch.from_numpy(labels))

    def labels(self, places: Sequence[PositionedSample]) -> npt.NDArray[np.int64]:
        """Return the labels of the samples at these places: [B]."""
        return self.pictures.labels[self._chosen[[place.sample for place in places]]]

    def fingerprint(self) -> str:
        """Return the fingerprint of the source with number and size of the samples."""
        return f"{self.pictures.fingerprint()}-{len(self._chosen)}-{self._size}"

    def _drawn(self, picture: Pixels, draws: np.random.Generator) -> Pixels:
        crop, size = self._policy.crop, self._size
        if crop == "resized":
            picture = resized(picture, rectangle(picture.shape, self._policy.crop_area, draws), (size, size))
        elif crop == "pad":
            picture = padded(to_shorter_side(picture, size), self._policy.padding)
            top, left = (int(draws.integers(0, side - size + 1)) for side in picture.shape[:2])
            picture = picture[top : top + size, left : left + size]
        else:
            picture = self._middle(picture)
        return picture[:, ::-1] if self._policy.flip and draws.random() < 0.5 else picture

    def _middle(self, picture: Pixels) -> Pixels:
        size = self._size
        shorter = size + size // 7 if self._policy.crop == "resized" else size
        picture = to_shorter_side(picture, shorter)
        top, left = ((side - size) // 2 for side in picture.shape[:2])
        return picture[top : top + size, left : left + size]


class LabelsOnly(PlacedDataset):
    """Labels of samples, for a rank of a pipeline whose stages read no picture.

    The first batches have pictures, because a run's first step is compared with the uncut model.

    Args:
        samples: the samples.
        whole: number of batches that have pictures.
    """

    is_cheap = True

    def __init__(self, samples: ImageSamples, whole: int = 0) -> None:
        self._samples, self._whole = samples, whole

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, places: Sequence[PositionedSample], key: int) -> ImageBatch:
        """Return the labels at these places, with pictures in the first batches; see ``PlacedDataset.batch``."""
        if self._whole:
            self._whole -= 1
            return self._samples.batch(places, key)
        return ImageBatch(None, torch.from_numpy(self._samples.labels(places)))

    def fingerprint(self) -> str:
        """Return the fingerprint of the samples."""
        return self._samples.fingerprint()


class CropBox(NamedTuple):
    """Rectangle in pixels, in Pillow's order."""

    left: int
    top: int
    right: int
    bottom: int


def rectangle(shape: Sequence[int], area: tuple[float, float], draws: np.random.Generator) -> CropBox:
    """Draw a rectangle of a share in ``area`` and an aspect ratio in [3/4, 4/3].

    If no drawn rectangle fits, the result is the middle of the picture, as large as the aspect ratios allow.
    """
    height, width = shape[:2]
    for _ in range(_TRIES):
        wanted = height * width * draws.uniform(*area)
        aspect = math.exp(draws.uniform(-math.log(_ASPECT), math.log(_ASPECT)))
        across, down = round(math.sqrt(wanted * aspect)), round(math.sqrt(wanted / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(draws.integers(0, width - across + 1)), int(draws.integers(0, height - down + 1))
            return CropBox(left, top, left + across, top + down)
    across, down = min(width, round(height * _ASPECT)), min(height, round(width * _ASPECT))
    left, top = (width - across) // 2, (height - down) // 2
    return CropBox(left, top, left + across, top + down)


def resized(picture: Pixels, box: CropBox, size: tuple[int, int]) -> Pixels:
    """Return the rectangle ``box`` of a picture at another size (width, height), bilinear and antialiased."""
    from PIL import Image

    made = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR, box=box)
    return np.asarray(made)


def to_shorter_side(picture: Pixels, side: int) -> Pixels:
    """Return the picture resized to a shorter side of ``side`` pixels."""
    height, width = picture.shape[:2]
    shorter = min(height, width)
    if shorter == side:
        return picture
    size = (max(round(width * side / shorter), side), max(round(height * side / shorter), side))
    return resized(np.ascontiguousarray(picture), CropBox(0, 0, width, height), size)


def padded(picture: Pixels, width: int) -> Pixels:
    """Return the picture with ``width`` black pixels on all sides."""
    height, across = picture.shape[:2]
    out = np.zeros((height + 2 * width, across + 2 * width, 3), dtype=np.uint8)
    out[width : width + height, width : width + across] = picture
    return out
