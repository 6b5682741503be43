"""CIFAR's files, folders and the synthetic set: what is read, and one sentence where it cannot be."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwise.base.errors import DataError
from shardwise.data.images import CifarFiles, ImagePolicy, SyntheticImagePolicy, SyntheticImages, build_images
from shardwise.data.images.folders import PictureFolders
from shardwise.data.placed import SampleAt


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
    images, labels = corpus.validation.batch([SampleAt(0, 0)], 0)
    assert labels.tolist() == [5]
    assert images.flatten().numpy() == pytest.approx(held_out[0, 1:] / 255, abs=1e-6)


@pytest.mark.parametrize(("labels", "expected"), [("fine", ([70, 99], 100)), ("coarse", ([4, 19], 20))])
def test_cifar_100(tmp_path: Path, labels: str, expected: tuple[list[int], int]) -> None:
    records(tmp_path / "train.bin", [[4, 70], [19, 99]])
    corpus = build_images(ImagePolicy(source=str(tmp_path), labels=labels, validation=0), 32)  # type: ignore[arg-type]
    assert (corpus.train.pictures.labels.tolist(), len(corpus.class_names)) == expected
    assert corpus.validation is None


def test_pictures_in_folders(tmp_path: Path) -> None:
    corpus = build_images(ImagePolicy(source=str(folders(tmp_path)), validation=0.3, workers=0), 8)
    pictures, held_out = corpus.train.pictures, corpus.validation
    assert corpus.class_names == ("cat", "dog") and pictures.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert pictures.picture(4).tolist() == np.full((10, 14, 3), 110).tolist()
    assert held_out is not None and (len(corpus.train), len(held_out)) == (4, 2)
    images, labels = held_out.batch([SampleAt(0, 0), SampleAt(1, 1)], 0)
    assert images.shape == (2, 3, 8, 8) and labels.shape == (2,)


def test_held_out_folders_beside(tmp_path: Path) -> None:
    folders(tmp_path / "train")
    folders(tmp_path / "val")
    corpus = build_images(ImagePolicy(source=str(tmp_path)), 8)
    assert len(corpus.train) == 6 and len(corpus.validation or ()) == 6


def test_synthetic_pictures_show_their_class() -> None:
    policy = SyntheticImagePolicy(classes=3, noise=0)
    pictures = SyntheticImages(policy, 16, 3, 9)
    assert pictures.labels.tolist() == [0, 1, 2, 0, 1, 2]
    a, b, other = (pictures.picture(index).astype(int) for index in (0, 3, 1))
    # The same pattern moved about has the same values, another pattern has others.
    assert np.array_equal(np.sort(a, None), np.sort(b, None)) and not np.array_equal(a, b)
    assert not np.array_equal(np.sort(a, None), np.sort(other, None))
    assert np.array_equal(SyntheticImages(policy, 16, 0, 9).picture(3), a)


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
        corpus.train.batch([SampleAt(i, i) for i in range(len(corpus.train))], 0)
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


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "RGB", "RGBA", "LA", "I;16", "CMYK"])
def test_pictures_are_read_strip_by_strip(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    given = Image.fromarray(draws.integers(0, 256, (23, 17, 3), dtype=np.uint8)).convert(
        "L" if mode == "I;16" else "P" if mode == "PA" else mode
    )
    if mode == "I;16":
        given = Image.fromarray(draws.integers(0, 65536, (23, 17), dtype=np.uint16))
    if mode in ("P", "PA"):
        given.info["transparency"] = 3
    root = folders(tmp_path)
    path = root / "cat" / ("0.tif" if mode == "CMYK" else "0.png")
    given.save(path)
    monkeypatch.setattr("shardwise.data.images.folders._STRIP_PIXELS", 40)
    with Image.open(path) as opened:
        expected = np.asarray(opened.convert("RGB"))
    found = PictureFolders(root)
    assert found.picture(found._paths.index(path)).tolist() == expected.tolist()


def test_pictures_that_would_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 10 kB took 842 MB, and a FIFO waited for ever."""
    root = folders(tmp_path)
    (root / "cat" / "0.png").unlink()
    os.mkfifo(root / "cat" / "0.png")
    with pytest.raises(DataError, match="0.png cannot be decoded .not a regular file"):
        PictureFolders(root).picture(0)
    Image.new("1", (6000, 5000)).save(root / "cat" / "1.png")
    with pytest.raises(DataError, match=r"6000 x 5000 pixels in \d+ bytes, as no photograph has"):
        PictureFolders(root).picture(1)
    Image.new("1", (100_000, 700)).save(root / "cat" / "2.png")
    with pytest.raises(DataError, match=r"100000 x 700 pixels, and at most 64000000 are decoded"):
        PictureFolders(root).picture(2)
    monkeypatch.setattr("shardwise.data.images.folders._DENSE_PIXELS", 100)
    assert PictureFolders(root).picture(3).shape == (10, 14, 3), "as dense as pictures are"


def test_a_picture_is_of_the_formats_of_the_endings(tmp_path: Path) -> None:
    """What an ending calls a PNG may be PostScript, for which the library runs another program."""
    root = folders(tmp_path)
    (root / "cat" / "0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(DataError, match="cannot be decoded"):
        PictureFolders(root).picture(0)
