"""The compiled code of embedding tables, which a forecast counts as memory of the process.

numba, its compiler and the loops of the tables (kernels/tables) take about 120 MB of a process from the first table on.
A process that foresees a job builds no table, so it loads the same code before it looks at its own memory: a table of
two rows of each optimizer runs a step, and the loops of tiers run on nothing.

Cost: about a second, once in a process; longer if the loops were never compiled on this machine, which the ranks of the
      job then need not do.
"""

import torch

from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.engine.parts.tables import ModelTables
from shardwise.kernels.tables import records
from shardwise.kernels.tables.hash_index import HashIndex
from shardwise.memory import page_reads
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import TablePolicy
from shardwise.tiers.place_marks import PlaceMarks

_FEW_ROWS = 2


def load_table_code(tables: ModelTables) -> None:
    """Run the loops that a step of the tables runs on a CPU; does nothing without tables.

    Args:
        tables: The tables of a model.
    """
    rules = dict.fromkeys(
        (table.optimizer or each.optimizer, each.dtype, table.dtype, table.state_dtype)
        for _, each, table in tables.each()
    )
    for optimizer, dtype, stored, of_state in rules:
        few = TablePolicy(name="few", rows=_FEW_ROWS, width=1, dtype=stored, state_dtype=of_state)
        collection = EmbeddingCollection([few], optimizer, dtype=dtype)
        collection.place(Group.alone("dp"))
        key = Ragged.of_ones(torch.zeros(1, dtype=torch.int64))
        collection({few.name: key})[few.name].sum().backward()
        collection.step()
    if tables.is_tiered:
        records.compile_loops()
        page_reads.compile_loops()
        PlaceMarks(_FEW_ROWS)
        HashIndex(_FEW_ROWS, _FEW_ROWS).remove(torch.zeros(1, dtype=torch.int64))
