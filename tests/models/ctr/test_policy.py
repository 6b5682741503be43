"""Keys under ``model:`` for click-through models."""

import pytest
from pydantic import ValidationError

from shardwise.models.ctr.policy import CTR_POLICIES, DcnPolicy


def test_each_word_is_the_name_in_its_policy() -> None:
    assert {word: policy().name for word, policy in CTR_POLICIES.items()} == {
        word: word for word in CTR_POLICIES
    }


@pytest.mark.parametrize(
    "given", [{"width": 0}, {"hidden": (3, 0)}, {"structure": "beside"}, {"rank": 0}, {"top": ()}]
)
def test_what_is_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        DcnPolicy(**given)


def test_a_network_may_have_no_layers_and_a_matrix_may_be_whole() -> None:
    assert DcnPolicy(hidden=()).hidden == () and DcnPolicy().rank is None
