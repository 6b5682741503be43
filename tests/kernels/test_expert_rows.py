"""Places of rows, against loops in Python; messages keep the bytes of their fields."""

import pytest
import torch

from shardwise.base.packed import message_bytes
from shardwise.kernels import expert_rows
from shardwise.kernels.expert_rows import (
    RowPlaces,
    message_places,
    pack,
    pairs_by_expert,
    plain_sum_rows,
    unpack,
)

INDEX = torch.tensor([[5, 0], [-1, 3], [-1, -1], [1, 2], [4, 5]])


def test_messages_keep_their_fields() -> None:
    fields = [
        torch.randn(3, 5).bfloat16(),
        torch.randn(3, 2, dtype=torch.float64),
        torch.tensor([[1, -1]] * 3),
    ]
    columns = [(5, torch.bfloat16), (2, torch.float64), (2, torch.int32)]
    packed = pack(fields, columns, has_spare=True)
    assert packed.shape == (4, message_bytes(10, 16, 8)) and packed.shape[1] == 48
    found = unpack(packed, columns)
    assert all(torch.equal(a[:3], b) for a, b in zip(found, fields, strict=True))
    assert not any(field[3].any() for field in found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_row_is_in_one_message_to_each_rank_of_its_experts(ranks: int) -> None:
    goes = [{int(e) * ranks // 6 for e in row if e >= 0} for row in INDEX]
    expected = [row for rank in range(ranks) for row in range(len(INDEX)) if rank in goes[row]]
    tokens, places = message_places(INDEX, 0, 6, ranks, len(expected), False)
    assert tokens.tolist() == expected
    held = [[expected[place] if place >= 0 else None for place in row] for row in places.tolist()]
    assert held == [
        [row if rank in goes[row] else None for rank in range(ranks)] for row in range(len(INDEX))
    ]
    tokens, places = message_places(INDEX, 0, 6, ranks, ranks * 5, True)
    for rank, block in enumerate(tokens.view(ranks, 5).tolist()):
        own = [row for row in range(len(INDEX)) if rank in goes[row]]
        assert block == own + [len(INDEX)] * (5 - len(own))


def test_pairs_lie_by_expert_then_by_row() -> None:
    slots, rows, places, ends = pairs_by_expert(INDEX, 1, 4, 6, 0)
    assert slots.tolist() == [6, 7, 3, 8, 10, 10] and rows.tolist() == [3, 3, 1, 4, 4, 4]
    assert ends.tolist() == [1, 2, 3, 4]
    assert places.tolist() == [[-1, -1], [-1, 2], [-1, -1], [0, 1], [3, -1]]
    slots, rows, places, _ = pairs_by_expert(INDEX, 1, 4, 8, 2)
    assert slots.tolist() == [6, 10, 7, 10, 3, 10, 8, 10]
    assert places[3].tolist() == [0, 2]


@pytest.mark.parametrize("is_bound", [False, True])
def test_sums_leave_out_what_has_no_place(is_bound: bool) -> None:
    places = pairs_by_expert(INDEX, 0, 6, 7, 0)[2]
    values, weights = torch.randn(9, 4, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    values[7:] = torch.nan
    weights[2] = torch.nan  # no expert of this row
    sums = RowPlaces(places, 9 if is_bound else 7, is_bound)
    for held in (None, weights):
        torch.testing.assert_close(sums.sum(values, held), plain_sum_rows(values, places, held))
    assert sums.sum(values, weights)[2].tolist() == [0.0] * 4


def test_shapes_are_known_without_numbers() -> None:
    index, values = torch.empty(5, 2, dtype=torch.int64, device="meta"), torch.empty(7, 4, device="meta")
    tokens, places = expert_rows._message_places(index, 0, 6, 2, 8, False)
    slots, rows, of_slots, ends = expert_rows._pairs_by_expert(index, 0, 6, 7, 0)
    assert tokens.shape == (8,) and places.shape == (5, 2) and slots.shape == rows.shape == (7,)
    assert of_slots.shape == (5, 2) and ends.shape == (6,) and ends.dtype == torch.int32
    assert expert_rows._sum_rows(values, of_slots, None).shape == (5, 4)
    weights = torch.empty(5, 2, device="meta")
    d_values, d_weights = expert_rows._pair_gradients(
        torch.empty(5, 4, device="meta"), values, weights, slots, rows
    )
    assert d_values.shape == (7, 4) and d_weights.shape == (5, 2)
