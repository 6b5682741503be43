"""What is drawn for a picture follows from seed and position, on any number of ranks and workers."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.images.test_build import truncated

from shardwise.base.errors import DataError
from shardwise.data import Loader, evaluation_batches
from shardwise.data.images import ImagePolicy, build_images
from shardwise.data.images.form import rectangle
from shardwise.data.placed import PositionedSample, draws_at

# Worker processes are forked, which newer Pythons remark upon when threads are alive.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SYNTHETIC = {"samples": 40, "validation_samples": 10, "classes": 3}


def corpus(**changes: Any) -> Any:
    return build_images(ImagePolicy.model_validate({"synthetic": SYNTHETIC} | changes), 12)


def steps(dp: int, workers: int, count: int = 5, **changes: Any) -> list[list[Any]]:
    """The first steps, their microbatches in the order that all layouts share."""
    loaders = [
        Loader(
            corpus(**changes).train,
            global_batch=8,
            micro_batch=2,
            dp_index=index,
            dp_size=dp,
            seed=3,
            workers=workers,
        )
        for index in range(dp)
    ]
    made = []
    for _ in range(count):
        parts = [loader.step_batches() for loader in loaders]
        made.append([batch for row in zip(*parts, strict=True) for batch in row])
    for loader in loaders:
        loader.close()
    return made


def same(left: list[list[Any]], right: list[list[Any]]) -> bool:
    return all(
        torch.equal(a, b)
        for step, other in zip(left, right, strict=True)
        for x, y in zip(step, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_ranks_and_workers_change_nothing(crop: str) -> None:
    alone = steps(1, 0, crop=crop)
    assert same(alone, steps(2, 0, crop=crop)) and same(alone, steps(4, 0, crop=crop))
    assert same(alone, steps(1, 2, crop=crop))
    assert not same(alone, steps(1, 0, crop="none"))


def test_an_epoch_draws_anew_and_a_resume_goes_on() -> None:
    data = corpus(shuffle=False).train
    first, second = (data.batch([PositionedSample(position, 0)], 0).images for position in (0, 40))
    assert not torch.equal(first, second)
    loader = Loader(data, global_batch=8, micro_batch=8, seed=3)
    loader.step_batches()
    again = Loader(data, global_batch=8, micro_batch=8, seed=3)
    again.load_state(loader.state())
    assert torch.equal(loader.step_batches()[0].images, again.step_batches()[0].images)


def test_every_held_out_picture_counts_once() -> None:
    data = corpus().validation
    seen = [
        label
        for rank in range(4)
        for batch, samples in evaluation_batches(data, rank, 4, 2)
        for label in batch.labels[:samples].tolist()
    ]
    assert sorted(seen) == sorted(data.pictures.labels.tolist())


def test_rectangles_have_the_share_that_was_asked_for() -> None:
    draws = draws_at(0, 0)
    for box in (rectangle((100, 80), (0.2, 0.5), draws) for _ in range(200)):
        assert 0 <= box.left < box.right <= 80 and 0 <= box.top < box.bottom <= 100
        assert 0.18 < (box.right - box.left) * (box.bottom - box.top) / 8000 < 0.53
    assert rectangle((100, 10), (1.0, 1.0), draws) == (0, 43, 10, 56)  # none fits: the middle


def test_a_worker_says_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    path = truncated(tmp_path)
    data = build_images(ImagePolicy(source=str(tmp_path), validation=0), 8).train
    loader = Loader(data, global_batch=6, micro_batch=6, workers=1)
    with pytest.raises(DataError) as caught:
        list(islice(loader, 2))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
