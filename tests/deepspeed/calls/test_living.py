"""The engine that has a parameter."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.living import engine_of, find, live, living


class Engine:
    """An engine with a model; it may be closed."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1)
        self.ours: Any = SimpleNamespace(is_closed=False)
        live(self)


def test_the_engine_and_the_name_of_a_parameter() -> None:
    one, other = Engine(), Engine()
    assert engine_of(other.module.bias, "call") == (other, "bias")
    assert find(one.module.weight) == (one, "weight")
    one.ours.is_closed = True
    assert find(one.module.weight) is None and one not in {*living()} and other in {*living()}


def test_a_parameter_of_no_engine_is_refused_by_the_name_of_the_call() -> None:
    with pytest.raises(UsageError, match="safe_get: no engine has this parameter"):
        engine_of(nn.Linear(1, 1).weight, "safe_get")


def test_an_engine_that_is_dropped_is_forgotten() -> None:
    engine = Engine()
    parameter = engine.module.weight
    del engine
    gc.collect()
    assert find(parameter) is None
