"""Leaf modules of DeepSpeed: marked by class, by name, and by the configuration."""

import pytest
from torch import nn

import shardwise.deepspeed as deepspeed
from tests.deepspeed.files.whole import net


def test_leaf_modules_are_marked() -> None:
    model = net()
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Tanh]) == [model[1]]
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[1]] and deepspeed.utils.z3_leaf_module(
        model[1]
    )
    deepspeed.utils.unset_z3_leaf_modules(model, ["Tanh"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []
    for mark in (
        deepspeed.utils.set_z3_leaf_modules,
        deepspeed.utils.set_z3_leaf_modules_by_name,
        deepspeed.utils.set_z3_leaf_modules_by_suffix,
    ):
        with pytest.raises(ValueError, match="has no module"):
            mark(model, ["nothing"])


def test_leaf_modules_by_name_are_told_with_the_names_that_are_missing() -> None:
    model = net()
    by_name, by_suffix = (
        deepspeed.utils.set_z3_leaf_modules_by_name,
        deepspeed.utils.set_z3_leaf_modules_by_suffix,
    )
    assert by_name(model, ["1"]) == ([model[1]], []) and deepspeed.utils.z3_leaf_module(model[1])
    assert by_name(model, ["0", "nothing"], raise_if_not_found=False) == ([model[0]], ["nothing"])
    assert by_suffix(model, ["2", "nothing"], raise_if_not_found=False) == ([model[2]], ["nothing"])


def test_leaf_modules_of_the_configuration_are_marked() -> None:
    block = {"stage": 3, "leaf_module": {"classes": ["Tanh"], "names": ["0", "nothing"]}}
    model = net()
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": block}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1]]
    engine.destroy()
