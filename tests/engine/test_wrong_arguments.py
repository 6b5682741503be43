"""What a call cannot serve is refused by name, where it is made: no traceback from inside, and no silence."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import deepspeed
from shardwise.base.errors import ConfigError, MismatchError, UsageError
from shardwise.cli.examples import named
from shardwise.comm import default_group


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = shardwise.initialize(nn.Linear(2, 1), {})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.set_full_tensor("weight", 3), "set_full_tensor: expected a tensor for weight"),
        (lambda e: e.set_local_tensor("weight", "x"), "set_local_tensor: expected a tensor for weight"),
        (lambda e: e.set_accumulation("two"), "whole number of microbatches, given 'two'"),
        (lambda e: e.set_accumulation(1.5), "whole number of microbatches, given 1.5"),
        (lambda e: e.load_state_dict({"weight": 1}), r"\['weight'\] are none"),
        (lambda e: e.gather_metrics(0.5), "expected a tensor, given 0.5"),
        (lambda e: e.monitor.send({"accuracy": "high"}), "a number for 'accuracy', given 'high'"),
    ],
)
def test_engine(engine: Any, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises((UsageError, MismatchError), match=says):
        call(engine)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None,), r"model: expected an nn.Module, given None"),
        ((nn.Linear,), r"model: expected an nn.Module, given the class Linear; make one: Linear\(...\)"),
        (({}, nn.Linear(2, 1)), "the second argument is a Linear, which is a model"),
        (
            (nn.Linear(2, 1), [{"zero": 1}]),
            "config: expected a path, a dictionary or a RunConfig, given a list",
        ),
    ],
)
def test_initialize(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        shardwise.initialize(*arguments)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
            r"^optimizer.step\(\): call engine.step",
        ),
        (
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "^clip_grad_norm_: set max_grad_norm: 1.0",
        ),
        (lambda model: model.weight.grad * 2, "^weight.grad: between engine.backward"),
    ],
)
def test_what_stands_in_a_gradient_begins_with_the_callers_cure(
    engine: Any, call: Callable[[nn.Module], object], says: str
) -> None:
    engine.backward(engine.module(torch.ones(3, 2)).sum())
    with pytest.raises(UsageError, match=says):
        call(engine.module)
    engine.discard()


DS = {"train_batch_size": 4}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: deepspeed.initialize(model="gpt", config=DS), "model is 'gpt'"),
        (
            lambda: deepspeed.initialize(model=nn.Linear(2, 1), optimizer="adam", config=DS),
            "optimizer is 'adam'",
        ),
        (lambda: deepspeed.zero.GatheredParameters("weight").__enter__(), "expected parameters"),
    ],
)
def test_deepspeed(call: Callable[[], object], says: str) -> None:
    try:
        with pytest.raises(UsageError, match=says):
            call()
    finally:
        default_group.end()


def test_a_misspelt_example_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpt_stdlib'"):
        named("gpt_sdtlib")
    assert named("nothing/like/it.yaml") == "nothing/like/it.yaml"
