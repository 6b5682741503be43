"""Documents from positions that begin anew."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.parallel.context.packing import documents_of_positions


def test_documents_begin_at_position_0() -> None:
    positions = torch.tensor([[0, 1, 0, 0, 1]])
    assert documents_of_positions(positions, (2, 5), None).starts == ((0, 2, 3), (0, 2, 3))
    plain = torch.arange(5)[None]
    assert documents_of_positions(plain, (1, 5), torch.ones(1, 5)).starts == ((0,),)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([[0, 1, 3]], "are 3 at token 2, behind 1"),
        ([[2, 3, 4]], "are 2 at token 0, behind nothing"),
        ([[0, 1, 1]], "are 1 at token 2, behind 1"),
        ([[0, 1]], r"of the shape \[1, 2\]"),
        (3, "of the shape int"),
    ],
)
def test_other_positions_are_refused(wrong: Any, said: str) -> None:
    given = torch.tensor(wrong) if isinstance(wrong, list) else wrong
    with pytest.raises(UsageError, match=said):
        documents_of_positions(given, (1, 3), None)


def test_a_mask_beside_documents_is_refused() -> None:
    with pytest.raises(UsageError, match="leave the attention_mask out"):
        documents_of_positions(torch.tensor([[0, 0]]), (1, 2), torch.ones(1, 2))
