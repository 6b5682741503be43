"""The rows of a store as a whole: ordered alike with tiers and without, read at once or a part at a time."""

from pathlib import Path

import pytest
import torch

from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.row_contents import RowContents
from shardwise.tiers.row_tiers import RowTiersPolicy

ROWS = 200


@pytest.mark.parametrize("optimizer", [RowOptimizerPolicy(), RowOptimizerPolicy(type="adam", exact=True)])
def test_rows_in_tiers_are_read_in_parts(tmp_path: Path, optimizer: RowOptimizerPolicy) -> None:
    read = []
    for tiers in (None, RowTiersPolicy(host_rows=20, disk=tmp_path)):
        table = TablePolicy(name="t", width=4, rows=ROWS, tiers=tiers, init_bound=0.2)
        collection = EmbeddingCollection([table], optimizer, seed=1)
        collection.place(Group.alone("dp"))
        for step in range(4):
            keys = torch.randint(0, ROWS, (15,), generator=torch.Generator().manual_seed(step))
            collection({"t": Ragged.of_ones(keys)})["t"].square().sum().backward()
            collection.step()
        contents = RowContents(collection.placed.parts[0].store)
        if tiers is not None:
            assert contents.streams
            snapshot = contents.snapshot()
            assert contents.snapshot() is snapshot, "a second table of the group reads the same snapshot"
            (lines,) = snapshot.read(torch.arange(ROWS))
            contents.end_save()
            contents.wait_for_save()
        rows = contents.rows_here(0)
        order = torch.tensor(sorted(range(ROWS), key=lambda key: (key % 1024, key)))
        assert torch.equal(rows.keys, order)
        read.append(torch.cat([rows.weights, *rows.state.values()], 1))
        collection.placed.close()
    assert torch.equal(read[0], read[1])
    assert torch.equal(lines[order], read[0])
