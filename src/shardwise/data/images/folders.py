"""Pictures in folders: a folder for each class, whose name is the class's; classes count in the order of names.

Files are decoded when they are read, by Pillow. What is no picture by its name's ending is left out; what is cut short
or damaged ends the run with its path.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from shardwise.data.images.pictures import Pictures, Pixels
from shardwise.plan.errors import DataError
from shardwise.plan.words import in_words

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})


class PictureFolders(Pictures):
    """The pictures below ``root``, in the order of classes and of their paths."""

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
        """Of any size, whatever its colours were."""
        from PIL import Image

        path = self._paths[index]
        try:
            with Image.open(path) as opened:
                return np.asarray(opened.convert("RGB"))
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            Image.DecompressionBombError,
        ) as error:  # the library's ways to say that bytes are wrong
            raise DataError(
                f"picture {path} cannot be decoded ({str(error)[:200]}); it is cut short or damaged: replace or remove "
                "it"
            ) from None

    def fingerprint(self) -> str:
        """By paths inside the source and sizes."""
        digest = hashlib.sha256()
        for path in self._paths:
            inside = os.fsencode(path.relative_to(self._root).as_posix())
            digest.update(inside + f"\0{path.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]


def _pictures_in(folder: Path) -> list[Path]:
    """At any depth."""
    return sorted(
        Path(inside, name)
        for inside, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and os.path.splitext(name)[1].lower() in ENDINGS
    )
