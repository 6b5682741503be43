"""CIFAR's binary files, mapped into memory without conversion.

    CIFAR-10    data_batch_1.bin ... data_batch_5.bin, test_batch.bin    label, 3,072 bytes
    CIFAR-100   train.bin, test.bin                                      coarse label, fine label, 3,072 bytes

A picture is 32 x 32: red, then green, then blue, each row by row. The name of a file decides which of the two it is,
or else its size. Krizhevsky 2009, "Learning multiple layers of features from tiny images".
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from shardwise.base.errors import DataError
from shardwise.base.words import in_words
from shardwise.data.images.pictures import Pictures, Pixels

SIDE = 32
_PIXEL_BYTES = 3 * SIDE * SIDE
_CLASSES = {1: (10,), 2: (20, 100)}
"""Number of classes of each label of a record, by the number of labels."""


class CifarFiles(Pictures):
    """Records of CIFAR files, one file behind the other.

    Args:
        paths: the files, all of CIFAR-10 or all of CIFAR-100.
        labels: label of CIFAR-100 that counts.

    Raises:
        DataError: if a file is damaged or no binary file of CIFAR, or if the kinds differ.
    """

    def __init__(self, paths: Sequence[Path], labels: Literal["fine", "coarse"] = "fine") -> None:
        kinds = {path: _labels_of(path) for path in paths}
        if len(set(kinds.values())) > 1:
            raise DataError(
                f"{paths[0]} is of CIFAR-{_name(kinds[paths[0]])} and others beside it are not; give files of one kind"
            )
        count = kinds[paths[0]]
        which = 0 if labels == "coarse" else count - 1
        self._count = count
        self._files = [
            np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, count + _PIXEL_BYTES) for path in paths
        ]
        self._ends = np.cumsum([len(file) for file in self._files])
        for path, file in zip(paths, self._files, strict=True):
            _check_labels(path, file[:, :count])
        self.labels = np.concatenate([file[:, which] for file in self._files]).astype(np.int64)
        self.class_names = tuple(map(str, range(_CLASSES[count][which])))

    def picture(self, index: int) -> Pixels:
        """Return the pixels of a record: [32, 32, 3]."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        record = self._files[which][index - (int(self._ends[which - 1]) if which else 0)]
        return np.asarray(record[self._count :]).reshape(3, SIDE, SIDE).transpose(1, 2, 0)

    def fingerprint(self) -> str:
        """Return a digest of the labels and of every 97th byte, because reading all bytes would take long."""
        digest = hashlib.sha256(self.labels.tobytes())
        for file in self._files:
            digest.update(file.reshape(-1)[::97].tobytes())
        return digest.hexdigest()[:16]


def _labels_of(path: Path) -> int:
    """Return the number of labels of a record.

    Raises:
        DataError: if the size of the file is that of no CIFAR file.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"data file {in_words(error)}") from None
    known = {"data_batch": 1, "test_batch": 1, "train": 2, "test": 2}
    by_name = next((known[stem] for stem in known if path.stem.startswith(stem)), None)
    for count in (1, 2) if by_name is None else (by_name,):
        if size and size % (count + _PIXEL_BYTES) == 0:
            return count
    whole = f"{_PIXEL_BYTES + 1}" if by_name == 1 else f"{_PIXEL_BYTES + 2}"
    expected = f"{_PIXEL_BYTES + 1} or {_PIXEL_BYTES + 2}" if by_name is None else whole
    raise DataError(
        f"data file {path} has {size} bytes, which is no multiple of the {expected} bytes of a CIFAR record; it is cut "
        "short, or no binary file of CIFAR (the version for Python has other files)"
    )


def _check_labels(path: Path, labels: np.ndarray) -> None:  # type: ignore[type-arg]
    for place, classes in enumerate(_CLASSES[labels.shape[1]]):
        beyond = np.flatnonzero(labels[:, place] >= classes)
        if beyond.size:
            raise DataError(
                f"data file {path}: record {beyond[0]} has the label {labels[beyond[0], place]}, but CIFAR-"
                f"{_name(labels.shape[1])} has classes 0 to {classes - 1} there; the file is damaged"
            )


def _name(labels: int) -> str:
    return "10" if labels == 1 else "100"
