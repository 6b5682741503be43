"""The ledger: the bytes that this rank holds, by row.

Code that makes memory that outlives one operation records that memory in the ledger.

    row             content                                          lifetime
    weights         the part of the parameters that a rank stores    as long as the engine
    master          tensors that the optimizer updates, if they are  as long as the engine
                    not the weights
    moments         the optimizer's                                  as long as the engine
    tables          rows of static embedding tables, their moments   as long as the engine
    dynamic tables  rows in use, their moments and indices; on the   as long as the engine; grows
                    host, beside an accelerator too
    table steps     the last step of each row of an exact Adam on    as long as the engine
                    an accelerator, for the host
    gradients       the buffers of their sums                        from the first gradient of a step to its end
    gathered        slots of unsharded weights                       as long as the engine; made in the first pass
    staging         slots that a pass's gradients arrive in          as long as the engine; made in the first pass
                    on an accelerator, small gradients before that   until the Unit's last gradient
    host            state of Units in host memory (offload)          as long as the engine
    disk            state of Units in files (offload)                as long as the engine
    activations     tensors that autograd saves in blocks, in host   as long as the engine; grows: the most at once
                    memory (offload)
    loaded          blocks of host memory that state on a disk       as long as the engine; made in the first step
                    passes through
    rings           memory between ranks of one host                 as long as the ranks; shared by their engines
    save            the copy that is written behind training         from the first save on
    batches ahead   steps that a loader has read before their use    while the loader reads ahead
    kept            what passes keep, at the largest moment of a     within a step
                    step (engine/parts/step_meter.py)
    received        messages of the stages beside, at that moment    within a step
    at work         what the running Action has made, at that moment within a step

The last three rows are those of one step, which is measured once, and are no part of the sums of memory that is held.

The Plan predicts model state (``PREDICTED``) to the byte, except for dynamic tables, which the Plan counts as full.
Memory that belongs to two rows (a master that is the weight itself, or a range of it) is counted in the first.

Cost: one entry per holder, nothing per step. Foreseen rows stand beside the held ones, for the error of a rank that is
out of memory (engine/parts/out_of_memory.py).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, get_args

Row = Literal[
    "weights",
    "gradients",
    "master",
    "moments",
    "tables",
    "dynamic tables",
    "table cache",
    "table indexes",
    "tables on disk",
    "table steps",
    "gathered",
    "staging",
    "host",
    "disk",
    "activations",
    "loaded",
    "rings",
    "save",
    "batches ahead",
    "kept",
    "received",
    "at work",
]
ROWS: tuple[Row, ...] = get_args(Row)
STEP_ROWS: tuple[Row, ...] = ("kept", "received", "at work")
"""The rows of memory that a step makes and releases."""
PREDICTED: tuple[Row, ...] = (
    "weights",
    "gradients",
    "master",
    "moments",
    "host",
    "disk",
    "tables",
    "dynamic tables",
    "table cache",
)
"""The rows that the Plan predicts before anything is made."""

Lifetime = Literal["engine", "step"]
"""Lifetime of memory; ``step``: from the first gradient of a step to its end."""


class LedgerEntry(NamedTuple):
    """The memory that one holder took."""

    row: Row
    owner: str
    lifetime: Lifetime
    size: Callable[[], int]
    """Function that returns the present bytes; for memory of a step, the bytes at the end of the backward pass."""


class Ledger:
    """The record of the memory that one rank holds."""

    def __init__(self) -> None:
        self.holdings: list[LedgerEntry] = []
        self.foreseen: Mapping[str, int] = {}
        """Bytes by row that were foreseen before the first step; empty if nothing was."""
        self.of_a_step: Mapping[Row, int] = {}
        """Bytes of ``STEP_ROWS`` in the step that was measured; empty before it."""
        self.rows_now: Callable[[], Mapping[Row, int]] = dict
        """Function that returns the bytes of ``STEP_ROWS`` at this moment of a step that is being measured."""

    def take(
        self, row: Row, owner: str, held: int | Callable[[], int], lifetime: Lifetime = "engine"
    ) -> None:
        """Record the memory that one holder has taken.

        Args:
            row: Row of the memory.
            owner: Name of the holder.
            held: Bytes, or a function that returns the bytes of memory that grows.
            lifetime: "engine", or "step" for memory from the first gradient of a step to its end.
        """
        self.holdings.append(LedgerEntry(row, owner, lifetime, held if callable(held) else lambda: held))

    def bytes_by_row(self, lifetimes: Collection[Lifetime] = ("engine", "step")) -> dict[Row, int]:
        """Return the bytes of every row, in the order of the module's table.

        Args:
            lifetimes: Lifetimes of the memory that counts.

        Returns:
            Bytes by row; rows without memory are left out.
        """
        total: dict[Row, int] = {}
        for holding in self.holdings:
            if holding.lifetime not in lifetimes:
                continue
            total[holding.row] = total.get(holding.row, 0) + holding.size()
        return {row: total[row] for row in ROWS if row in total}
