"""Contexts in which sharded parameters are whole."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.calls.living import live
from shardwise.deepspeed.files.partitioned import GatheredParameters, unwrap_model_for_generation


class Engine:
    """An engine that notes which parameters are whole, and by whose edits."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1)
        self.whole: list[Any] = []
        self.ours: Any = SimpleNamespace(is_closed=False, full_parameters=self.full, gathered=self.full)
        live(self)

    @contextmanager
    def full(self, names: Any = "all", from_rank: int | None = None) -> Any:
        self.whole.append((names, from_rank))
        yield
        self.whole.append("cut")


def test_parameters_of_engines_are_whole_inside() -> None:
    one, other = Engine(), Engine()
    with GatheredParameters([one.module.weight, other.module.bias, one.module.bias], modifier_rank=0):
        assert one.whole == [(["weight", "bias"], 0)] and other.whole == [(["bias"], 0)]
    assert one.whole[-1] == other.whole[-1] == "cut"
    with GatheredParameters(one.module):
        assert one.whole[-1] == (["weight", "bias"], None)
    with GatheredParameters(other.module.weight), unwrap_model_for_generation(other) as model:
        assert other.whole[-2:] == [(["weight"], None), ("all", None)] and model is other.module


def test_nothing_is_gathered_where_nothing_is_cut() -> None:
    engine, free = Engine(), nn.Parameter(torch.zeros(1))
    for given, enabled in ((engine.module, False), ([], True), (free, True), ([torch.zeros(1)], True)):
        with GatheredParameters(given, enabled=enabled):
            assert engine.whole == []


def test_what_is_no_parameter_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="expected parameters, or a module, given 'weight'"),
        GatheredParameters(["weight"]),
    ):
        pass
    with pytest.raises(UsageError, match="given 3"), GatheredParameters(3):
        pass
