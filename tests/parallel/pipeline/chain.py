"""A pipeline in one process: stages run one after the other, tensors cross as they would between ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.messages import pack, unpack
from shardwise.parallel.pipeline.stage_module import StageModule


def forward_backward(stages: dict[int, StageModule], call: Callable[[nn.Module], Tensor]) -> Tensor:
    """The loss; gradients are left in the stages' parameters."""
    received: dict[int, Any] = {0: None}
    outputs: dict[int, Any] = {}
    for number, stage in stages.items():
        outputs[number] = stage.run(call, received[number])
        if not stage.is_last:
            text, tensors = pack(outputs[number])
            received[number + 1] = unpack(text, [tensor.detach().clone() for tensor in tensors])
    loss: Tensor = outputs[len(stages) - 1]
    loss.backward()
    for number in range(len(stages) - 2, -1, -1):
        gradients = [tensor.grad for tensor in trained(received[number + 1])]
        pairs = [(o, g) for o, g in zip(trained(outputs[number]), gradients, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return loss.detach()


def trained(value: Any) -> list[Tensor]:
    """The tensors of ``value`` through which gradients flow back, in the order of both ends of a message."""
    return [tensor for tensor in pack(value).tensors if tensor.requires_grad]


def gradients_of(stages: dict[int, StageModule], model: nn.Module) -> dict[str, Tensor]:
    """By the first name in the whole ``model``: those of tied parameters are summed over their stages."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    found: dict[str, Tensor] = {}
    for stage in stages.values():
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                key = names[name]
                found[key] = found[key] + parameter.grad if key in found else parameter.grad.clone()
                parameter.grad = None
    return found


def error_of_cut(model: nn.Module, call: Callable[[nn.Module], Tensor], starts: Sequence[str]) -> float:
    """Largest relative error of loss and gradients against the whole model; infinite where names differ."""
    model.zero_grad()
    loss = call(model)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stages = cut(model, starts, range(len(starts) + 1))
    got_loss = forward_backward(stages, call)
    got = gradients_of(stages, model)
    if set(got) != set(wanted):
        return float("inf")
    scale = max(float(g.norm()) for g in wanted.values())
    worst = max(float((got[name] - wanted[name]).norm()) for name in wanted) / scale
    return max(worst, float((got_loss - loss.detach()).abs()))
