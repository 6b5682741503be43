"""The ledger: how many bytes this rank holds, by row. Whoever makes memory that outlives one operation takes it here.

    row             what                                             lives
    weights         what a rank keeps of the parameters              as long as the engine
    master          what the optimizer updates, where it is another  as long as the engine
    moments         the optimizer's                                  as long as the engine
    tables          rows of static embedding tables, their moments   as long as the engine
    dynamic tables  rows in use, their moments and indices; on the   as long as the engine; grows
                    host, beside an accelerator too
    table steps     where rows of an exact Adam on an accelerator    as long as the engine
                    stand, for the host
    gradients       the buffers of their sums                        from the first gradient of a step to its end
    gathered        slots of unsharded weights                       as long as the engine; made in the first pass
    staging         slots that a pass's gradients come into          as long as the engine; made in the first pass
    host            state of Units in host memory (offload)          as long as the engine
    disk            state of Units in files (offload)                as long as the engine
    activations     what autograd saves in blocks, in host memory    as long as the engine; grows: the most at once
                    (offload)
    loaded          host memory that they pass through               as long as the engine; made in the first step
    rings           memory between ranks of one host                 as long as the ranks; shared by their engines
    save            the copy that is written behind training         from the first save on

The Plan predicts model state (``PREDICTED``) to the byte, but for dynamic tables, which it has as if full. Memory that
two rows could claim (a master that is the weight itself, or a range of it) stands under the first.

Cost: one entry per holder, nothing per step.
"""

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, get_args

Row = Literal[
    "weights",
    "gradients",
    "master",
    "moments",
    "tables",
    "dynamic tables",
    "table steps",
    "gathered",
    "staging",
    "host",
    "disk",
    "activations",
    "loaded",
    "rings",
    "save",
]
ROWS: tuple[Row, ...] = get_args(Row)
PREDICTED: tuple[Row, ...] = (
    "weights",
    "gradients",
    "master",
    "moments",
    "host",
    "disk",
    "tables",
    "dynamic tables",
)
"""The rows that the Plan knows before anything is made."""

Lifetime = Literal["engine", "step"]
"""``step``: from the first gradient of a step to its end."""


class LedgerEntry(NamedTuple):
    """What one holder took."""

    row: Row
    owner: str
    lifetime: Lifetime
    size: Callable[[], int]
    """Its bytes now; of what lives for a step, its bytes at the end of the backward pass."""


class Ledger:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.holdings: list[LedgerEntry] = []

    def take(
        self, row: Row, owner: str, held: int | Callable[[], int], lifetime: Lifetime = "engine"
    ) -> None:
        """``owner`` holds so many bytes, or as many as it says when it is asked: of memory that grows."""
        self.holdings.append(LedgerEntry(row, owner, lifetime, held if callable(held) else lambda: held))

    def bytes_by_row(self, lifetimes: Collection[Lifetime] = ("engine", "step")) -> dict[Row, int]:
        """Return the bytes of every row that a holder of ``lifetimes`` took, in the order of the table above."""
        total: dict[Row, int] = {}
        for holding in self.holdings:
            if holding.lifetime not in lifetimes:
                continue
            total[holding.row] = total.get(holding.row, 0) + holding.size()
        return {row: total[row] for row in ROWS if row in total}
