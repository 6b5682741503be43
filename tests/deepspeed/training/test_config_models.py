"""Models of DeepSpeed's configuration blocks, as programs subclass and read them."""

import pytest
from pydantic import Field, ValidationError

from shardwise.base.errors import ConfigError
from shardwise.deepspeed.training.config_models import (
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
)


class Model(DeepSpeedConfigModel):
    size: int = 1
    words: list[str] | None = None
    word: str | None = Field(
        None,
        json_schema_extra={"deprecated": True, "new_param": "words", "new_param_fn": lambda word: [word]},
    )


def test_models_of_configurations() -> None:
    assert Model(word="a").words == ["a"] and Model(size="auto").size == 1
    with pytest.raises(ValidationError):
        Model(sizes=3)
    with pytest.raises(AssertionError, match="word is an older name of words"):
        Model(word="a", words=["b"])
    with pytest.raises(ValidationError, match="must be a number"):
        DeepSpeedFP16Config(loss_scale=[])
    with pytest.raises(ValidationError, match="above 0"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)
    assert DeepSpeedFP16Config(loss_scale=128, loss_scale_window=0).loss_scale == 128


def test_the_block_of_zero() -> None:
    leaves = DeepSpeedZeroConfig(leaf_module={"classes": "my.Class"}).leaf_module
    assert (leaves.classes, leaves.names, DeepSpeedZeroConfig().leaf_module.classes) == (["my.Class"], [], [])
    block = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=5, cpu_offload=True)
    assert (block.prefetch_bucket_size, block.overlap_comm, block.offload_param) == (5, True, None)
    assert block.offload_optimizer.device == "cpu" and not block.offload_optimizer.pipeline
    assert block.model_dump()["stage"] == 3 and "stage=3" in repr(block)
    with pytest.raises(ConfigError, match="unknown key"):
        DeepSpeedZeroConfig(stag=3)
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        block.nothing  # noqa: B018
