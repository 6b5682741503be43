"""What a token sees: documents from their numbers, positions that begin anew, functions that take a view."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.kernels.attention import causal_attention, plain_attention
from shardwise.kernels.attention_view import (
    AttentionView,
    PackedDocuments,
    packed_documents,
    takes_view,
    token_runs,
)


def test_documents_begin_where_their_numbers_change() -> None:
    documents = torch.tensor([[0, 0, 3, 3, 3], [7, 8, 9, 9, 9]])
    packed = packed_documents(documents, (2, 5))
    assert packed.starts == ((0, 2), (0, 1, 2))
    assert packed.positions().tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert packed_documents(documents[:, :1], (2, 1)).starts == ((0,), (0,))
    assert packed_documents(documents.to("meta"), (2, 5)).starts == ((0,), (0,)), "shapes have no numbers"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.tensor([[0, 1, 0]]), "sequence 0 fall from 1 to 0 at token 2"),
        (torch.zeros(1, 4, dtype=torch.long), r"documents of the shape \[1, 4\]"),
        (torch.zeros(1, 3), "float32"),
    ],
)
def test_numbers_that_are_no_documents_are_refused(wrong: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        packed_documents(wrong, (1, 3))


def test_which_functions_take_a_view() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        return q

    def anything(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())

    assert takes_view(causal_attention) and takes_view(plain_attention) and takes_view(anything)
    assert not takes_view(scaled) and not takes_view(torch.nn.functional.scaled_dot_product_attention)


def test_a_view_hides_keys_behind_a_window_or_another_document() -> None:
    one, two = PackedDocuments(((0,),), 8), PackedDocuments(((0, 3),), 8)
    assert AttentionView(7).hides(8) and not AttentionView(8).hides(8)
    assert AttentionView(documents=two).hides(8) and not AttentionView(documents=one).hides(8)


def test_runs_end_at_documents_ranges_and_padding() -> None:
    runs = token_runs([(0, 4), (8, 12)], (0, 2, 9), 11)
    assert [tuple(run) for run in runs] == [(1, 0, 0, 2), (2, 2, 2, 2), (2, 8, 4, 1), (3, 9, 5, 2)]
