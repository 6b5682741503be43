"""The optimizer that ``initialize`` returns: its class, and what it hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardwise.base.errors import UsageError
from shardwise.deepspeed.training.optimizer import (
    BF16_Optimizer,
    DeepSpeedOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    optimizer_of,
)


def view(stage: int = 0, compute: str = "fp32", loss_scale: float | None = None, dynamic: bool = True) -> Any:
    inner = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    precision = SimpleNamespace(compute=compute, loss_scale=SimpleNamespace(dynamic=dynamic))
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(precision=precision), loss_scale=loss_scale, module=nn.Linear(1, 1)
    )
    return optimizer_of(inner, engine, stage, lambda: True)


@pytest.mark.parametrize(
    ("stage", "compute", "kind"),
    [
        (0, "fp16", FP16_Optimizer),
        (0, "bf16", BF16_Optimizer),
        (1, "fp16", DeepSpeedZeroOptimizer),
        (2, "fp32", DeepSpeedZeroOptimizer),
        (3, "bf16", DeepSpeedZeroOptimizer_Stage3),
    ],
)
def test_the_class_follows_from_stage_and_dtype(stage: int, compute: str, kind: type) -> None:
    assert type(view(stage, compute)) is kind and not isinstance(view(stage, compute), FP16_UnfusedOptimizer)


def test_without_stage_and_16_bits_it_is_the_users_own_for_isinstance() -> None:
    plain = view()
    assert isinstance(plain, optim.SGD) and isinstance(plain, DeepSpeedOptimizer)
    assert plain == plain.optimizer and plain != view() and repr(plain) == repr(plain.optimizer)


def test_rates_are_those_of_the_inner_groups() -> None:
    shown = view(2)
    assert shown.param_groups[0] is shown.optimizer.param_groups[0] and shown.get_lr() == 0.5
    shown.set_lr(0.25)
    assert shown.optimizer.param_groups[0]["lr"] == 0.25 and shown.overflow


def test_the_engine_steps_and_drops_gradients() -> None:
    shown = view(1)
    (parameter,) = shown.param_groups[0]["params"]
    parameter.grad = torch.ones(1)
    shown.zero_grad()
    assert parameter.grad is not None
    with pytest.raises(UsageError, match=r"call engine\.step\(\)"):
        shown.step()


def test_the_loss_scale() -> None:
    assert (view(1).cur_scale, view(1).dynamic_loss_scale) == (1.0, False)
    assert (view(1, "fp16", 64.0).loss_scale, view(1, "fp16", 64.0).dynamic_loss_scale) == (64.0, True)
    assert not view(1, "fp16", 64.0, dynamic=False).dynamic_loss_scale


def test_there_are_no_hooks_to_take_away() -> None:
    holder = view(3).parameter_offload
    assert [*holder.module.named_parameters()] == [*holder.module.ds_external_parameters()] == []
    assert holder.module.in_features == 1 and holder.forward_hooks == holder.backward_hooks == []
