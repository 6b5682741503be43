"""Pictures in folders: one folder for each class, named as the class; labels follow the order of names.

Pillow decodes files when they are read. Files whose ending is not that of a picture are left out; a file that is cut
short or damaged ends the run with an error that contains its path.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular
from shardwise.base.words import in_words
from shardwise.data.images.pictures import Pictures, Pixels

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats of these endings: the library reads others too, one of them by running another program."""
_PIXEL_LIMIT = 64_000_000
_DENSE_PIXELS = 24_000_000
"""Number of pixels above which a picture must have at least a byte for each ``_PIXELS_A_BYTE``, as photographs and
scans have.
"""
_PIXELS_A_BYTE = 256
_STRIP_PIXELS = 1 << 20


class PictureFolders(Pictures):
    """Pictures below ``root``, in the order of classes and of their paths.

    Args:
        root: folder with a folder for each class.

    Raises:
        DataError: if there are no pictures, or if a class has none.
    """

    def __init__(self, root: Path) -> None:
        try:
            folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[:1] != ".")
        except OSError as error:
            raise DataError(f"data source {in_words(error)}") from None
        found = {folder: _pictures_in(folder) for folder in folders}
        empty = [folder for folder, paths in found.items() if not paths]
        if not found or len(empty) == len(found):
            raise DataError(
                f"data source {root} has no pictures: expected a folder for each class with pictures in it "
                f"({', '.join(sorted(ENDINGS))}), or CIFAR's binary files"
            )
        if empty:
            raise DataError(
                f"data source {root}: the folder of class {empty[0].name!r} has no picture; remove it"
            )
        self._root = root
        self._paths = [path for paths in found.values() for path in paths]
        self.class_names = tuple(folder.name for folder in found)
        self.labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found.values()])

    def picture(self, index: int) -> Pixels:
        """Return the pixels of a picture of any size, converted to RGB.

        Raises:
            DataError: if the picture is too large or cannot be decoded.
        """
        from PIL import Image

        path = self._paths[index]
        try:
            with open_regular(path) as file, Image.open(file, formats=_FORMATS) as opened:
                # Only the header has been read, so the check comes before any pixel is decoded.
                _check_size(path, opened.size, os.fstat(file.fileno()).st_size)
                return _as_rgb(opened)
        except DataError:
            raise
        except Exception as error:  # the library raises many kinds of exceptions for damaged files
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError(
                f"picture {path} cannot be decoded ({said[:200]}); it is cut short or damaged: replace or remove it"
            ) from None

    def fingerprint(self) -> str:
        """Return a digest of the sizes and of the paths inside the source."""
        digest = hashlib.sha256()
        for path in self._paths:
            inside = os.fsencode(path.relative_to(self._root).as_posix())
            digest.update(inside + f"\0{path.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]


def _check_size(path: Path, size: tuple[int, int], file_bytes: int) -> None:
    """Refuse a picture that would take much more memory than its file.

    Raises:
        DataError: if the picture has too many pixels, or many pixels and few bytes.
    """
    pixels = size[0] * size[1]
    what = f"picture {path} has {size[0]} x {size[1]} pixels"
    if pixels > _PIXEL_LIMIT:
        raise DataError(f"{what}, and at most {_PIXEL_LIMIT} are decoded; scale it down, or remove it")
    if pixels > max(_DENSE_PIXELS, _PIXELS_A_BYTE * file_bytes):
        raise DataError(
            f"{what} in {file_bytes} bytes, as no photograph has: decoding it would take {7 * pixels >> 20} MiB; scale "
            "it down, or remove it"
        )


def _as_rgb(opened: Any) -> Pixels:
    """Decode a picture in strips; one strip is in memory beside the picture and the result."""
    width, height = opened.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // max(1, width))
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = np.asarray(opened.crop((0, top, width, bottom)).convert("RGB"))
    return pixels


def _pictures_in(folder: Path) -> list[Path]:
    """Return the pictures below a folder at any depth, sorted by path."""
    return sorted(
        Path(inside, name)
        for inside, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and os.path.splitext(name)[1].lower() in ENDINGS
    )
