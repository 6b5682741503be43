"""Pictures as arrays: padding, flips, and the shorter side."""

from typing import Any

import numpy as np

from shardwise.data.images import ImagePolicy
from shardwise.data.images.form import to_shorter_side
from shardwise.data.images.pictures import Pictures
from shardwise.data.placed import PositionedSample


class OnePicture(Pictures):
    """A ramp, so that a place in it can be told by its value."""

    def __init__(self) -> None:
        self.labels, self.class_names = np.zeros(1, dtype=np.int64), ("ramp",)

    def picture(self, index: int) -> np.ndarray:
        ramp = np.arange(1, 145, dtype=np.uint8).reshape(12, 12)
        return np.stack([ramp] * 3, -1)

    def fingerprint(self) -> str:
        return "ramp"


def test_padding_moves_and_flip_mirrors() -> None:
    from shardwise.data.images.form import ImageSamples

    def drawn(**keys: Any) -> np.ndarray:
        policy = ImagePolicy.model_validate({"mean": (0, 0, 0), "std": (1, 1, 1)} | keys)
        samples = ImageSamples(OnePicture(), np.zeros(1, dtype=np.int64), policy, 12, augments=True)
        images = samples.batch([PositionedSample(position, 0) for position in range(200)], 5).images
        return (images[:, 0] * 255).round().numpy().astype(int)

    ramp = np.arange(1, 145).reshape(12, 12)
    moved = drawn(padding=2, flip=False)
    places = set()
    for picture in moved:
        inside = picture[picture > 0]
        top, left = divmod(int(inside.min()) - 1, 12)
        bottom, right = divmod(int(inside.max()) - 1, 12)
        assert np.array_equal(inside, ramp[top : bottom + 1, left : right + 1].ravel())
        row, column = np.argwhere(picture == inside.min())[0]
        places.add((int(row) - top, int(column) - left))
    assert places == {(row, column) for row in range(-2, 3) for column in range(-2, 3)}
    mirrored = sum(np.array_equal(picture, ramp[:, ::-1]) for picture in drawn(padding=0))
    plain = sum(np.array_equal(picture, ramp) for picture in drawn(padding=0))
    assert mirrored + plain == 200 and 70 < mirrored < 130


def test_the_shorter_side_is_what_was_asked_for() -> None:
    picture = np.zeros((30, 47, 3), dtype=np.uint8)
    assert to_shorter_side(picture, 12).shape == (12, 19, 3)
    assert to_shorter_side(picture, 30) is picture
