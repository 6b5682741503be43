"""What is compared: cases, the contenders in them, and what a built contender can do."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any, NamedTuple

PARTS = ("lookup", "end_to_end", "vocabulary", "dynamic", "multi_hot")
"""Each is a module with ``cases(tiny)``, ``contenders(case)`` and ``build(contender, case, rank)``."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders of one case take turns."""

    part: str
    name: str
    ranks: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes, by the names that the part uses."""


class Contender(NamedTuple):
    """One of those who are compared."""

    name: str
    packages: tuple[str, ...] = ()
    """Without one of them it is skipped."""

    @property
    def ours(self) -> bool:
        return self.name.startswith("shardwise")

    @property
    def missing(self) -> str | None:
        """What it lacks here."""
        return next((name for name in self.packages if importlib.util.find_spec(name) is None), None)


class Running(ABC):
    """A contender that has been built."""

    samples: int
    """Samples of a step, over all ranks."""

    @abstractmethod
    def data(self, number: int) -> Any:
        """What step ``number`` is given, in the form that the contender takes; before the clock starts."""

    @abstractmethod
    def step(self, data: Any) -> float:
        """One whole training step; this rank's loss, 0 where there is none."""

    def state(self) -> list[float]:
        """Figures that agree where contenders have computed the same."""
        return []

    def notes(self) -> dict[str, float]:
        """What else the table is to say."""
        return {}

    def other_bytes(self) -> int:
        """Bytes it has sent so far by a way that is not a TCP socket (shared memory)."""
        return 0


def part(name: str) -> ModuleType:
    """The module of a part."""
    return importlib.import_module(name)
