"""What pictures are read from: one sentence where that cannot be."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwise.base.errors import DataError
from shardwise.data.images import CifarFiles, ImagePolicy, build_images
from shardwise.data.images.folders import PictureFolders
from shardwise.data.placed import PositionedSample


def records(path: Path, labels: list[list[int]], seed: int = 0) -> np.ndarray:
    """A CIFAR file; returns its bytes, a row a record."""
    rows = np.random.default_rng(seed).integers(0, 256, (len(labels), len(labels[0]) + 3072), dtype=np.uint8)
    rows[:, : len(labels[0])] = labels
    path.write_bytes(rows.tobytes())
    return rows


def folders(root: Path, side: int = 10) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            value = 100 * (name == "dog") + 10 * number
            Image.fromarray(np.full((side, side + 4, 3), value, dtype=np.uint8)).save(
                root / name / f"{number}.png"
            )
    return root


def cut_short(folder: Path) -> Path:
    records(folder / "data_batch_1.bin", [[1], [2]])
    path = folder / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-100])
    return path


def wrong_label(folder: Path) -> Path:
    records(folder / "data_batch_1.bin", [[1], [12]])
    return folder / "data_batch_1.bin"


def truncated(folder: Path) -> Path:
    path = folders(folder) / "dog" / "1.png"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (cut_short, "has 6046 bytes, which is no multiple of the 3073 bytes of a CIFAR record"),
        (wrong_label, "record 1 has the label 12, but CIFAR-10 has classes 0 to 9"),
        (truncated, "cannot be decoded"),
    ],
)
def test_one_sentence_names_the_file(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError, match=said) as caught:
        corpus = build_images(ImagePolicy(source=str(tmp_path), validation=0), 32)
        corpus.train.batch([PositionedSample(i, i) for i in range(len(corpus.train))], 0)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_sources_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="expected a folder for each class with pictures"):
        PictureFolders(tmp_path)
    folders(tmp_path / "two")
    (tmp_path / "two" / "emu").mkdir()
    with pytest.raises(DataError, match="class 'emu' has no picture"):
        PictureFolders(tmp_path / "two")
    with pytest.raises(DataError, match="does not exist"):
        build_images(ImagePolicy(source=str(tmp_path / "none")), 32)
    records(tmp_path / "data_batch_1.bin", [[1]])
    records(tmp_path / "train.bin", [[1, 1]])
    with pytest.raises(DataError, match="files of one kind"):
        CifarFiles([tmp_path / "data_batch_1.bin", tmp_path / "train.bin"])
