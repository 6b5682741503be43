"""Pictures in folders that are named after their classes."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwise.base.errors import DataError
from shardwise.data.images import ImagePolicy, build_images
from shardwise.data.images.folders import PictureFolders
from shardwise.data.placed import PositionedSample


def folders(root: Path, side: int = 10) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            value = 100 * (name == "dog") + 10 * number
            Image.fromarray(np.full((side, side + 4, 3), value, dtype=np.uint8)).save(
                root / name / f"{number}.png"
            )
    return root


def test_pictures_in_folders(tmp_path: Path) -> None:
    corpus = build_images(ImagePolicy(source=str(folders(tmp_path)), validation=0.3, workers=0), 8)
    pictures, held_out = corpus.train.pictures, corpus.validation
    assert corpus.class_names == ("cat", "dog") and pictures.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert pictures.picture(4).tolist() == np.full((10, 14, 3), 110).tolist()
    assert held_out is not None and (len(corpus.train), len(held_out)) == (4, 2)
    images, labels = held_out.batch([PositionedSample(0, 0), PositionedSample(1, 1)], 0)
    assert images.shape == (2, 3, 8, 8) and labels.shape == (2,)


def test_held_out_folders_beside(tmp_path: Path) -> None:
    folders(tmp_path / "train")
    folders(tmp_path / "val")
    corpus = build_images(ImagePolicy(source=str(tmp_path)), 8)
    assert len(corpus.train) == 6 and len(corpus.validation or ()) == 6


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
