"""Keys under ``data:`` for pictures."""

import pytest
from pydantic import ValidationError

from shardwise.data.images.policy import ImagePolicy, SyntheticImagePolicy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"crop_area": (0.5, 0.4)}, "the least share comes first"),
        ({"crop_area": (0, 1)}, "greater than 0"),
        ({"std": (1, 0, 1)}, "greater than 0"),
        ({"validation": 1.0}, "less than 1"),
        ({"crop": "middle"}, "'pad', 'resized' or 'none'"),
    ],
)
def test_what_is_refused(given: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ImagePolicy(**given)


def test_an_area_may_be_one_size_and_nothing_may_be_held_out() -> None:
    policy = ImagePolicy(crop_area=(0.5, 0.5), validation=0.0)
    assert policy.crop_area == (0.5, 0.5) and policy.validation == 0.0


def test_one_class_cannot_be_told_from_another() -> None:
    assert SyntheticImagePolicy(classes=2).classes == 2
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        SyntheticImagePolicy(classes=1)
