"""A run's shapes without its data are those of its data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.base.errors import DataError
from shardwise.base.pytree import tensors_in
from shardwise.cli.check import check
from shardwise.cli.examples import found
from shardwise.cli.outlook.job_shapes import shapes_of
from shardwise.cli.request import CommandRequest
from shardwise.config.run import RunConfig
from shardwise.data.clicks import ClickPolicy, build_clicks, columns_of
from shardwise.data.images import ImagePolicy, build_images, classes_of

TARGET = "tests.cli.outlook.test_job_shapes"


class Samples(Dataset[dict[str, Tensor]]):
    """Samples of a user's own."""

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return {"tokens": torch.zeros(8, dtype=torch.int64), "targets": torch.zeros(8, dtype=torch.int64)}


def nothing() -> Samples:
    return Samples(0)


@pytest.mark.parametrize("name", ["gpt_stdlib", "bert", "cifar", "dlrm"])
def test_every_kind_of_data_gives_the_shapes_of_a_real_batch(name: str, tmp_path: Path) -> None:
    config = CommandRequest(str(found()[name]), (f"output_dir={tmp_path}",)).load()
    shapes = shapes_of(config, 4)
    parameters = sum(each.numel() for each in shapes.make().parameters())
    if name in ("cifar", "dlrm"):
        assert parameters == check(CommandRequest(str(found()[name]), (f"output_dir={tmp_path}",))).parameters
    sizes = [tuple(each.shape) for each in tensors_in(shapes.example)]
    assert all(size[0] in (4, 5) for size in sizes), sizes  # 5: offsets of 4 rows of keys
    assert (shapes.tokens is None) == (name in ("cifar", "dlrm"))


def test_the_vocabulary_is_the_tokenizers() -> None:
    given: dict[str, Any] = {"model": {"name": "gpt", "layers": 1, "width": 8, "heads": 1, "context": 4}}
    model = shapes_of(RunConfig.parse(given), 2).config.model
    assert getattr(model, "vocab", None) == 256
    absent = given | {"data": {"tokenizer": "not_here.json"}}
    with pytest.raises(Exception, match=r"not_here\.json"):
        shapes_of(RunConfig.parse(absent), 2)
    absent["model"] = {**given["model"], "vocab": 500}
    assert getattr(shapes_of(RunConfig.parse(absent), 2).config.model, "vocab", None) == 500


def test_a_target_gives_its_first_sample() -> None:
    model = {"name": "gpt", "layers": 1, "width": 8, "heads": 1, "context": 8, "vocab": 10}
    config = RunConfig.parse({"model": model, "data": {"target": f"{TARGET}:Samples"}})
    shapes = shapes_of(config, 3)
    assert shapes.example["tokens"].shape == (3, 8) and shapes.tokens == 8
    assert shapes.assumes == ("data.target: every sample as large as the first",)
    empty = RunConfig.parse({"model": model, "data": {"target": f"{TARGET}:nothing"}})
    with pytest.raises(DataError, match="no sample"):
        shapes_of(empty, 3)


def test_columns_and_classes_are_known_without_rows_and_pictures(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("label,price,site\n1,0.5,7\n0,1.5,9\n")
    for policy in (ClickPolicy(source=str(log), dense=["price"], sparse=["site"]), ClickPolicy()):
        policy = policy.model_copy(update={"validation": 0.5})
        opened = build_clicks(policy, tmp_path / "cache")
        assert columns_of(policy) == (opened.schema, opened.table_rows)
    pictures = ImagePolicy(synthetic={"classes": 7, "samples": 20})  # type: ignore[arg-type]
    assert classes_of(pictures) == len(build_images(pictures, 8).class_names) == 7
