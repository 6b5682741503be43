"""All ranks get one text, and raise one error."""

import pytest
import torch

from shardwise.base.errors import DamagedStateError, PlanError, ShardwiseError, TableFullError, TierError
from shardwise.comm.collectives import Group
from shardwise.comm.first_text import common_error, first_text
from tests.parallel.embedding.threads import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("texts", "weights", "expected"),
    [
        (["", "two", "three"], [1, 1, 1], "two"),
        (["one", "two", "three"], [1, 1, 2], "three"),
        (["", "", ""], [1, 1, 1], ""),
        (["é" * 2000, "", ""], [1, 1, 1], "é" * 1000),
    ],
)
def test_the_text_of_one_rank(texts: list[str], weights: list[int], expected: str) -> None:
    found = on_ranks(3, lambda group: first_text(texts[group.index], group, CPU, weights[group.index]))
    assert found == [expected] * 3


@pytest.mark.parametrize(
    ("errors", "kind", "said"),
    [
        ([None, TierError("broken")], TierError, "rank 1: broken"),
        ([PlanError("a plan"), DamagedStateError("rank 0: flipped")], DamagedStateError, "rank 0: flipped"),
        ([TableFullError("full"), PlanError("a plan")], TableFullError, "full"),
    ],
)
def test_the_error_of_one_rank(
    errors: list[ShardwiseError | None], kind: type[ShardwiseError], said: str
) -> None:
    def told(group: Group) -> ShardwiseError:
        return common_error(errors[group.index], group, CPU)

    for rank, found in enumerate(on_ranks(2, told)):
        assert type(found) is kind and str(found) == said
        assert found.__cause__ is errors[rank]


def test_one_rank_raises_its_own() -> None:
    error = TierError("broken")
    assert on_ranks(1, lambda group: common_error(error, group, CPU)) == [error]
