"""Gradients of rows, merged to one for each row."""

import torch
from torch import Tensor

from shardwise.parallel.embedding.rows.row_gradients import RowGradients

LIKE = torch.zeros(1, dtype=torch.float64)


def kept(
    *calls: tuple[list[int], list[float]], may_lack: bool = False, is_distinct: bool = False
) -> RowGradients:
    gradients = RowGradients(2, may_lack, is_distinct)
    for rows, values in calls:
        grads = torch.tensor(values, dtype=torch.float64)
        gradients.add(torch.tensor(rows), torch.stack([grads, 10 * grads], 1))
    return gradients


def numbers(gradients: RowGradients) -> tuple[list[int], list[list[float]]]:
    rows, grads = gradients.merged(LIKE)
    found: Tensor = grads
    return rows[0].tolist(), found.tolist()


def test_rows_of_all_calls_are_merged_in_the_order_in_which_they_came() -> None:
    gradients = kept(([7, 3, 7], [1, 2, 3]), ([3, 5], [4, 5]))
    assert numbers(gradients) == ([7, 3, 5], [[4, 40], [6, 60], [5, 50]])
    gradients.add(torch.tensor([5]), torch.ones(1, 2, dtype=torch.float64))
    assert numbers(gradients)[1][2] == [6, 51]


def test_keys_that_were_not_admitted_learn_nothing() -> None:
    assert numbers(kept(([-1, 3, -1], [1, 2, 3]), may_lack=True)) == ([3], [[2, 20]])
    assert numbers(kept(([4, 3], [1, 2]), may_lack=True)) == ([4, 3], [[1, 10], [2, 20]])


def test_distinct_rows_of_one_call_are_taken_as_they_are() -> None:
    gradients = kept(([7, 3], [1, 2]), is_distinct=True)
    rows, grads = gradients.merged(LIKE)
    assert rows[0].tolist() == rows[1].tolist() == [7, 3] and gradients.merged(LIKE)[1] is grads
    assert numbers(kept(([7], [1]), ([7], [2]), is_distinct=True)) == ([7], [[3, 30]])


def test_nothing_is_nothing() -> None:
    gradients = kept(([7], [1]))
    gradients.clear()
    rows, grads = gradients.merged(LIKE)
    assert rows[0].tolist() == [] and grads.shape == (0, 2) and grads.dtype == torch.float64
