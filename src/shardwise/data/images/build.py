"""Builds training and validation pictures from ``data:`` in the configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.base.errors import SourceError
from shardwise.base.regular_files import expanded
from shardwise.data.images.cifar import SIDE, CifarFiles
from shardwise.data.images.folders import PictureFolders
from shardwise.data.images.form import ImageSamples
from shardwise.data.images.pictures import Pictures
from shardwise.data.images.policy import SYNTHETIC, ImagePolicy
from shardwise.data.images.synthetic import SyntheticImages
from shardwise.data.sampler import Permutation

_HELD_OUT = 0.1


@dataclass(frozen=True)
class ImageCorpus:
    """Training pictures and validation pictures of a run."""

    train: ImageSamples
    """Pictures to learn from."""
    validation: ImageSamples | None
    """Pictures to be evaluated on; None if nothing is held out."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of labels."""
        return self.train.pictures.class_names

    def fingerprint(self) -> str:
        """Return a digest that is equal on two ranks that read the same pictures."""
        held_out = "" if self.validation is None else self.validation.fingerprint()
        return f"{self.train.fingerprint()} {held_out}"


class _OpenedImages(NamedTuple):
    train: Pictures
    held_out: Pictures | None


def classes_of(policy: ImagePolicy) -> int:
    """Return the number of classes of the pictures that the policy names, without decoding a picture.

    Raises:
        DataError: if the source has no pictures.
    """
    if policy.source == SYNTHETIC:
        return policy.synthetic.classes
    return len(_found(policy.source, policy, SIDE).train.class_names)


def build_images(policy: ImagePolicy, size: int) -> ImageCorpus:
    """Open the pictures that the policy names, as samples of side ``size``.

    Raises:
        DataError: if the source has no pictures, or if training and validation differ in classes.
    """
    train, held_out = _found(policy.source, policy, size)
    share = policy.validation
    if isinstance(share, str | list):
        held_out = _found(share, policy, size).train
        share = None
    if held_out is not None and share is None:
        if held_out.class_names != train.class_names:
            raise SourceError(
                f"data: the pictures held out have {len(held_out.class_names)} classes and those to learn from "
                f"{len(train.class_names)}, or classes of other names; both need the same"
            )
        return ImageCorpus(
            ImageSamples(train, np.arange(len(train)), policy, size, augments=True),
            ImageSamples(held_out, np.arange(len(held_out)), policy, size, augments=False),
        )
    share = _HELD_OUT if share is None else share
    order = Permutation(len(train), 0, 0)(np.arange(len(train), dtype=np.int64))
    cut = min(max(round(len(train) * share), 1), len(train) - 1) if share else 0
    learnt = ImageSamples(train, np.sort(order[cut:]), policy, size, augments=True)
    if not cut:
        return ImageCorpus(learnt, None)
    return ImageCorpus(learnt, ImageSamples(train, np.sort(order[:cut]), policy, size, augments=False))


def _found(source: str | list[str], policy: ImagePolicy, size: int) -> _OpenedImages:
    if source == SYNTHETIC:
        given = policy.synthetic
        last = given.samples + given.validation_samples
        return _OpenedImages(
            SyntheticImages(given, size, 0, given.samples), SyntheticImages(given, size, given.samples, last)
        )
    if isinstance(source, list):
        return _OpenedImages(CifarFiles([expanded(each) for each in source], policy.labels), None)
    root = expanded(source)
    if not root.exists():
        raise SourceError(
            f"data source {source!r} does not exist; expected synthetic, a folder of pictures or CIFAR's binary files "
            f"(the current folder is {Path.cwd()})"
        )
    if root.is_file():
        return _OpenedImages(CifarFiles([root], policy.labels), None)
    for train, test in (("data_batch_*.bin", "test_batch.bin"), ("train.bin", "test.bin")):
        files, held_out = sorted(root.glob(train)), root / test
        if files:
            return _OpenedImages(
                CifarFiles(files, policy.labels),
                CifarFiles([held_out], policy.labels) if held_out.exists() else None,
            )
    if (root / "train").is_dir():
        held = next((root / name for name in ("val", "validation", "test") if (root / name).is_dir()), None)
        return _OpenedImages(PictureFolders(root / "train"), None if held is None else PictureFolders(held))
    return _OpenedImages(PictureFolders(root), None)
