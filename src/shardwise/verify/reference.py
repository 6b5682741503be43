"""The independent reference of ``shardwise verify``: torch's own loop in one process.

    for each microbatch:   loss = model(batch);  (loss · w / Σw).backward()
    at the end of a step:  clip the norm of the gradients, optimizer.step()

The loop, the optimizer and the clipping are torch's; the learning rates are the schedule's, which is a pure function of
the step (optim/schedule.py). The only parts of the engine in this loop are the keys of dropout (models/dropout.py),
because a mask is a function of the seed, the layer's name and the place in the run, and embedding tables, whose rows
are no parameters of torch: the collection updates them itself, whole on one rank.

Optimizers: every class that torch has. Muon is torch's class with AdamW for the rest; its Newton-Schulz rounds to 16
bits, which one more rounding in the last place turns into other numbers, so both runs compute it in fp64. LAMB, LARS,
Lion and rules without bias correction are not in torch: such a run has no plain loop.

Scale of an error: the larger of a gradient's norm and of the norm of its summed absolute addends, because some true
gradients are zero, and then nothing but rounding is left to divide by.

Cost: one process that holds the whole model, its gradients, their addends and the optimizer's state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import UsageError
from shardwise.base.policy import Policy
from shardwise.models.dropout import replace_dropout
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.schedule import factor, rates
from shardwise.optim.schedule_policy import SchedulePolicy, TorchSchedulePolicy
from shardwise.parallel.embedding.policy import TablesPolicy
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.verify.activations import ActivationRecorder
from shardwise.verify.rows import PlainTables, Rows

LossOf = Callable[[nn.Module, Any], Tensor]
"""A function of the model and a microbatch that returns the loss."""
_CLASSES: Mapping[str, type[optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "muon": optim.Muon,
}
_SCALARS = ("step", "eta", "mu", "mu_product")
"""State of torch's classes that is one number for a parameter."""
_NOT_TORCHS = ("correct", "ns_dtype", "type", "trust")
"""Keys of a rule that torch's classes do not have."""


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
    optimizer: Any,
    steps: Sequence[Sequence[tuple[Any, float]]],
    loss_of: LossOf,
    clip: float | None = None,
    around: Callable[[int, int], Any] = lambda step, place: nullcontext(),
    keeps_pieces: bool = False,
    tables: PlainTables | None = None,
    lr_factor: float = 1.0,
) -> list[Truth]:
    """Train with torch's own loop, and return the numbers of each step.

    Args:
        model: The model.
        optimizer: An optimizer of torch on its parameters, or one with the same ``step``.
        steps: The microbatches of each step with their weights; gradients are Σ w ∇loss / Σ w.
        loss_of: The function that returns the loss.
        clip: The largest norm of the gradients; None: no clipping.
        around: A function of the step and of the microbatch's place that returns the context of its passes.
        keeps_pieces: Keep the gradient of each microbatch.
        tables: The model's embedding tables, whose gradients count in the norm.
        lr_factor: The learning rate of rows as a share of its top.
    """
    found = []
    for step, batches in enumerate(steps):
        total = sum(weight for _, weight in batches)
        addends = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        sums: dict[str, Tensor] = {}
        pieces: list[dict[str, Tensor]] = []
        loss_sum = 0.0
        for place, (batch, weight) in enumerate(batches):
            model.zero_grad()
            with around(step, place):
                loss = loss_of(model, batch)
                (loss * (weight / total)).backward()
            loss_sum += float(loss.detach()) * weight / total
            own = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            for name, gradient in own.items():
                addends[name] += gradient.abs()
                sums[name] = sums.get(name, 0) + gradient
            if keeps_pieces:
                pieces.append({name: gradient.clone() for name, gradient in own.items()})
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].clone() if name in sums else None
        norm = _clip(model, float("inf") if clip is None else clip, tables, lr_factor)
        optimizer.step()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append(Truth(loss_sum, norm, sums, addends, weights, pieces))
    return found


def _clip(model: nn.Module, largest: float, tables: PlainTables | None, lr_factor: float) -> float:
    """Clip the gradients to the norm ``largest``, update the rows of tables, and return the norm before."""
    if tables is None:
        return float(nn.utils.clip_grad_norm_(model.parameters(), largest))
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = (float(nn.utils.get_total_norm(gradients)) ** 2 + tables.end_passes()) ** 0.5
    nn.utils.clip_grads_with_norm_(model.parameters(), largest, torch.tensor(norm, dtype=torch.float64))
    tables.step(lr_factor, min(1.0, largest / (norm + 1e-6)))
    return norm


def with_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating tensors in ``dtype``."""
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, batch)


def why_not(policy: OptimizerPolicy, schedule: Policy) -> str:
    """Return the reason why torch has no loop with this optimizer and schedule; "" if it has one."""
    unknown = sorted({kind for kind, _ in policy.rules()} - set(_CLASSES))
    if unknown:
        return (
            f"torch has no optimizer {unknown[0]!r}, so that there is no plain loop; --against LAYOUT compares with "
            "another layout"
        )
    if isinstance(schedule, TorchSchedulePolicy):
        return (
            "schedule.type torch is no function of the step; leave the schedule out, or use --against LAYOUT"
        )
    return ""


class TorchOptimizers:
    """Torch's own optimizers on the parameters of a model, one for each kind of rule, with the rates of each step.

    Args:
        model: The model.
        policy: The keys under ``optimizer:``.
        is_wide: True if Muon computes Newton-Schulz in the dtype of the gradients; False: in bf16, as torch does.

    Raises:
        UsageError: if torch has no such optimizer.
    """

    def __init__(self, model: nn.Module, policy: OptimizerPolicy, is_wide: bool = True) -> None:
        if reason := why_not(policy, SchedulePolicy()):
            raise UsageError(f"verify: {reason}")
        self._is_wide = is_wide
        self._options = policy.options()
        self._places: list[tuple[dict[str, Any], int]] = []
        by_kind: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        groups: list[list[nn.Parameter]] = [[] for _ in policy.rules()]
        blocks = repeated_blocks(model) if policy.type == "muon" else ()
        lookups = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_inside = any(name.startswith(f"{block}.") for block in blocks)
                is_hidden = is_inside and name not in lookups if parameter.dim() == 2 else None
                groups[policy.rule_of(name, is_hidden)].append(parameter)
        for place, (some, (kind, options)) in enumerate(zip(groups, policy.rules(), strict=True)):
            if some:
                given = {key: value for key, value in options.items() if key not in _NOT_TORCHS}
                by_kind.setdefault(kind, []).append((place, {"params": some, **given}))
        self.each = []
        for kind, own in by_kind.items():
            made: Any = _CLASSES[kind]([group for _, group in own], lr=policy.lr)  # type: ignore[call-arg]
            self.each.append(made)
            self._places += [(group, place) for group, (place, _) in zip(made.param_groups, own, strict=True)]

    def set_rates(self, schedule: Policy, applied: int) -> tuple[list[float], float]:
        """Set the numbers of each group as the schedule has them after ``applied`` steps.

        Returns:
            The learning rates of all groups, and the factor of those of tables.
        """
        numbers = rates(schedule, self._options, applied)
        for group, place in self._places:
            group.update({key: numbers[place][key] for key in numbers[place] if key in group})
        return [float(each["lr"]) for each in numbers], factor(schedule, self._options[0], applied)

    def step(self) -> None:
        """Update the parameters."""
        wide = patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone())
        with wide if self._is_wide else nullcontext():
            for each in self.each:
                each.step()

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return torch's state of one parameter; empty before its first step."""
        return next((dict(each.state[parameter]) for each in self.each if parameter in each.state), {})


@dataclass
class Reference:
    """The plain loop's run: what the layout's run is compared with."""

    start: dict[str, Tensor]
    steps: list[Truth]
    moments: list[dict[str, Tensor]]
    """Moments after each step, by ``parameter label``."""
    counts: list[dict[str, float]] = field(default_factory=list)
    """Step counts of the optimizer after each step, by parameter."""
    rates: list[list[float]] = field(default_factory=list)
    """Learning rates of each step, by group of the optimizer."""
    rows: list[Rows] = field(default_factory=list)
    """Rows of embedding tables, at the start and after each step."""
    activations: dict[str, Tensor] = field(default_factory=dict)
    activation_gradients: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Names of modules in the order in which the forward pass first used them."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)
    """Calls and returns of modules in the order of their first time, as ``ActivationRecorder.began``."""

    @classmethod
    def of_layout(cls, found: Mapping[str, Any]) -> "Reference":
        """Return what rank 0 of another layout recorded, as the run to compare with."""
        steps = [
            Truth(
                each["loss"],
                each["norm"],
                each["gradients"],
                {name: gradient.abs() for name, gradient in each["gradients"].items()},
                {name: tensor for name, tensor in each["weights"].items() if name not in found["per_rank"]},
            )
            for each in found["steps"]
        ]
        start = {name: tensor for name, tensor in found["start"].items() if name not in found["per_rank"]}
        rates = [[each["lr"]] for each in found["steps"]]
        return cls(start, steps, [each["moments"] for each in found["steps"]], rates=rates)

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
    schedule: Policy | None = None,
    table_policy: TablesPolicy | None = None,
    records: bool = True,
) -> Reference:
    """Run the plain loop and record weights, gradients, moments and activations.

    Args:
        model: The whole model, in the dtype of the loop.
        policy: The keys under ``optimizer:``.
        steps: The microbatches of each step with their weights.
        loss_of: The function that returns the loss.
        clip: The largest norm of the gradients.
        seed: The seed of the run, which is part of the key of a dropout mask.
        rows: Samples of a microbatch.
        schedule: The schedule of the learning rate; None: constant.
        table_policy: The keys under ``tables:``.
        records: Record activations.
    """
    replay = DrawReplay()
    replace_dropout(model, seed, replay)
    tables = PlainTables(model, next((each.dtype for each in model.parameters()), None), table_policy)
    found = Reference(whole_state(model), [], [], rows=[tables.rows()])
    names, optimizer = dict(model.named_parameters()), TorchOptimizers(model, policy)
    recorder = ActivationRecorder(replay, rows)
    with_tables = tables if tables.collections else None
    for step, batches in enumerate(steps):
        lrs, lr_factor = optimizer.set_rates(schedule or SchedulePolicy(), step)

        def around(_: int, place: int, step: int = step) -> Any:
            return replay.at(BatchPosition(step + 1, place * rows, rows))  # the engine counts steps from 1

        with recorder.recording(model) if records else nullcontext():
            (truth,) = train(
                model, optimizer, [batches], loss_of, clip, around, step == 0, with_tables, lr_factor
            )
        found.steps.append(truth._replace(weights=whole_state(model)))
        moments, counts = optimizer_state(optimizer, names)
        found.moments.append(moments)
        found.counts.append(counts)
        found.rates.append(lrs)
        found.rows.append(tables.rows())
    found.activations, found.activation_gradients = recorder.outputs, recorder.gradients
    found.order, found.inputs, found.began = recorder.order, recorder.inputs, recorder.began
    return found


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters under all of their names, and of the persistent buffers."""
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }


def optimizer_state(
    optimizer: TorchOptimizers, names: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return copies of the moments by ``parameter label``, and the step count of each parameter."""
    moments: dict[str, Tensor] = {}
    counts: dict[str, float] = {}
    for name, parameter in names.items():
        for label, value in optimizer.state_of(parameter).items():
            if label == "step":
                counts[name] = float(value)
            elif isinstance(value, Tensor) and value.shape == parameter.shape and label not in _SCALARS:
                moments[f"{name} {label}"] = value.detach().clone()
    return moments, counts


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
