"""Compare what a layout computed with the reference, tensor by tensor in causal order.

    start weights; then in every step: inputs, weights and outputs of modules as the forward pass uses them (causal.py),
    the loss, and, from the last module to the first, the gradient of its output and of its parameters; the norm,
    whether the step was skipped, the learning rate, step counts, moments, copies that differ between ranks, masters,
    weights, rows of tables

The first tensor in this order that is wrong has inputs that are right, so the mistake lies between them. A tensor that
only one of the two runs has is wrong.

    pass      limit on the relative L2 error of a tensor
    fp64      1e-10
    own       4 · noise of the plain loop + 8 eps (own.py)
    bitwise   equal bits

Scale of an error: the tensor's norm, or that of its summed absolute addends if larger. A gradient or moment whose norm
is below 10^-6 of that of all of its kind is held to that share, because it may be zero but for rounding (a bias of
keys, of which the softmax is independent). A weight's addends are its start and 10^-3.

[Note: undetermined updates] Optimizers other than SGD divide an element's gradient by its own size. So an element whose
gradient is zero but for rounding δ gets an update of up to the learning rate whose size, or sign, is that of the
rounding: its relative error is δ/|g|. With δ = 10^-14 of the largest gradient, an element of a weight or master may be
wrong by this share of two learning rates per step, and one of a moment by this share of itself. A gradient that is zero
to the bit allows nothing, and neither does one above 10^-3 of the largest.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.verify.causal import OutputGradients, forward_tensors, unequal_copies
from shardwise.verify.ranks import RankRecords
from shardwise.verify.reference import Reference
from shardwise.verify.rows import row_pairs, same_rows
from shardwise.verify.tensors import ComparedTensor, module_of

FP64_LIMIT = 1e-10
ROUNDED_LIMIT = 1e-4
"""Limit for a model that rounds to fp32 inside: its eps times the factor by which an update may blow rounding up."""
_SHARE = 1e-6
KINDS = ("weights", "activations", "loss", "gradients", "norm", "counts", "moments", "masters", "rows")
_ROUNDING = 1e-14
"""The rounding of an element's gradient in fp64, as a share of the largest gradient of the model."""
_LEAST_SHARE = 1e-11
"""Smallest relative error of an update that is allowed for; below, the limit of the pass suffices."""


def compared(
    found: Mapping[str, Any],
    reference: Reference,
    activations: RankRecords | None,
    left_out: dict[str, str],
    by_rank: Sequence[Mapping[str, Any]] = (),
    declared: dict[str, str] | None = None,
) -> Iterator[ComparedTensor]:
    """Yield each tensor beside the reference's, in causal order.

    Args:
        found: What rank 0 recorded.
        reference: The plain loop's run.
        activations: What the ranks recorded of the outputs of modules.
        left_out: Receives each tensor that is not compared, with the reason.
        by_rank: What each rank recorded of its own step counts and rows.
        declared: Receives differences that are no faults, with the reason.
    """
    declared = {} if declared is None else declared
    per_rank = [name for name in found.get("per_rank", ()) if name in found["start"]]
    no_weights = dict.fromkeys(per_rank, "each rank has its own numbers of its own samples")
    declared |= no_weights
    if activations is not None:
        yield from unequal_copies(0, reference.start, activations)
    yield from _weights(found["start"], reference.start, 0, no_weights)
    yield from _rows(by_rank, reference, 0)
    allowed: dict[str, Tensor] = {}
    moved = 0.0
    for step, (mine, truth) in enumerate(zip(found["steps"], reference.steps, strict=True)):
        if activations is not None:
            yield from forward_tensors(reference, activations, step, left_out)
        yield _number("loss", "loss", step, mine["loss"], truth.loss)
        yield from _gradients(mine["gradients"], reference, step, activations, left_out)
        yield _number("norm", "norm", step, mine["norm"], truth.norm)
        yield from _counts(mine, by_rank, reference, step)
        moved += 2 * max(reference.rates[step]) if reference.rates else 0.0
        allow_rounding(allowed, truth.gradients)
        yield from _moments(mine["moments"], reference.moments[step], step, allowed)
        masters = {name: truth.weights[name] for name in mine.get("masters", {}) if name in truth.weights}
        for name in set(mine.get("masters", {})) ^ {name for name in truth.gradients if "masters" in mine}:
            if name not in masters:
                left_out[f"master of {name}"] = "the engine does not return it as a whole tensor"
        if activations is not None:
            yield from unequal_copies(step + 1, truth.weights, activations)
        yield from _masters(mine.get("masters", {}), masters, step, allowed, moved)
        yield from _weights(mine["weights"], truth.weights, step, no_weights, allowed, moved)
        yield from _rows(by_rank, reference, step + 1)


def allow_rounding(allowed: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Raise each element's allowance to that of a step with these gradients ([Note: undetermined updates])."""
    largest = max((float(each.abs().max()) for each in gradients.values() if each.numel()), default=0.0)
    for name, gradient in gradients.items():
        size = gradient.double().abs()
        share = (_ROUNDING * largest / size.clamp(min=1e-300)).clamp(max=1.0)
        own = torch.where((size > 0) & (share > _LEAST_SHARE), share, 0.0)
        allowed[name] = own if name not in allowed else torch.maximum(own, allowed[name])


def _number(kind: str, name: str, step: int, got: float, wanted: float, what: str = "") -> ComparedTensor:
    pair = torch.tensor([got, wanted], dtype=torch.float64)
    return ComparedTensor(kind, what or kind, name, step, pair[:1], pair[1:], max(abs(wanted), 1e-300))


def _counts(
    mine: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]], reference: Reference, step: int
) -> Iterator[ComparedTensor]:
    """Yield whether the step was skipped, the learning rate, and the step counts that each rank holds."""
    if "skipped" in mine:
        yield _number("counts", "skipped", step, float(mine["skipped"]), 0.0, "norm")
    if "lr" in mine and reference.rates:
        yield _number("counts", "learning rate", step, mine["lr"], reference.rates[step][0], "rate")
    if not reference.counts:
        return
    for rank, each in enumerate(by_rank):
        for name, counts in each["counts"][step].items():
            wanted = reference.counts[step].get(name, 0.0)
            farthest = max(counts, key=lambda count: abs(count - wanted))
            found = _number("counts", f"step count of {name}", step, farthest, wanted, "step count")
            yield found._replace(module=module_of(name), ranks=(rank,))


def _rows(by_rank: Sequence[Mapping[str, Any]], reference: Reference, place: int) -> Iterator[ComparedTensor]:
    """Yield the rows that each rank holds beside the plain loop's rows of these keys."""
    if len(reference.rows) <= place or not by_rank:
        return
    held = [each["rows"][place] if place < len(each["rows"]) else {} for each in by_rank]
    for table, part, rank, got, wanted in row_pairs(held, reference.rows[place]):
        scale = max(float(wanted.double().norm()), 1e-300)
        if got.shape == wanted.shape:
            scale = max(float((wanted.double().abs() + (_RATE if part == "weights" else 0.0)).norm()), 1e-300)
        name = f"rows of {table}" if part == "weights" else f"rows of {table} {part}"
        yield ComparedTensor(
            "rows", "row", name, max(place - 1, 0), got, wanted, scale, table.rpartition(".")[0], (rank,)
        )


def _missing(kind: str, what: str, name: str, step: int, only: Tensor, is_ours: bool) -> ComparedTensor:
    """Return the comparison of a tensor that one side lacks: with zeros, of which it is infinitely far."""
    zeros = torch.zeros_like(only)
    got, wanted = (only.cpu(), zeros.cpu()) if is_ours else (zeros, only)
    said = f"{name}, which {'one process' if is_ours else 'the layout'} does not have"
    return ComparedTensor(kind, what, said, step, got, wanted, 0.0, module_of(name))


def _weights(
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    step: int,
    not_compared: Mapping[str, str],
    allowed: Mapping[str, Tensor] | None = None,
    moved: float = 0.0,
) -> Iterator[ComparedTensor]:
    for name in [*wanted, *(name for name in got if name not in wanted)]:
        if name in not_compared:
            continue
        if name not in got or name not in wanted:
            only = got[name] if name in got else wanted[name]
            yield _missing("weights", "weight", name, step, only, name in got)
            continue
        said = name if allowed is not None else f"{name} at the start"
        yield _updated("weights", "weight", said, name, step, got[name], wanted[name], allowed or {}, moved)


def _masters(
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    step: int,
    allowed: Mapping[str, Tensor],
    moved: float,
) -> Iterator[ComparedTensor]:
    for name, truth in wanted.items():
        yield _updated("masters", "master", name, name, step, got[name], truth, allowed, moved)


def _updated(
    kind: str,
    what: str,
    said: str,
    name: str,
    step: int,
    got: Tensor,
    truth: Tensor,
    allowed: Mapping[str, Tensor],
    moved: float,
) -> ComparedTensor:
    """Return the comparison of a tensor that updates have changed by ``moved`` at most."""
    scale = max(float((truth.double().abs() + _RATE).norm()), 1e-300)
    if name in allowed:
        got = _within(got.cpu(), truth, allowed[name] * moved * (1 + 1e-6))
    return ComparedTensor(kind, what, said, step, got.cpu(), truth, scale, module_of(name))


def _within(got: Tensor, truth: Tensor, allowed: Tensor) -> Tensor:
    """Return ``got`` with those elements that are wrong by less than ``allowed`` set to the truth."""
    if got.shape != truth.shape:
        return got
    return torch.where((got.double() - truth.double()).abs() <= allowed, truth.to(got.dtype), got)


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
                yield _missing("gradients", "gradient", name, step, wanted, False)
                continue
            scale = max(float(wanted.double().norm()), float(addends.double().norm()), floor)
            yield ComparedTensor(
                "gradients", "gradient", name, step, got[name].cpu(), wanted, scale, module_of(name)
            )

    outputs = None if activations is None else OutputGradients(step, reference, activations, left_out)
    owned: dict[str, list[str]] = {}
    for name in reversed(list(waiting)):
        owned.setdefault(_owner(name, reference.order), []).append(name)
    for module in reversed(reference.order):
        if outputs is not None:
            yield from outputs.of(module)
        yield from of(owned.get(module, []))
    yield from of(list(reversed(list(waiting))))
    for name in got:
        if name not in truth.gradients:
            yield _missing("gradients", "gradient", name, step, got[name], True)


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
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    step: int,
    allowed: Mapping[str, Tensor],
) -> Iterator[ComparedTensor]:
    whole: dict[str, float] = {}
    for name, truth in wanted.items():
        label = name.rsplit(" ", 1)[1]
        whole[label] = whole.get(label, 0.0) + float(truth.double().norm()) ** 2
    for name, truth in wanted.items():
        if name not in got:
            yield _missing("moments", "moment", name, step, truth, False)
            continue
        parameter, label = name.rsplit(" ", 1)
        ours = got[name].cpu()
        if parameter in allowed:
            ours = _within(ours, truth, allowed[parameter] * truth.double().abs())
        scale = max(float(truth.double().norm()), _SHARE * whole[label] ** 0.5, 1e-300)
        yield ComparedTensor("moments", "moment", name, step, ours, truth, scale, module_of(parameter))
    # A parameter that no pass has used has moments of zeros here, and none in torch's optimizer.
    for name in got:
        if name not in wanted and bool(got[name].ne(0).any()):
            yield _missing("moments", "moment", name, step, got[name], True)


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


def hold_to_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> PassFigures:
    """Compare the steps of the second run with the same steps of the first to the bit.

    Steps that the second run should have done and lacks are wrong, and so are names that only one of the two has.
    """
    figures = PassFigures(dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), {}, [])
    mine = {first["first"] + i: each for i, each in enumerate(first["steps"])}
    theirs = {second["first"] + i: each for i, each in enumerate(second["steps"])}
    begins = max(first["first"], second["first"])
    for step in [step for step in mine if step >= begins] or [*mine]:
        if step not in theirs:
            _add_bits(
                figures, _number("loss", "loss, which the other run does not have", step, 0.0, float("nan"))
            )
            continue
        for each in _bits_of(mine[step], theirs[step], step):
            _add_bits(figures, each)
    return figures


def state_bits(
    first: Mapping[str, Any], second: Mapping[str, Any], step: int, per_rank: Collection[str] = ()
) -> PassFigures:
    """Compare the weights, masters and moments of two runs after the same step to the bit.

    Args:
        first: Weights, masters and moments of the first run.
        second: Those of the second run.
        step: The step.
        per_rank: Names of buffers of which each rank has its own numbers.
    """
    figures = PassFigures(dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), {}, [])
    for each in _state_pairs(first, second, step, ("moments", "masters", "weights")):
        if each.name not in per_rank:
            _add_bits(figures, each)
    return figures


def row_bits(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], first_step: int, second_step: int
) -> PassFigures:
    """Compare the rows that each rank holds in two runs of one layout to the bit.

    Args:
        first: What each rank recorded in the first run.
        second: What each rank recorded in the second run.
        first_step: The number of steps before the first run.
        second_step: The number of steps before the second run.
    """
    figures = PassFigures(dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), {}, [])
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        for place, theirs in enumerate(other["rows"]):
            mine, step = one["rows"][second_step - first_step + place], max(second_step + place - 1, 0)
            for table, part, got, wanted in same_rows(theirs, mine):
                name = f"rows of {table} {part}".removesuffix(" weights")
                _add_bits(figures, ComparedTensor("rows", "row", name, step, got, wanted, 0.0, "", (rank,)))
    return figures


def both(figures: PassFigures, more: PassFigures) -> PassFigures:
    """Return the figures of two comparisons as those of one."""
    return PassFigures(
        {kind: count + more.compared[kind] for kind, count in figures.compared.items()},
        {kind: max(worst, more.worst[kind]) for kind, worst in figures.worst.items()},
        {**figures.noise, **more.noise},
        [*figures.wrong, *more.wrong],
    )


def _add_bits(figures: PassFigures, each: ComparedTensor) -> None:
    figures.compared[each.kind] += 1
    if not torch.equal(each.got, each.wanted):
        each = each._replace(scale=max(float(each.wanted.double().norm()), 1e-300))
        figures.worst[each.kind] = max(figures.worst[each.kind], each.error)
        figures.wrong.append(each)


def _bits_of(mine: Mapping[str, Any], theirs: Mapping[str, Any], step: int) -> Iterator[ComparedTensor]:
    yield _number("loss", "loss", step, theirs["loss"], mine["loss"])
    yield from _state_pairs(mine, theirs, step, ("gradients", "moments", "masters", "weights"))
    yield _number("norm", "norm", step, theirs["norm"], mine["norm"])


def _state_pairs(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], step: int, kinds: Sequence[str]
) -> Iterator[ComparedTensor]:
    for kind in kinds:
        own, other = mine.get(kind, {}), theirs.get(kind, {})
        what = kind.removesuffix("s")
        for name in [*own, *(name for name in other if name not in own)]:
            if name not in own or name not in other:
                only = own.get(name, other.get(name))
                yield _missing(kind, what, name, step, only, name in other)
            else:
                yield ComparedTensor(kind, what, name, step, other[name], own[name], 0.0, module_of(name))
