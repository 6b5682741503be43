"""CIFAR's binary files: pictures, fine and coarse labels, and what is held out."""

from pathlib import Path

import numpy as np
import pytest

from shardwise.data.images import ImagePolicy, build_images
from shardwise.data.placed import PositionedSample


def records(path: Path, labels: list[list[int]], seed: int = 0) -> np.ndarray:
    """A CIFAR file; returns its bytes, a row a record."""
    rows = np.random.default_rng(seed).integers(0, 256, (len(labels), len(labels[0]) + 3072), dtype=np.uint8)
    rows[:, : len(labels[0])] = labels
    path.write_bytes(rows.tobytes())
    return rows


def test_cifar_10_over_several_files(tmp_path: Path) -> None:
    first = records(tmp_path / "data_batch_1.bin", [[3], [9]])
    second = records(tmp_path / "data_batch_2.bin", [[0]], seed=1)
    held_out = records(tmp_path / "test_batch.bin", [[5]], seed=2)
    corpus = build_images(ImagePolicy(source=str(tmp_path), mean=(0, 0, 0), std=(1, 1, 1)), 32)
    pictures = corpus.train.pictures
    assert pictures.labels.tolist() == [3, 9, 0] and len(corpus.class_names) == 10
    for index, row in enumerate((first[0], first[1], second[0])):
        picture = pictures.picture(index)
        assert picture.shape == (32, 32, 3)
        assert picture[2, 5].tolist() == [int(row[1 + channel * 1024 + 2 * 32 + 5]) for channel in range(3)]
    assert corpus.validation is not None
    images, labels = corpus.validation.batch([PositionedSample(0, 0)], 0)
    assert labels.tolist() == [5]
    assert images.flatten().numpy() == pytest.approx(held_out[0, 1:] / 255, abs=1e-6)


@pytest.mark.parametrize(("labels", "expected"), [("fine", ([70, 99], 100)), ("coarse", ([4, 19], 20))])
def test_cifar_100(tmp_path: Path, labels: str, expected: tuple[list[int], int]) -> None:
    records(tmp_path / "train.bin", [[4, 70], [19, 99]])
    corpus = build_images(ImagePolicy(source=str(tmp_path), labels=labels, validation=0), 32)  # type: ignore[arg-type]
    assert (corpus.train.pictures.labels.tolist(), len(corpus.class_names)) == expected
    assert corpus.validation is None
