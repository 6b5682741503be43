"""The key ``deterministic``: torch's switches are on while an engine is open, and restored afterwards."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CheckpointError, ConfigError
from shardwise.comm.rendezvous.environment import set_cublas_workspace
from shardwise.comm.world import World, join
from shardwise.engine.parts.deterministic import prepare_cublas
from shardwise.models import Gpt, GptPolicy

ON = (True, False, True, False)
KEY = {"deterministic": True}


def switches() -> tuple[bool, bool, bool, bool]:
    """Return the values of torch's switches: on, warns only, and cuDNN's two."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(autouse=True)
def found() -> Iterator[tuple[bool, bool, bool, bool]]:
    """Set values that differ from torch's defaults, yield them, and restore the former values."""
    before = switches()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    yield switches()
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


@pytest.fixture
def world() -> World:
    """Return the World of one process."""
    return join(quiet=True)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean of the squares of the outputs."""
    return torch.as_tensor(model(batch).square().mean())


def test_the_switches_are_on_until_close(world: World, found: Any) -> None:
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(switches())
        return squares(model, batch)

    engine = shardwise.initialize(nn.Linear(4, 4), KEY, loss=loss, world=world)
    engine.train_step([torch.ones(2, 4)])
    assert seen == [ON] and switches() == ON
    engine.close()
    assert switches() == found
    engine.close()
    assert switches() == found, "a second call does nothing"


def test_without_the_key_nothing_changes(world: World, found: Any) -> None:
    engine = shardwise.initialize(nn.Linear(4, 4), {}, world=world)
    assert switches() == found
    engine.close()
    assert switches() == found


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_engine_restores_the_switches(world: World, found: Any, first: int) -> None:
    engines = [shardwise.initialize(nn.Linear(4, 4), KEY, world=world) for _ in range(2)]
    other = shardwise.initialize(nn.Linear(4, 4), {}, world=world)
    other.close()
    engines[first].close()
    assert switches() == ON
    engines[1 - first].close()
    assert switches() == found


def test_a_dropped_engine_holds_the_switches_until_the_next_build(world: World, found: Any) -> None:
    engine = shardwise.initialize(nn.Linear(4, 4), KEY, world=world)
    del engine
    gc.collect()
    shardwise.initialize(nn.Linear(4, 4), {}, world=world).close()
    assert switches() == found


def test_a_refused_build_restores_the_switches(world: World, found: Any) -> None:
    with pytest.raises(CheckpointError, match="init_from"):
        shardwise.initialize(nn.Linear(4, 4), {**KEY, "init_from": "/nowhere"}, world=world)
    assert switches() == found


class Overwrites(nn.Module):
    """A layer that calls an operation without a deterministic implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result.put(torch.tensor([0]), result.detach().flatten()[:1])


def test_an_operation_without_a_fixed_order_is_refused_with_the_key(world: World) -> None:
    engine = shardwise.initialize(Overwrites(), KEY, loss=squares, world=world)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic") as caught:
        engine.train_step([torch.ones(2, 4)])
    assert any("deterministic: true" in note for note in caught.value.__notes__)
    engine.close()


def trained(world: World, config: dict[str, Any]) -> tuple[list[tuple[float, float | None]], list[bytes]]:
    """Return the losses and norms of three steps of a GPT, and the weights as bytes."""
    torch.manual_seed(0)
    model = Gpt(GptPolicy(layers=2, width=16, heads=2, hidden=32, context=8, vocab=31))
    engine = shardwise.initialize(model, {"zero": {"stage": 3}, **config}, world=world)
    steps = []
    for step in range(3):
        tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step * 10 + world.rank))
        result = engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
        steps.append((result.loss, result.grad_norm))
    engine.close()
    return steps, [weight.detach().numpy().tobytes() for weight in model.parameters()]


def twice(world: World) -> list[Any]:
    """Train twice with the key and once without."""
    return [trained(world, config) for config in (KEY, KEY, {})]


def test_two_runs_have_the_same_bits(ranks: Any) -> None:
    for first, second, without in ranks(2).run(twice):
        assert first == second
        assert first == without, "a CPU sums in a fixed order without the key too"


# cuBLAS ------------------------------------------------------------------------------------------------------------

DEVICE = torch.device("cuda", 0)


def test_the_variable_is_set_unless_it_is_set_already() -> None:
    env: dict[str, str] = {}
    assert set_cublas_workspace(env) == ":4096:8" and env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert set_cublas_workspace(env) == ":16:8" and env == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_a_device_without_cublas_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare_cublas(torch.device("cpu"), lambda device: pytest.fail("no product on a CPU"))


def test_a_variable_that_came_too_late_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")

    def product(device: torch.device) -> None:
        raise RuntimeError(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
            "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
        )

    with pytest.raises(
        ConfigError, match="deterministic is true on cuda:0.*now :0:0.*export CUBLAS_WORKSPACE_CONFIG"
    ):
        prepare_cublas(DEVICE, product)


def test_another_error_of_the_product_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def product(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        prepare_cublas(DEVICE, product)
