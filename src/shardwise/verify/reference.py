"""The independent reference of ``shardwise verify``: torch's own loop in one process.

    for each microbatch:   loss = model(batch);  (loss · w / Σw).backward()
    at the end of a step:  clip the norm of the gradients, optimizer.step()

The loop, the optimizer and the clipping are torch's. The only part of the engine in this loop are the keys of dropout
(models/dropout.py), because a mask is a function of the seed, the layer's name and the place in the run.

Scale of an error: the larger of a gradient's norm and of the norm of its summed absolute addends, because some true
gradients are zero, and then nothing but rounding is left to divide by.

Cost: one process that holds the whole model, its gradients, their addends and the optimizer's state.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import UsageError
from shardwise.models.dropout import KeyedDropout, replace_dropout
from shardwise.optim.policy import OptimizerPolicy
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.verify.activations import ActivationRecorder

LossOf = Callable[[nn.Module, Any], Tensor]
"""A function of the model and a microbatch that returns the loss."""
_CLASSES: dict[str, type[optim.Optimizer]] = {"adam": optim.Adam, "adamw": optim.AdamW, "sgd": optim.SGD}


class Truth(NamedTuple):
    """The numbers of one step of the plain loop."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    addends: dict[str, Tensor]
    """The sum of the absolute gradients of the microbatches."""
    weights: dict[str, Tensor]
    """The parameters after the step."""
    pieces: list[dict[str, Tensor]] = []
    """The weighted gradient of each microbatch, if they were kept."""


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    steps: Sequence[Sequence[tuple[Any, float]]],
    loss_of: LossOf,
    clip: float | None = None,
    around: Callable[[int, int], Any] = lambda step, place: nullcontext(),
    keeps_pieces: bool = False,
    compute: torch.dtype | None = None,
) -> list[Truth]:
    """Train with torch's own loop, and return the numbers of each step.

    Args:
        model: The model.
        optimizer: An optimizer of torch on its parameters.
        steps: The microbatches of each step with their weights; gradients are Σ w ∇loss / Σ w.
        loss_of: The function that returns the loss.
        clip: The largest norm of the gradients; None: no clipping.
        around: A function of the step and of the microbatch's place that returns the context of its passes.
        keeps_pieces: Keep the gradient of each microbatch.
        compute: The dtype in which a copy of the model computes; None: that of the parameters.
    """
    found = []
    for step, batches in enumerate(steps):
        total = sum(weight for _, weight in batches)
        addends = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        sums: dict[str, Tensor] = {}
        pieces: list[dict[str, Tensor]] = []
        loss_sum = 0.0
        running = model if compute is None else _copied(model).to(compute)
        for place, (batch, weight) in enumerate(batches):
            running.zero_grad()
            with around(step, place):
                loss = loss_of(running, batch if compute is None else with_dtype(batch, compute))
                (loss * (weight / total)).backward()
            loss_sum += float(loss.detach()) * weight / total
            own = {
                name: parameter.grad.to(addends[name].dtype)
                for name, parameter in running.named_parameters()
                if parameter.grad is not None
            }
            for name, gradient in own.items():
                addends[name] += gradient.abs()
                sums[name] = sums.get(name, 0) + gradient
            if keeps_pieces:
                pieces.append({name: gradient.clone() for name, gradient in own.items()})
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].clone() if name in sums else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append(Truth(loss_sum, float(norm), sums, addends, weights, pieces))
    return found


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose dropout draws at the same place in the run."""
    replays = [each._replay for each in model.modules() if isinstance(each, KeyedDropout)]
    return copy.deepcopy(model, {id(replay): replay for replay in replays})


def with_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating tensors in ``dtype``."""
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)


def can_optimize(policy: OptimizerPolicy) -> bool:
    """Return True if the optimizer is one that torch has too."""
    return policy.type in _CLASSES and policy.rules()[0][0] in _CLASSES


def torch_optimizer(model: nn.Module, policy: OptimizerPolicy) -> optim.Optimizer:
    """Return torch's own optimizer for the keys under ``optimizer:``.

    Raises:
        UsageError: if torch has no such optimizer.
    """
    rules = policy.rules()
    if not can_optimize(policy):
        raise UsageError(
            f"verify: the reference needs an optimizer of torch ({', '.join(_CLASSES)}); found {policy.type!r}"
        )
    groups: list[list[nn.Parameter]] = [[] for _ in rules]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = next((i + 1 for i, each in enumerate(policy.groups) if each.matches(name)), 0)
            groups[group].append(parameter)
    kind = _CLASSES[rules[0][0]]
    given = [
        {"params": some, **{key: value for key, value in options.items() if key != "correct"}}
        for some, (_, options) in zip(groups, rules, strict=True)
        if some
    ]
    return kind(given, lr=policy.lr)  # type: ignore[call-arg]


@dataclass
class Reference:
    """The plain loop's run: what the layout's run is compared with."""

    start: dict[str, Tensor]
    steps: list[Truth]
    moments: list[dict[str, Tensor]]
    """Moments after each step, by ``parameter label``."""
    activations: dict[str, Tensor] = field(default_factory=dict)
    activation_gradients: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Names of modules in the order in which the forward pass first used them."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)
    """Calls and returns of modules in the order of their first time, as ``ActivationRecorder.began``."""

    def to_plain(self) -> dict[str, Any]:
        """Return the run as a dictionary of tensors and plain containers, for a file."""
        return {**vars(self), "steps": [tuple(step) for step in self.steps]}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> "Reference":
        """Return the run that :meth:`to_plain` made a dictionary of."""
        return cls(**{**given, "steps": [Truth(*step) for step in given["steps"]]})


def run_reference(
    model: nn.Module,
    policy: OptimizerPolicy,
    steps: Sequence[Sequence[tuple[Any, float]]],
    loss_of: LossOf,
    *,
    clip: float | None,
    seed: int,
    rows: int,
    compute: torch.dtype | None = None,
    records: bool = True,
) -> Reference:
    """Run the plain loop and record weights, gradients, moments and activations.

    Args:
        model: The whole model, in the dtype of its masters.
        policy: The keys under ``optimizer:``.
        steps: The microbatches of each step with their weights.
        loss_of: The function that returns the loss.
        clip: The largest norm of the gradients.
        seed: The seed of the run, which is part of the key of a dropout mask.
        rows: Samples of a microbatch.
        compute: The dtype of the computation, if other than that of the masters.
        records: Record activations.
    """
    replay = DrawReplay()
    replace_dropout(model, seed, replay)
    names = {name: parameter for name, parameter in model.named_parameters()}
    start = {name: parameter.detach().clone() for name, parameter in names.items()}
    optimizer = torch_optimizer(model, policy)
    truths, moments = [], []
    recorder = ActivationRecorder(replay, rows)
    for step, batches in enumerate(steps):
        recorder.scale = 1.0

        def around(_: int, place: int, step: int = step) -> Any:
            return replay.at(BatchPosition(step + 1, place * rows, rows))  # the engine counts steps from 1

        with recorder.recording(model) if records and compute is None else nullcontext():
            truths += train(model, optimizer, [batches], loss_of, clip, around, step == 0, compute)
        moments.append(
            {
                f"{name} {label}": value.detach().clone()
                for name, parameter in names.items()
                for label, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor) and value.shape == parameter.shape
            }
        )
    return Reference(
        start,
        truths,
        moments,
        recorder.outputs,
        recorder.gradients,
        recorder.order,
        recorder.inputs,
        recorder.began,
    )


def unstable_module(
    model: nn.Module, batch: Any, loss_of: LossOf, seed: int, rows: int
) -> tuple[str, bool] | None:
    """Run one microbatch twice with one model object, and return the first module whose two outputs differ.

    Args:
        model: The whole model.
        batch: A microbatch.
        loss_of: The function that returns the loss.
        seed: The seed of the run.
        rows: Samples of the microbatch.

    Returns:
        The name of the module and False; its name and True if the first run gives a number that is not finite; None
        if the model is a function of its batch.
    """
    replay = DrawReplay()
    replace_dropout(model, seed, replay)
    runs = []
    for _ in range(2):
        recorder = ActivationRecorder(replay, rows)
        with recorder.recording(model), replay.at(BatchPosition(0, 0, rows)):
            loss = loss_of(model, batch)
        runs.append((recorder, loss.detach()))
    (first, loss), (second, again) = runs
    for key, output in first.outputs.items():
        name = key.partition(" step ")[0] or "the model"
        if not output.isfinite().all():
            return name, True
        if key not in second.outputs or not torch.equal(output, second.outputs[key]):
            return name, False
    if not loss.isfinite():
        return "the loss", True
    return None if torch.equal(loss, again) else ("the loss", False)


def silence_dropout(model: nn.Module) -> nn.Module:
    """Return the model with a dropout of zero in every module that has one."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            ):
                setattr(module, name, 0.0)
    return model


def worst(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], addends: Mapping[str, Tensor] | None = None
) -> float:
    """Return the largest relative error over all names; infinity if the names differ."""
    if set(got) != set(wanted):
        return float("inf")
    return max((error(got[n], wanted[n], addends[n] if addends else None) for n in wanted), default=0.0)


def error(got: Tensor, wanted: Tensor, addends: Tensor | None = None) -> float:
    """Return the relative L2 error over the larger of the norms of the wanted tensor and of its absolute addends."""
    scale = max(float(wanted.double().norm()), 0.0 if addends is None else float(addends.double().norm()))
    difference = float((got.double().cpu() - wanted.double()).norm())
    return difference / scale if scale else difference
