"""Rows of embedding tables that a batch touches, from the figures of the tables' policies.

The formulas are those by which the planner chooses placements (parallel/embedding/cost.py), with the keys of a sample
and the share of distinct keys that each table's policy gives.

Cost: a dozen products per table.
"""

import torch

from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.cost import bytes_sent, collectives, rows_touched
from shardwise.parallel.embedding.planner import load_of
from shardwise.parallel.embedding.rules import optimizer_of
from shardwise.simulate.touched import TableRows

_KEY_BYTES = 8


def table_rows(collection: EmbeddingCollection, batch: int, ranks: int, dtype: torch.dtype) -> TableRows:
    """Return the rows of a collection whose placements are chosen.

    Args:
        collection: The collection.
        batch: Samples of a rank's microbatch.
        ranks: Ranks over which the rows are spread.
        dtype: Dtype of the rows.
    """
    places = {choice.table: choice.place for choice in collection.choices}
    keys = read = updated = there = back = 0.0
    messages = 0
    for table in collection.tables:
        place, load = places[table.name], load_of(table, batch)
        rule = optimizer_of(table.optimizer or collection.optimizer)
        touched = rows_touched(place, load, ranks)
        keys += load.keys * _KEY_BYTES
        read += touched * table.width * dtype.itemsize
        updated += touched * (table.width + rule.columns(table.width)) * dtype.itemsize
        sent = bytes_sent(place, load, table.width, dtype.itemsize, ranks)
        there += sent.keys + sent.vectors
        back += sent.gradients
        messages = max(messages, collectives(place) if ranks > 1 else 0)
    # Tables that are placed alike share their messages; the last one carries gradients.
    return TableRows(keys, read, updated, (there, back), (max(messages - 1, 0), min(messages, 1)))
