"""Pictures with labels, before anything is drawn: the three kinds of sources behind one face."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""A picture: [height, width, 3], red, green and blue."""


class Pictures(ABC):
    """Pictures of one source, with random access."""

    labels: npt.NDArray[np.int64]
    """The class of each: [n]."""
    class_names: tuple[str, ...]
    """What the classes are called."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def picture(self, index: int) -> Pixels:
        """One picture. Errors: DataError that names the file where it cannot be decoded."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Equal on every rank that reads the same pictures."""
