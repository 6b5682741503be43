"""Keys under ``model:`` for models of images."""

import pytest
from pydantic import ValidationError

from shardwise.models.images.policy import IMAGE_POLICIES, AlexNetPolicy, ResNetPolicy


def test_each_word_is_the_name_in_its_policy() -> None:
    assert {word: policy().name for word, policy in IMAGE_POLICIES.items()} == {
        word: word for word in IMAGE_POLICIES
    }


def test_a_picture_must_leave_a_pixel() -> None:
    assert AlexNetPolicy(size=63).size == 63
    for policy, size in ((AlexNetPolicy, 62), (ResNetPolicy, 7)):
        with pytest.raises(ValidationError, match="greater than or equal to"):
            policy(size=size)


def test_depths_are_those_of_the_paper() -> None:
    assert [ResNetPolicy(depth=depth).depth for depth in (18, 34, 50, 101, 152)] == [18, 34, 50, 101, 152]
    with pytest.raises(ValidationError, match="18, 34, 50, 101 or 152"):
        ResNetPolicy(depth=19)
