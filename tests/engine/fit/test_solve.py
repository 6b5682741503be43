"""The value that is solved for fits the memory, and the next one does not."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config.run import RunConfig
from shardwise.engine.fit import foresee as foreseeing
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.fit.solve import SolvedKey, solve
from shardwise.models import Gpt, GptPolicy

MODEL = {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 8, "vocab": 32}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that take nothing by themselves."""
    monkeypatch.setattr(foreseeing, "resident_bytes", lambda: 0)


def make(config: RunConfig) -> nn.Module:
    assert isinstance(config.model, GptPolicy)
    with torch.device("meta"):
        return Gpt(config.model)


def example(config: RunConfig) -> dict[str, torch.Tensor]:
    assert isinstance(config.model, GptPolicy)
    ids = torch.empty(config.batch.micro_size or 1, config.model.context, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


def needs(given: dict[str, Any], ranks: int = 1) -> int:
    config = RunConfig.parse(given)
    return foresee(lambda: make(config), given, ranks, example=example(config)).bytes_by_tier["device"]


def solved(key: str, given: dict[str, Any], memory: int, **more: Any) -> SolvedKey:
    return solve(key, make, {"model": MODEL} | given, {"device": memory}, example, **more)


def test_the_micro_size_fits_and_the_next_does_not() -> None:
    memory = needs({"model": MODEL, "batch": {"micro_size": 3}})
    found = solved("batch.micro_size", {}, memory)
    assert (found.value, found.beyond) == (3, 4) and found.outlook.bytes_by_tier["device"] == memory
    assert needs({"model": MODEL, "batch": {"micro_size": 4}}) > memory
    assert found.plain() == {"key": "batch.micro_size", "value": 3}


@pytest.mark.soak
def test_a_micro_size_divides_the_samples_of_a_step() -> None:
    memory = needs({"model": MODEL, "batch": {"micro_size": 3}})
    assert solved("batch.micro_size", {}, memory - 1).value == 2
    divided = solved("batch.micro_size", {"batch": {"global_size": 8, "accumulation": 8}}, memory)
    assert (divided.value, divided.beyond) == (2, 4)


def test_the_fewest_ranks_fit_and_fewer_do_not() -> None:
    # Memory between ranks of one host would be larger than the state of so small a model.
    comm = {"transport": "torch"}
    given = {"zero": {"stage": 3}, "batch": {"global_size": 8, "micro_size": 1}, "comm": comm}
    memory = needs({"model": MODEL} | given, 4)
    found = solved("ranks", given, memory)
    assert (found.value, found.beyond) == (4, 2) and needs({"model": MODEL} | given, 2) > memory
    with pytest.raises(ConfigError, match="solve: mesh.dp sets the number of ranks"):
        solved("ranks", {"mesh": {"dp": 2}}, memory)


@pytest.mark.soak
def test_layers_are_solved_for_and_nothing_fits_too_small_a_memory() -> None:
    found = solved("model.layers", {}, needs({"model": MODEL | {"layers": 2}}))
    assert (found.value, found.beyond) == (2, 3)
    nothing = solved("model.context", {}, 1000, multiple=8)
    assert nothing.value is None and nothing.beyond is None


def test_a_key_without_order_names_those_that_have_one() -> None:
    with pytest.raises(
        ConfigError, match=r"'zero.stage' have no order .*batch.micro_size, .*model.layers, ranks"
    ):
        solved("zero.stage", {}, 1000)
    with pytest.raises(ConfigError, match=r"did you mean 'model.layers'"):
        solved("model.layer", {}, 1000)
