"""Rows of uneven number arrive whole and in order, over both transports, and are counted as they leave."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.exchange import RowParcel, back, carry, gather, send, share
from shardwise.comm.world import World
from tests.comm.test_collectives import group_of


def rows_between(source: int, target: int, seed: int, largest: int) -> int:
    """How many rows ``source`` sends to ``target``: some none, some many."""
    generator = torch.Generator().manual_seed(seed * 100 + source * 10 + target)
    number = int(torch.randint(0, largest + 1, (), generator=generator))
    return 0 if number % 3 == 0 else number


def row_of(source: int, target: int, number: int, width: int, dtype: torch.dtype) -> Tensor:
    base = torch.arange(number, dtype=torch.float64)[:, None] * 7 + torch.arange(width) + source * 31 + target
    return (base % 251).to(dtype)


def both_ways(world: World, transport: str) -> list[bool]:
    group, report = group_of(world, transport), []
    me, ranks = group.index, range(world.size)
    # The last one takes several rounds of the shared ring.
    for seed, largest, width in ((0, 0, 3), (1, 5, 3), (2, 40, 1), (3, 30_000, 24)):
        for dtype in (torch.int64, torch.float32, torch.bfloat16):
            leaving = torch.tensor([[rows_between(me, to, seed, largest), me] for to in ranks])
            everyone = share(leaving, group, "a test")
            counts = everyone[:, :, 0].tolist()
            report.append(counts == [[rows_between(i, j, seed, largest) for j in ranks] for i in ranks])
            report.append(everyone[:, 0, 1].tolist() == list(ranks))
            rows = torch.cat([row_of(me, to, counts[me][to], width, dtype) for to in ranks])
            before = group.traffic.total("activations").elements
            arrived = send(rows, counts, group, "a test")
            sent = group.traffic.total("activations").elements - before
            report.append(sent == (sum(counts[me]) - counts[me][me]) * width)
            expected = [row_of(source, me, counts[source][me], width, dtype) for source in ranks]
            report.append(torch.equal(arrived, torch.cat(expected)))
            report.append(torch.equal(back(arrived, counts, group, "a test"), rows))
            none = torch.empty(4, dtype=dtype).as_strided((0,), (0,))  # as numpy's empty arrays come
            report.append(send(none, [[0] * world.size] * world.size, group, "a test").numel() == 0)
            parts = [counts[rank][0] for rank in ranks]
            mine = row_of(me, 0, parts[me], width, dtype)
            full = torch.cat([row_of(rank, 0, parts[rank], width, dtype) for rank in ranks])
            report.append(torch.equal(gather(mine, parts, group, "a test"), full))
    return report


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_go_and_come_back(ranks: Any, size: int, transport: str) -> None:
    for report in ranks(size).run(both_ways, transport):
        assert all(report), report


def together(world: World) -> list[bool]:
    """Sends and gathers of three sizes, one of them empty, beside each of them alone; and in how many messages."""
    group, report = group_of(world, "torch"), []
    me, ranks = group.index, range(world.size)
    for order in (1, -1):
        counts = [[[rows_between(i, j, seed, 5 * seed) for j in ranks] for i in ranks] for seed in range(3)]
        parts = [[row[0] for row in each] for each in counts]
        sent = [RowParcel(torch.arange(sum(each[me])) + 100 * me, each) for each in counts]
        gathered = [RowParcel(torch.arange(part[me]) + 100 * me, [[n] for n in part]) for part in parts]
        parcels = [each for pair in zip(sent, gathered, strict=True) for each in pair][::order]
        before = group.traffic.total().calls
        came = carry(parcels, group, "a test")
        report.append(group.traffic.total().calls - before == 2)
        for parcel, rows in zip(parcels, came, strict=True):
            if parcel.is_for_all:
                alone = gather(parcel.rows, [n for (n,) in parcel.counts], group, "a test")
            else:
                alone = send(parcel.rows, parcel.counts, group, "a test")
            report.append(torch.equal(rows, alone))
    return report


@pytest.mark.parametrize("size", [2, 4])
def test_parcels_go_together(ranks: Any, size: int) -> None:
    for report in ranks(size).run(together):
        assert all(report) and len(report) == 14, report


def on_one_rank(world: World) -> list[bool]:
    from shardwise.comm.collectives import Group

    alone = Group.alone("tables")
    rows = torch.arange(6.0).view(3, 2)
    flat = torch.empty(6)
    alone.all_to_all(flat, rows.view(-1), [[6]], "a test").wait()
    return [
        torch.equal(send(rows, [[3]], alone, "a test"), rows),
        torch.equal(gather(rows, [3], alone, "a test"), rows),
        torch.equal(share(torch.tensor([[3]]), alone, "a test"), torch.tensor([[[3]]])),
        torch.equal(flat, rows.view(-1)),
    ]


def test_one_rank_keeps_its_rows() -> None:
    assert all(on_one_rank(World(0, 1)))
