"""Pictures in folders: cut, changed, of too many pixels, of other formats, no files at all."""

import io
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwise.data.images import ImagePolicy, build_images
from shardwise.data.images.folders import PictureFolders

from .trial import Case, Kind, of_bytes

FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
    "ppm": "PPM",
    "tif": "TIFF",
}


def make(folder: Path) -> Path:
    draws = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "pictures" / name).mkdir(parents=True)
        for ending, form in FORMATS.items():
            pixels = draws.integers(0, 256, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"x.{ending}", form)
    return folder / "pictures"


def read(root: Path) -> Any:
    """All pictures, and a corpus of them."""
    pictures = PictureFolders(root)
    build_images(ImagePolicy(source=str(root), validation=0.3, workers=0), 8)
    return [pictures.picture(index).sum() for index in range(len(pictures.labels))]


def png_of(width: int, height: int, depth: int = 1, colours: int = 0, data: bytes | None = None) -> bytes:
    """A PNG of zeros, which takes little room."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    if data is None:
        row = 1 + -(-width * depth * (3 if colours == 2 else 1) // 8)
        packer = zlib.compressobj(9)
        left, pieces = row * height, []
        while left > 0:
            pieces.append(packer.compress(bytes(min(left, 1 << 20))))
            left -= 1 << 20
        data = b"".join([*pieces, packer.flush()])
    head = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tiff_of(width: int, height: int) -> bytes:
    made = io.BytesIO()
    Image.new("L", (width, height)).save(made, "TIFF", compression="tiff_deflate")
    return made.getvalue()


def cases(count: int) -> Iterator[Case]:
    def instead(name: str, data: bytes, ending: str = "png") -> Case:
        return Case(
            name, lambda root: (root / "cat" / f"x.{ending}").write_bytes(data) and None, may_differ=True
        )

    yield instead("9000 x 9000 in 10 kB", png_of(9000, 9000))
    yield instead("13000 x 13000 in 21 kB", png_of(13000, 13000))
    yield instead("7900 x 7900, colours", png_of(7900, 7900, 8, 2))
    yield instead("4800 x 4800, colours", png_of(4800, 4800, 8, 2))
    yield instead("16 bits", png_of(4800, 4800, 16, 0))
    yield instead("2^31 wide", png_of(2**31 - 1, 1, data=b""))
    yield instead("no size", png_of(0, 0, data=b""))
    yield instead("no pixels", png_of(100, 100, data=b""))
    yield instead("too many bytes", png_of(10, 10, data=zlib.compress(bytes(64 << 20))))
    yield instead("a long name", png_of(10, 10)[:33] + b"\0\0\0\0tEXt" + bytes(100))
    yield instead("tiff of 8000 x 8000", tiff_of(8000, 8000), "tif")
    yield instead("PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    yield instead("text", b"hello")
    yield instead("ppm of 10^9", b"P6 1000000000 1000000000 255\n", "ppm")
    yield instead("ppm of letters", b"P6 x y 255\n", "ppm")
    for number in range(count):
        draws = random.Random(f"pictures {number}")
        ending = draws.choice(list(FORMATS))
        case = of_bytes(draws, lambda root, ending=ending: root / "cat" / f"x.{ending}")
        yield case._replace(name=f"{ending} {case.name}", may_differ=True)


KIND = Kind("pictures", make, read, cases)
