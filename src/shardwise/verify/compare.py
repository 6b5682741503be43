"""Compare what a layout computed with the reference, tensor by tensor in causal order.

    start weights; then in every step: inputs, weights and outputs of modules as the forward pass uses them, the loss,
    and, from the last module to the first, the gradient of its output and of its parameters; the norm, the moments,
    the weights. Copies of a weight on several ranks are compared with one another before the weight

The first tensor in this order that is wrong has inputs that are right, so the mistake lies between them.

    pass   limit on the relative L2 error of a tensor
    fp64   1e-10
    own    4 × error of the plain loop in these dtypes + 8 eps

Scale of an error: the tensor's norm, or that of its summed absolute addends if larger. A gradient or moment whose norm
is below 10^-6 of that of all of its kind is held to that share, because it may be zero but for rounding (a bias of
keys, of which the softmax is independent). A weight's addends are its start and one update of the size of the learning
rate, to which Adam turns even such a gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.verify.causal import forward_tensors, gradient_tensors, unequal_copies
from shardwise.verify.ranks import RankRecords
from shardwise.verify.reference import Reference
from shardwise.verify.tensors import ComparedTensor, module_of

FP64_LIMIT = 1e-10
ROUNDED_LIMIT = 1e-4
"""Limit for a model that rounds to fp32 inside: its eps times the factor by which an update may blow rounding up."""
_SHARE = 1e-6
_TIMES_NOISE = 4.0
_TIMES_EPS = 8.0
KINDS = ("weights", "activations", "loss", "gradients", "norm", "moments")


def compared(
    found: Mapping[str, Any],
    reference: Reference,
    activations: RankRecords | None,
    left_out: dict[str, str],
) -> Iterator[ComparedTensor]:
    """Yield each tensor beside the reference's, in causal order.

    Args:
        found: What rank 0 recorded.
        reference: The plain loop's run.
        activations: What the ranks recorded of the outputs of modules.
        left_out: Receives each tensor that is not compared, with the reason.
    """
    if activations is not None:
        yield from unequal_copies(0, reference.start, activations)
    yield from _weights(found["start"], reference.start, 0, left_out)
    for step, (mine, truth) in enumerate(zip(found["steps"], reference.steps, strict=True)):
        if activations is not None:
            yield from forward_tensors(reference, activations, step, left_out)
        yield _number("loss", "loss", step, mine["loss"], truth.loss)
        yield from _gradients(mine["gradients"], reference, step, activations, left_out)
        yield _number("norm", "norm", step, mine["norm"], truth.norm)
        yield from _moments(mine["moments"], reference.moments[step], step, left_out)
        if activations is not None:
            yield from unequal_copies(step + 1, truth.weights, activations)
        yield from _weights(mine["weights"], truth.weights, step, left_out, is_after=True)


def _number(kind: str, name: str, step: int, got: float, wanted: float) -> ComparedTensor:
    pair = torch.tensor([got, wanted], dtype=torch.float64)
    return ComparedTensor(kind, kind, name, step, pair[:1], pair[1:], max(abs(wanted), 1e-300))


def _weights(
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    step: int,
    left_out: dict[str, str],
    is_after: bool = False,
) -> Iterator[ComparedTensor]:
    for name, truth in wanted.items():
        if name not in got:
            left_out[name] = "the engine's state has no weight of this name"
            continue
        addends = truth.double().abs() + (_RATE if is_after else 0.0)
        said = name if is_after else f"{name} at the start"
        scale = max(float(addends.norm()), 1e-300)
        yield ComparedTensor("weights", "weight", said, step, got[name].cpu(), truth, scale, module_of(name))


_RATE = 1e-3
"""The size of an update by which a weight that starts at zero is measured."""


def _gradients(
    got: Mapping[str, Tensor],
    reference: Reference,
    step: int,
    activations: RankRecords | None,
    left_out: dict[str, str],
) -> Iterator[ComparedTensor]:
    truth = reference.steps[step]
    floor = _SHARE * max(truth.norm, 1e-290)
    waiting = dict(truth.gradients)

    def of(names: Sequence[str]) -> Iterator[ComparedTensor]:
        for name in names:
            wanted, addends = waiting.pop(name), truth.addends[name]
            if name not in got:
                wrong = torch.zeros_like(wanted)
                yield ComparedTensor(
                    "gradients", "gradient", name, step, wrong, wanted, max(float(addends.norm()), floor), ""
                )
                continue
            scale = max(float(wanted.double().norm()), float(addends.double().norm()), floor)
            yield ComparedTensor(
                "gradients", "gradient", name, step, got[name].cpu(), wanted, scale, module_of(name)
            )

    for module in reversed(reference.order):
        if activations is not None:
            yield from gradient_tensors(module, step, reference, activations, left_out)
        yield from of([name for name in reversed(list(waiting)) if _owner(name, reference.order) == module])
    yield from of(list(reversed(list(waiting))))


def _owner(parameter: str, modules: Sequence[str]) -> str:
    """Return the module after whose gradient of the output a parameter's gradient is known.

    A parameter of a module that was not recorded belongs to the first recorded module inside the nearest recorded
    module around it, because gradients are computed from the last module to the first.
    """
    module = module_of(parameter)
    if module in modules:
        return module
    while module and module not in modules:
        module = module_of(module)
    return next((each for each in modules if each.startswith(f"{module}.") or not module), module)


def _moments(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], step: int, left_out: dict[str, str]
) -> Iterator[ComparedTensor]:
    whole: dict[str, float] = {}
    for name, truth in wanted.items():
        label = name.rsplit(" ", 1)[1]
        whole[label] = whole.get(label, 0.0) + float(truth.double().norm()) ** 2
    for name, truth in wanted.items():
        if name not in got:
            left_out[name] = "the engine does not return this moment as a whole tensor"
            continue
        parameter, label = name.rsplit(" ", 1)
        scale = max(float(truth.double().norm()), _SHARE * whole[label] ** 0.5, 1e-300)
        yield ComparedTensor(
            "moments", "moment", name, step, got[name].cpu(), truth, scale, module_of(parameter)
        )


class PassFigures(NamedTuple):
    """The counts and the worst errors of one pass, by kind, and the wrong tensors in causal order."""

    compared: dict[str, int]
    worst: dict[str, float]
    noise: dict[str, float]
    wrong: list[ComparedTensor]


def hold_to_limit(tensors: Iterator[ComparedTensor], limit: float = FP64_LIMIT) -> PassFigures:
    """Hold each tensor to one limit."""
    counts, worst, wrong = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), []
    for tensor in tensors:
        error = tensor.error
        counts[tensor.kind] += 1
        worst[tensor.kind] = max(worst[tensor.kind], error)
        if not error <= limit:
            wrong.append(tensor)
    return PassFigures(counts, worst, {}, wrong)


def hold_to_noise(
    tensors: Sequence[ComparedTensor], plain: Sequence[ComparedTensor], compute: torch.dtype
) -> PassFigures:
    """Hold each tensor to the error of the plain loop in the same dtypes.

    Args:
        tensors: The layout's tensors beside the truth in fp64.
        plain: The plain loop's tensors in the layout's dtypes beside the same truth.
        compute: The dtype of the computation, in which activations, loss and gradients are rounded.
    """
    noise = {(each.kind, each.name, each.step): each.error for each in plain}
    by_kind: dict[tuple[str, int], list[float]] = {}
    for (kind, _, step), error in noise.items():
        by_kind.setdefault((kind, step), []).append(error)
    usual = {key: sorted(errors)[len(errors) // 2] for key, errors in by_kind.items()}
    counts, worst, wrong = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), []
    for tensor in tensors:
        own = noise.get((tensor.kind, tensor.name, tensor.step), 0.0)
        eps = torch.finfo(compute if tensor.kind in ("loss", "gradients", "norm") else tensor.got.dtype).eps
        limit = _TIMES_NOISE * max(own, usual.get((tensor.kind, tensor.step), 0.0)) + _TIMES_EPS * eps
        counts[tensor.kind] += 1
        worst[tensor.kind] = max(worst[tensor.kind], tensor.error)
        if not tensor.error <= limit:
            wrong.append(tensor)
    largest = {kind: max((e for (k, _, _), e in noise.items() if k == kind), default=0.0) for kind in KINDS}
    return PassFigures(counts, worst, largest, wrong)


def hold_to_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> PassFigures:
    """Compare the steps that two runs have in common to the bit."""
    counts, worst, wrong = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), []
    steps = {second["first"] + i: each for i, each in enumerate(second["steps"])}
    for place, mine in enumerate(first["steps"]):
        step = first["first"] + place
        if step not in steps:
            continue
        other = steps[step]
        numbers = [_number(kind, kind, step, other[kind], mine[kind]) for kind in ("loss", "norm")]
        tensors = [
            ComparedTensor(
                kind, kind.removesuffix("s"), name, step, other[kind][name], wanted, 0.0, module_of(name)
            )
            for kind in ("gradients", "moments", "weights")
            for name, wanted in mine[kind].items()
        ]
        for each in [numbers[0], *tensors, numbers[1]]:
            counts[each.kind] += 1
            if not torch.equal(each.got, each.wanted):
                scale = max(float(each.wanted.double().norm()), 1e-300)
                each = each._replace(scale=scale)
                worst[each.kind] = max(worst[each.kind], each.error)
                wrong.append(each)
    return PassFigures(counts, worst, {}, wrong)
