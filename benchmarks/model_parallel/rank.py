"""One rank of one contender; the commands are those of ``data_parallel/worker.py`` and one more:

{"do": "idle"}    -> [simulated, measured] idle share of the last step's pipeline, or null
"""

from __future__ import annotations

import beside  # noqa: F401
from contenders import CONTENDERS, Contender
from torch import Tensor
from worker import Rank, serve
from workload import batch


class ModelParallelRank(Rank):
    """Every rank of a contender is given the same batch: the model is what is cut."""

    def find_row(self) -> Contender:
        return next(row for row in CONTENDERS if row.name == self.setting.contender)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        return batch(self.setting.workload, number, rank=0)

    def idle(self) -> dict[str, tuple[float, float] | None]:
        """Where the contender knows it."""
        shares = getattr(self.running, "idle_shares", None)
        return {"idle": None if shares is None else shares()}


if __name__ == "__main__":
    serve(ModelParallelRank)
