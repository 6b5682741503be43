"""The rows of a store as a whole: ordered alike with tiers and without, read at once or a part at a time."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import MismatchError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rows.row_contents import RowContents
from shardwise.tiers.row_tiers import RowTiersPolicy
from tests.parallel.embedding.threads import on_ranks

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


def ordered(group: Group, placement: str, policy: DynamicPolicy | None) -> list[bool]:
    """Whether the rows of each of two tables, in the order of a save, have numbers that rise."""
    fields = {"rows": 3000} if policy is None else {"dynamic": policy}
    tables = [TablePolicy(name=name, width=4, placement=placement, **fields) for name in "ab"]
    collection = EmbeddingCollection(tables, RowOptimizerPolicy(), seed=1)
    collection.place(group)
    keys = torch.randint(0, 3000, (500,), generator=torch.Generator().manual_seed(group.index))
    features = collection({name: Ragged.of_ones(keys) for name in "ab"})
    sum(each.square().sum() for each in features.values()).backward()
    collection.step()
    (store,) = {part.store for part in collection.placed.parts}
    last, found = -1, []
    for place in range(2):
        held = RowContents(store).rows_here(place).keys
        if policy is None:
            rows = store.slab_rows(place, held)
        else:
            rows = store.dynamic[place].index.find(held) + store.dynamic[place].base
        numbers = store.places_in_save(rows)
        rises = numbers[1:] >= numbers[:-1] if policy else numbers[1:] > numbers[:-1]
        found.append(bool(rises.all()) and int(numbers[0]) > last and held.numel() > 100)
        last = int(numbers[-1])
    return found


@pytest.mark.parametrize("policy", [None, DynamicPolicy()], ids=["static", "dynamic"])
@pytest.mark.parametrize("placement", ["row", "column"])
def test_rows_are_sorted_for_the_disk_as_a_save_reads_them(
    placement: str, policy: DynamicPolicy | None
) -> None:
    assert on_ranks(2, lambda group: ordered(group, placement, policy)) == [[True, True]] * 2


def test_rows_of_another_form_are_not_loaded() -> None:
    """The first columns were once taken in silence."""
    collection = EmbeddingCollection([TablePolicy(name="t", width=4, rows=9)], RowOptimizerPolicy())
    collection.place(Group.alone("dp"))
    for columns in (2, 7):
        with pytest.raises(MismatchError, match=f"columns 0 to {columns - 1}; here are columns 0 to 3 of 4"):
            collection.load_rows("t", KeyedRows.of_weights(torch.arange(3), torch.ones(3, columns)))
    with pytest.raises(MismatchError, match="1 keys for 2 rows of weights"):
        collection.load_rows("t", KeyedRows.of_weights(torch.tensor([3]), torch.ones(2, 4)))
