"""Pictures with labels before any augmentation: the interface of the three kinds of sources."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""A picture: [height, width, 3], red, green and blue."""


class Pictures(ABC):
    """Pictures of one source, with random access."""

    labels: npt.NDArray[np.int64]
    """Class of each picture: [n]."""
    class_names: tuple[str, ...]
    """Names of the classes."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def picture(self, index: int) -> Pixels:
        """Return the pixels of one picture.

        Raises:
            DataError: if the file cannot be decoded; the message names it.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest that is equal on every rank that reads the same pictures."""
