"""A DeepSpeed configuration with a lookup for each key."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.deepspeed.training import settings
from shardwise.deepspeed.training.settings import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    get_gradient_accumulation_steps,
    get_gradient_clipping,
    get_optimizer_params,
    get_train_batch_size,
    read,
)

GIVEN: dict[str, Any] = {"train_batch_size": 32, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}


def test_a_configuration_is_a_dictionary_a_file_or_text_of_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GIVEN))
    text = base64.urlsafe_b64encode(json.dumps(GIVEN).encode()).decode()
    assert read(GIVEN) == read(path) == read(str(path)) == read(text) == GIVEN
    for wrong, said in (([], "given a list"), (str(tmp_path / "none.json"), "none.json")):
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match=said):
                read(wrong)


def test_values_are_given_changed_or_defaults() -> None:
    config = DeepSpeedConfig(GIVEN)
    assert config.value("train_batch_size") == 32 and config.value("zero_optimization.stage") == 2
    assert config.value("gradient_clipping") == 1.0 and config.value("no_such_key") is None
    assert config.value("zero_optimization")["stage"] == 2
    assert config.value("zero_optimization")["overlap_comm"] == config.value("zero_optimization.overlap_comm")
    config.change("train_batch_size", 64)
    assert config.value("train_batch_size") == config.train_batch_size == 64


def test_keys_are_attributes_under_the_names_that_scripts_use() -> None:
    config = DeepSpeedConfig(GIVEN)
    assert config.zero_enabled and config.fp16_enabled and not config.bfloat16_enabled
    assert config.zero_optimization_stage == config.zero_config.stage == 2
    with pytest.raises(AttributeError):
        _ = config._hidden


def test_sizes_of_a_batch_follow_from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.default_group, "size", lambda: 4)
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    assert config.train_batch_size == 24
    config = DeepSpeedConfig({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})
    assert config.gradient_accumulation_steps == 2
    assert DeepSpeedConfig({"train_batch_size": 32}).train_micro_batch_size_per_gpu == 8
    config._configure_train_batch_size()
    assert config.gradient_accumulation_steps == 2
    config.train_batch_size = 33
    with pytest.raises(DeepSpeedConfigError, match="give two of them that divide"):
        config._configure_train_batch_size()


def test_getters_of_keys_give_the_default() -> None:
    assert get_gradient_clipping({}) == 1.0 and get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert get_optimizer_params({"optimizer": {"params": {"lr": 1}}}) == {"lr": 1}
    assert get_optimizer_params({"optimizer": 3}) == get_optimizer_params({})
    assert get_train_batch_size({"train_batch_size": 8}) == 8 and get_gradient_accumulation_steps({}) is None
