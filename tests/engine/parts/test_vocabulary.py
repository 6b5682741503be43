"""Tokens of a batch against the model's vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import DataError
from shardwise.engine.parts.vocabulary import VocabularyBounds


class Words(nn.Module):
    """A model in the manner of transformers: 5 tokens are read, 4 are written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def check(batch: Any, model: nn.Module | None = None) -> None:
    with VocabularyBounds(model or Words()).checked(batch):
        pass


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"input_ids": torch.tensor([[0, 4], [5, 1]])},
            r"'input_ids' holds 5 at \[1, 0\], but the model's embedding",
        ),
        ({"input_ids": torch.tensor([-1])}, "'input_ids' holds -1"),
        ({"input_ids": torch.tensor([-100])}, "'input_ids' holds -100"),
        ({"labels": torch.tensor([3, 4])}, "'labels' holds 4 .* 0 to 3, and -100 for no target"),
        ({"labels": torch.tensor([-100, -2])}, "'labels' holds -2"),
        ((((),), {}), ""),
        (((), {"labels": torch.tensor([9])}), "'labels' holds 9"),
        ((({"tokens": torch.tensor([5])},), {}), "'tokens' holds 5"),
        ((torch.tensor([1]), torch.tensor([4])), "'targets' holds 4"),
        (torch.tensor([7]), "'tokens' holds 7"),
    ],
)
def test_a_token_outside_is_named_with_its_place(batch: Any, text: str) -> None:
    if not text:
        check(batch)
        return
    with pytest.raises(DataError, match=text):
        check(batch)


def test_tokens_inside_and_what_is_no_token() -> None:
    check(
        {"input_ids": torch.tensor([0, 4]), "labels": torch.tensor([-100, 0, 3]), "mask": torch.tensor([9])}
    )
    check({"labels": torch.tensor([-100]), "input_ids": torch.tensor([5.0])})
    check({"input_ids": torch.zeros(0, dtype=torch.int64)})
    check({"input_ids": torch.tensor([9])}, nn.Linear(1, 1))


def test_an_index_error_of_a_pass_is_told_with_the_batch_and_the_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    vocabulary = VocabularyBounds(model)
    batch = torch.tensor([0, 7])
    with pytest.raises(DataError, match=r"'batch' from 0 to 7\. Embeddings of the model: '0' has 3 rows"):  # noqa: SIM117
        with vocabulary.checked(batch):
            model(batch)
    for error, given in (
        (IndexError("index out of range"), torch.tensor([1])),
        (RuntimeError("other"), batch),
    ):
        with pytest.raises(type(error), match=str(error)):  # noqa: SIM117
            with vocabulary.checked(given):
                raise error
