"""What a rank process is told before it builds its contender, and what a built contender can do."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from workload import Workload


@dataclasses.dataclass(frozen=True)
class Setting:
    """One rank's place in one run."""

    contender: str
    dtype: str
    rank: int
    world_size: int
    workload: Workload
    folder: str
    """A fresh folder of this contender and run: the ranks meet through a file in it."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Setting:
        return cls(**{**fields, "workload": Workload(**fields["workload"])})


class Running(ABC):
    """A contender that has been built."""

    @abstractmethod
    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        """One whole training step; returns this rank's loss, where it has one."""

    def other_bytes(self) -> int:
        """Bytes it has sent so far by a way that is not a TCP socket (shared memory)."""
        return 0
