"""Compare what a layout computed with the reference, tensor by tensor in causal order.

    start weights; then in every step: outputs of modules as the forward pass uses them, the loss, and, from the last
    module to the first, the gradient of its output and of its parameters; the norm, the moments, the weights

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.verify.reference import Reference

FP64_LIMIT = 1e-10
ROUNDED_LIMIT = 1e-4
"""Limit for a model that rounds to fp32 inside: its eps times the factor by which an update may blow rounding up."""
_SHARE = 1e-6
_TIMES_NOISE = 4.0
_TIMES_EPS = 8.0
KINDS = ("weights", "activations", "loss", "gradients", "norm", "moments")


class ComparedTensor(NamedTuple):
    """One tensor of the layout beside the reference's, with its place in the causal order."""

    kind: str
    """The kind in counts: one of KINDS."""
    what: str
    """The kind in a verdict: weight, activation, gradient, norm, moment, loss."""
    name: str
    step: int
    got: Tensor
    wanted: Tensor
    scale: float
    module: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """The relative L2 error; infinity if shapes differ or an element is not a number."""
        if self.got.shape != self.wanted.shape:
            return float("inf")
        difference = float((self.got.double() - self.wanted.double()).norm())
        found = difference / self.scale if self.scale else difference
        return found if found == found else float("inf")


@dataclass
class RankActivations:
    """Activations that the ranks of a layout saw, and where each rank stands."""

    by_rank: Sequence[Mapping[str, Any]]
    tp: int
    units: Sequence[str]

    def whole(self, of: str, key: str, shape: torch.Size) -> tuple[Tensor | None, str, tuple[int, ...]]:
        """Return the whole tensor of ``key``, the reason why there is none, and the ranks that hold it.

        A tensor lies whole on each rank along "tp", or cut along the one dim in which the ranks' sizes add up to that
        of the whole tensor.
        """
        ranks = [rank for rank, each in enumerate(self.by_rank) if key in each[of]]
        if not ranks:
            return None, "no rank runs this module by its own call", ()
        held = sorted(ranks, key=lambda rank: self.by_rank[rank]["place"]["tp"])
        pieces = [self.by_rank[rank][of][key] for rank in held]
        if all(piece.shape == shape for piece in pieces):
            if of == "gradients" and self.tp > 1:
                return (
                    None,
                    "whether ranks along tp hold the whole gradient or addends of it is not known",
                    (),
                )
            farthest = max(
                pieces, key=lambda piece: float((piece - pieces[0]).abs().nan_to_num(float("inf")).sum())
            )
            return (
                farthest,
                "",
                tuple(held),
            )  # a copy that is wrong on one rank must not hide behind right ones
        if len(pieces) != self.tp or any(piece.dim() != len(shape) for piece in pieces):
            return None, "the ranks hold parts of unknown placement", ()
        dims = [d for d in range(len(shape)) if any(piece.shape[d] != shape[d] for piece in pieces)]
        if len(dims) != 1 or sum(piece.shape[dims[0]] for piece in pieces) != shape[dims[0]]:
            return None, "the ranks hold parts of unknown placement", ()
        return torch.cat(pieces, dims[0]), "", tuple(held)


def compared(
    found: Mapping[str, Any],
    reference: Reference,
    activations: RankActivations | None,
    left_out: dict[str, str],
) -> Iterator[ComparedTensor]:
    """Yield each tensor beside the reference's, in causal order.

    Args:
        found: What rank 0 recorded.
        reference: The plain loop's run.
        activations: What the ranks recorded of the outputs of modules.
        left_out: Receives each tensor that is not compared, with the reason.
    """
    yield from _weights(found["start"], reference.start, 0, left_out)
    for step, (mine, truth) in enumerate(zip(found["steps"], reference.steps, strict=True)):
        if activations is not None:
            for module in reference.order:
                yield from _activations("outputs", module, step, reference.activations, activations, left_out)
        yield _number("loss", "loss", step, mine["loss"], truth.loss)
        yield from _gradients(mine["gradients"], reference, step, activations, left_out)
        yield _number("norm", "norm", step, mine["norm"], truth.norm)
        yield from _moments(mine["moments"], reference.moments[step], step, left_out)
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


def _activations(
    of: str,
    module: str,
    step: int,
    wanted: Mapping[str, Tensor],
    held: RankActivations,
    left_out: dict[str, str],
) -> Iterator[ComparedTensor]:
    said = module if of == "outputs" else f"gradient of the output of {module}"
    if module not in held.units:
        left_out[said] = "only outputs of whole Units are compared, whose placement the engine knows"
        return
    kind = "activations" if of == "outputs" else "activation gradients"
    prefix = f"{module} step {step + 1} piece "
    for key, truth in wanted.items():
        if not key.startswith(prefix):
            continue
        got, reason, ranks = held.whole(of, key, truth.shape)
        if got is None:
            left_out[said] = reason
            continue
        name = f"{said}, microbatch {key.removeprefix(prefix)}"
        scale = max(float(truth.double().norm()), 1e-300)
        yield ComparedTensor(
            "activations", kind.removesuffix("s"), name, step, got.cpu(), truth, scale, module, ranks
        )


def _gradients(
    got: Mapping[str, Tensor],
    reference: Reference,
    step: int,
    activations: RankActivations | None,
    left_out: dict[str, str],
) -> Iterator[ComparedTensor]:
    truth = reference.steps[step]
    floor = _SHARE * max(truth.norm, 1e-290)
    modules = list(reversed(reference.order))
    waiting = dict(truth.gradients)
    deep = [name for name in modules if activations is None or name in activations.units]

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

    for module in deep:
        if activations is not None:
            yield from _activations(
                "gradients", module, step, reference.activation_gradients, activations, left_out
            )
        yield from of([name for name in reversed(list(waiting)) if name.startswith(f"{module}.")])
    yield from of(list(reversed(list(waiting))))


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


def module_of(parameter: str) -> str:
    """Return the name of the module that holds ``parameter``."""
    return parameter.rpartition(".")[0]


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
