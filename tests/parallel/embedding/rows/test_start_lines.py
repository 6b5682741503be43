"""Lines with which rows begin: the same when they are drawn one by one, later, and on any rank."""

import torch

from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.row_lines import RowLines
from shardwise.parallel.embedding.rules import RowDtypes
from tests.parallel.embedding.threads import on_ranks

POLICIES = [TablePolicy(name="a", width=3, rows=40, placement="row"), TablePolicy(name="b", width=3, rows=60)]
OPTIMIZER = RowOptimizerPolicy(type="adam", exact=True)


def test_a_row_is_drawn_as_with_its_table() -> None:
    def drawn(group: Group) -> bool:
        collection = EmbeddingCollection(POLICIES, OPTIMIZER, seed=4)
        collection.place(group)
        for part in collection.placed.parts:
            store = part.store
            rows = torch.cat(
                [store.slab_rows(place, store.static_keys(place)) for place in range(len(part.tables.tables))]
            ).flip(0)[:30]
            fp32 = RowDtypes(torch.float32, torch.float32)
            memory = RowLines(
                len(rows), range(3), 3, store.optimizer, torch.float32, fp32, torch.device("cpu")
            )
            store.starts.draw(memory, torch.arange(len(rows)), rows)
            if not torch.equal(memory.memory, store.lines.memory[rows]):
                return False
        return True

    assert on_ranks(2, drawn) == [True, True]


def test_a_table_that_begins_later_has_no_steps_to_replay() -> None:
    collection = EmbeddingCollection(POLICIES[:1], OPTIMIZER, seed=4)
    collection.place(Group.alone("dp"))
    starts = collection.placed.parts[0].store.starts
    first, later = (starts.lines(starts.key("a"), torch.tensor([5, 7]), 0.1, steps) for steps in (0, 12))
    assert torch.equal(first[:, :-1], later[:, :-1]), "start weights do not depend on the step"
    assert first[:, -1].tolist() == [0.0, 0.0] and later[:, -1].tolist() == [12.0, 12.0]
