"""What a training run computed, on any layout and by torch's own loop, and the largest difference of two runs.

The measure of an error of a gradient is that of tests/engine/plain.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.engine.engine import Engine
from shardwise.engine.state import state
from tests.engine.plain import error, train
from tests.verify.cases import BETAS, CLIP, OPTIMIZER, STEPS, Case

KINDS = ("start weight", "loss", "gradient", "norm", "moment", "master", "weight")
"""In causal order."""
REFUSED = "refused"
WRONG = 1e-9
"""An error above this is no noise of fp64."""


class StepFacts(NamedTuple):
    """What one step computed; moments and weights after its update."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    moments: dict[str, Tensor]
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]
    addends: dict[str, Tensor] | None = None


class RunFacts(NamedTuple):
    """What a run computed, or the error that ended it."""

    start: dict[str, Tensor]
    steps: list[StepFacts]
    refusal: str = ""


class Difference(NamedTuple):
    """The largest error of a kind, and the tensor that has it."""

    error: float
    name: str = ""
    wrong: tuple[str, ...] = ()
    """All tensors whose error is more than ``WRONG``."""


@cache
def plainly(case: Case) -> RunFacts:
    """Torch's own loop over the global batches, sequence by sequence, so that the addends are known."""
    model = case.make()
    named = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    decays = [p for name, p in named.items() if "norm" not in name]
    rest = [p for name, p in named.items() if "norm" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decays}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"],  # type: ignore[arg-type]
        weight_decay=OPTIMIZER["weight_decay"],  # type: ignore[arg-type]
        betas=BETAS,
    )
    found = []
    for step in range(STEPS):
        tokens, targets = case.batch(step)
        each = [(tokens[i : i + 1], targets[i : i + 1]) for i in range(len(tokens))]
        batches = [(case.arranged(*pair), case.weight(pair[1])) for pair in each if case.weight(pair[1])]
        (truth,) = train(model, optimizer, [batches], _call, CLIP)
        moments = {
            f"{name} {label}": optimizer.state[parameter][label].clone()
            for name, parameter in named.items()
            if parameter in optimizer.state
            for label in ("exp_avg", "exp_avg_sq")
        }
        found.append(
            StepFacts(
                truth.loss, truth.norm, truth.gradients, moments, truth.weights, truth.weights, truth.addends
            )
        )
    return RunFacts(start, found)


def _call(model: Any, batch: Any) -> Tensor:
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def laid_out(
    world: Any,
    case: Case,
    planted: AbstractContextManager[Any] | None = None,
    more: Mapping[str, Any] = {},
) -> RunFacts:
    """The same steps on the ranks of ``world``; an error of the engine ends the run on all ranks."""
    found: list[StepFacts] = []
    start: dict[str, Tensor] = {}
    engine: Engine | None = None
    with planted or nullcontext():
        try:
            torch.manual_seed(0)
            config = case.config({"check_first_step": "off", **more})
            engine = shardwise.initialize(case.make(), config, world=world)
            start = _copied(engine.state_dict())
            for step in range(STEPS):
                found.append(_step(engine, case, step))
        except (ShardwiseError, AssertionError, RuntimeError) as caught:
            return RunFacts(start, found, f"{type(caught).__name__}: {caught}")
        finally:
            if engine is not None:
                with suppress(ShardwiseError, AssertionError):
                    engine.discard()
    return RunFacts(start, found)


def _step(engine: Engine, case: Case, step: int) -> StepFacts:
    training, gradients = engine._training, {}
    summed = training._summed

    def with_gradients(*args: Any) -> Any:
        totals, divisor, norm = summed(*args)
        gradients.update(state.gradients(engine._parts, divisor))
        return totals, divisor, norm

    training._summed = with_gradients  # type: ignore[method-assign]
    try:
        parts = engine._parts
        batches, weights = case.pieces(parts.mesh.size("data"), engine.dp_index, step)
        result = engine.train_step(batches, weights)
    finally:
        training._summed = summed  # type: ignore[method-assign]
    moments, masters = _state(engine)
    return StepFacts(result.loss, result.grad_norm, gradients, moments, masters, _copied(engine.state_dict()))


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole moments by parameter and label, and whole masters by parameter. Collective."""
    parts = engine._parts
    infos = [replace(info, dtype=torch.float64) for info in parts.registry.of_kind("gradient")]

    def whole(of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for trained in parts.trained:
            layout, flat = trained.bucket.layout, of(trained).to(torch.float64)
            full = trained.bucket.weight.gathered_copy(flat)
            own |= {
                slot.name: full[slot.offset : slot.offset + slot.elements].view(slot.shape)
                for slot in layout.slots
            }
        return _copied(state.assembled(parts, own, infos))

    moments = {
        f"{name} {label}": tensor
        for label in ("exp_avg", "exp_avg_sq")
        for name, tensor in whole(lambda trained, label=label: trained[1].state.read(label)).items()
    }
    return moments, whole(lambda trained: trained[1].state.master)


def differences(got: RunFacts, wanted: RunFacts) -> dict[str, Difference]:
    """By kind, the largest error over all steps."""
    if got.refusal:
        return {REFUSED: Difference(float("inf"), got.refusal)}
    found: dict[str, Difference] = {}
    for _, kind, figure in _each(got, wanted):
        if kind not in found or not figure.error <= found[kind].error:
            found[kind] = figure
    return found


def first_wrong(got: RunFacts, wanted: RunFacts) -> tuple[str, tuple[str, ...]]:
    """The first kind, in causal order, that has wrong tensors, and these."""
    for _, kind, figure in _each(got, wanted):
        if figure.wrong:
            return kind, figure.wrong
    return "", ()


def _each(got: RunFacts, wanted: RunFacts) -> Iterator[tuple[int, str, Difference]]:
    """(step, kind, difference) in causal order."""
    if got.start:
        yield -1, "start weight", _worst(got.start, wanted.start)
    for step, (mine, truth) in enumerate(zip(got.steps, wanted.steps, strict=False)):
        yield step, "loss", _number(mine.loss, truth.loss, "the loss")
        yield step, "gradient", _worst(mine.gradients, truth.gradients, truth.addends)
        yield step, "norm", _number(mine.norm, truth.norm, "the norm")
        yield step, "moment", _worst(mine.moments, truth.moments)
        yield step, "master", _worst(mine.masters, truth.masters)
        yield step, "weight", _worst(mine.weights, truth.weights)


def _number(got: float, wanted: float, name: str) -> Difference:
    away = abs(got / wanted - 1)
    return Difference(away, name, () if away <= WRONG else (name,))


def _worst(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], addends: Mapping[str, Tensor] | None = None
) -> Difference:
    names = [name for name in wanted if name in got]
    missing = tuple(sorted(set(wanted) - set(got)))
    if len(missing) > len(wanted) // 2:
        return Difference(float("inf"), f"missing: {missing[:3]}", missing)
    errors = {name: error(got[name], wanted[name], addends[name] if addends else None) for name in names}
    if not errors:
        return Difference(0.0)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return Difference(errors[worst], worst, tuple(name for name in errors if not errors[name] <= WRONG))
