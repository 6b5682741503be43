"""A user's hooks on the model itself, cut into stages: each runs where what it is given is the model's own."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from tests.engine.nets import Language, seeded

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def triple(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * 3


def next_tokens(module: nn.Module, args: Any) -> Any:
    return ((args[0] + 1) % 11, args[1])


def halve(module: nn.Module, grads: Any) -> Any:
    return (grads[0] / 2,)


def hooked(seen: list[Any]) -> nn.Module:
    model: nn.Module = seeded(Language)
    model.register_forward_hook(double)
    model.register_forward_hook(triple, with_kwargs=True, always_call=True)
    model.register_forward_pre_hook(next_tokens)
    model.register_full_backward_pre_hook(halve)
    model.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return model


def figures(world: World, pp: int, late: bool = False) -> tuple[list[float], list[Any]]:
    seen: list[Any] = []
    config = {"mesh": {"pp": pp}, "optimizer": {"type": "sgd", "lr": 0.1}}
    engine = shardwise.initialize(hooked(seen), config, world=world)
    if late:
        for stage in engine._parts.stages:
            stage.module.register_forward_hook(double)
            stage.module.register_full_backward_pre_hook(halve)
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Full backward hook is firing"
        )  # torch's, of inputs without gradients
        for _ in range(2):
            result = engine.train_step([(TOKENS, TOKENS)])
            found += [result.loss, result.grad_norm]
    engine.close()
    return found, seen


def test_hooks_on_the_model_run_where_its_output_is(ranks: Any) -> None:
    """They ran on every stage: a hook that doubles the loss doubled the first stage's activations."""
    for late in (False, True):
        truth, _ = figures(join(quiet=True), 1, late)
        for rank, (found, seen) in enumerate(ranks(2).run(figures, 2, late)):
            torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
            assert seen == [torch.Size([])] * (2 * rank)
