"""The pass in the configuration's own dtypes: every step beside the truth for its own inputs.

In 16 bits two correct runs drift apart: Adam turns the rounding of a small gradient into an update of the size of the
learning rate. A comparison of whole runs then has limits in which a lost master or a wrong norm hides. So no step of
this pass inherits the rounding of the step before:

    loss, gradients     truth: fp64 at the weights with which the layout began the step, the batch rounded as the layout
                        rounds it. Noise: the plain loop at these weights in the layout's dtypes, four times, with other
                        roundings each time.
    norm                truth: the norm of the gradients that the layout has, in fp64
    moments, masters    truth: torch's optimizer in fp64 on these gradients, from the start on. Noise: the same in the
                        dtype of the masters.
    weights             the masters, rounded

    limit on the relative L2 error     4 · noise + 8 eps,   eps of the tensor's own dtype: fp32 for gradients in 16 bits

[Note: noise of a tensor] The noise is the largest error of four plain runs, because one run may be right by chance: the
loss is one number, and a bias has a few. The runs after the first multiply the outputs of all modules by 1 + u with
|u| <= eps/2 before they are rounded, so that each rounding falls to another side. A tensor's noise is at least the
median of its kind in the step, because four draws of a tensor of few elements may all be lucky; a layout sums in
another order, so that its error is another draw.

Cost: (1 + 4) plain forward and backward passes of each microbatch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from shardwise.config.run import RunConfig
from shardwise.models.dropout import replace_dropout
from shardwise.optim.clip import clip_factor
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.precision.policy import SIXTEEN_BITS
from shardwise.verify.compare import KINDS, PassFigures
from shardwise.verify.reference import LossOf, TorchOptimizers, optimizer_state, with_dtype
from shardwise.verify.tensors import ComparedTensor, module_of

_TIMES_NOISE = 4.0
_TIMES_EPS = 8.0
_ROUNDINGS = 4
"""Plain runs in the layout's dtypes, each with other roundings."""
_RATE = 1e-3
"""The size of an update by which a weight that starts at zero is measured."""
_SHARE = 1e-6
"""A gradient or moment is held to this share of the norm of all, at least."""


@dataclass(frozen=True)
class OwnJob:
    """The inputs of the plain side of the pass."""

    make: Callable[[], nn.Module]
    config: RunConfig
    steps: Sequence[Sequence[Any]]
    """The microbatches of each step."""
    weights: Sequence[float]
    """Weights of the microbatches of a step."""
    rows: int
    """Samples of a microbatch."""
    loss: LossOf
    has_loss: bool
    """True if the user gave the function of the loss, which reads outputs in fp32."""


class Measured(NamedTuple):
    """One tensor of the layout beside the truth, and the error of the plain loop in the same dtypes."""

    tensor: ComparedTensor
    noise: float
    eps: float


class GradientTruth(NamedTuple):
    """Loss and gradients of one step at given weights, in one dtype."""

    loss: float
    gradients: dict[str, Tensor]
    addends: dict[str, Tensor]


def why_not(config: RunConfig, dtypes: Collection[torch.dtype], has_tables: bool) -> str:
    """Return the reason why the pass is left out; "" if it is not.

    Args:
        config: The configuration.
        dtypes: The dtypes of weights and buffers on the ranks.
        has_tables: True if the model has embedding tables.
    """
    policy = config.precision
    if policy.operations is not None or policy.linear is not None:
        return "precision.operations and precision.linear have no plain loop"
    if config.offload.state != "fp32":
        return f"offload.state: {config.offload.state} codes moments, and torch has no such optimizer"
    if not any(dtype.is_floating_point and dtype is not torch.float64 for dtype in dtypes):
        return "the configuration computes in fp64, as the pass fp64 does"
    if has_tables:
        return "rows of tables are updated in fp32 at least, and compared in the pass fp64"
    return ""


def measure(job: OwnJob, record: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield each tensor that the layout recorded, in causal order, with its noise.

    Args:
        job: The model and the batches.
        record: What rank 0 of the layout recorded.
    """
    dtypes = record["dtypes"]
    start = job.make().state_dict()
    for name, tensor in start.items():
        if isinstance(tensor, Tensor) and name in record["start"] and name not in record["per_rank"]:
            got = record["start"][name]
            yield _rounded(f"{name} at the start", name, 0, got, tensor.detach())
    optimizers = _FedOptimizers(job, record)
    weights = record["start"]
    for step, mine in enumerate(record["steps"]):
        truth, noises = _gradients(job, weights, dtypes, step)
        yield from _of_gradients(mine, truth, noises, step)
        yield from optimizers.step(mine, step)
        for name, master in mine["masters"].items():
            yield _rounded(name, name, step, mine["weights"][name], master)
        weights = mine["weights"]


def _rounded(said: str, name: str, step: int, got: Tensor, wanted: Tensor) -> Measured:
    """Return a weight beside its master, which may be rounded up or down."""
    wanted = wanted.to(got.dtype)
    scale = max(float(wanted.double().norm()), 1e-300)
    found = ComparedTensor("weights", "weight", said, step, got.cpu(), wanted.cpu(), scale, module_of(name))
    return Measured(found, 0.0, _eps(got.dtype) / _TIMES_EPS)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


# Gradients ---------------------------------------------------------------------------------------------------------


def _gradients(
    job: OwnJob, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], step: int
) -> tuple[GradientTruth, list[GradientTruth]]:
    """Return the loss and gradients of a step at given weights in fp64, and in the layout's dtypes several times."""
    truth = _pass(job, weights, None, step, nullcontext())
    noises = []
    for seed in range(_ROUNDINGS):
        noises.append(_pass(job, weights, dtypes, step, _other_rounding(seed) if seed else nullcontext()))
    return truth, noises


def _pass(
    job: OwnJob,
    weights: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None,
    step: int,
    around: Any,
) -> GradientTruth:
    """Run the microbatches of a step; in fp64 if ``dtypes`` is None."""
    model, replay = job.make(), DrawReplay()
    replace_dropout(model, job.config.train.seed, replay)
    compute = job.config.precision.compute_dtype
    _set_weights(model, weights, dtypes)
    if dtypes is not None:
        _cast_at_the_root(model, compute, job.has_loss)
    scales = (
        [job.config.precision.loss_scale.init_scale / 2**k for k in range(24)]
        if compute is torch.float16
        else [1.0]
    )
    found = None
    with around:
        for scale in scales if dtypes is not None else [1.0]:
            found = _summed(job, model, replay, step, compute, dtypes is None, scale)
            if all(bool(each.isfinite().all()) for each in found.gradients.values()):
                break
    assert found is not None, "there is a scale"
    return found


def _summed(
    job: OwnJob,
    model: nn.Module,
    replay: DrawReplay,
    step: int,
    compute: torch.dtype | None,
    is_truth: bool,
    scale: float,
) -> GradientTruth:
    total, loss_sum = sum(job.weights), 0.0
    sums: dict[str, Tensor] = {}
    addends: dict[str, Tensor] = {}
    for place, (batch, weight) in enumerate(zip(job.steps[step], job.weights, strict=True)):
        if is_truth:  # the same numbers that the layout sees
            batch = with_dtype(batch if compute is None else with_dtype(batch, compute), torch.float64)
        model.zero_grad()
        with replay.at(BatchPosition(step + 1, place * job.rows, job.rows)):
            loss = job.loss(model, batch)
            (loss * (scale * weight / total)).backward()
        loss_sum += float(loss.detach()) * weight / total
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                own = parameter.grad.double() / scale
                sums[name] = sums.get(name, 0) + own
                addends[name] = addends.get(name, 0) + own.abs()
    return GradientTruth(loss_sum, sums, addends)


def _set_weights(
    model: nn.Module, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None
) -> None:
    """Give the model weights and buffers; in fp64 if ``dtypes`` is None."""
    if dtypes is None:
        model.to(torch.float64)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if dtypes is not None and name in dtypes and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtypes[name])
        if name in weights:
            tensor.data.copy_(weights[name])


def _cast_at_the_root(model: nn.Module, compute: torch.dtype | None, casts_output: bool) -> None:
    """Cast floating inputs of the model to the dtype of the computation, and its outputs to fp32 for a loss."""
    if compute is None:
        return
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (with_dtype(args, compute), with_dtype(kwargs, compute)),
        with_kwargs=True,
    )
    if casts_output and compute in SIXTEEN_BITS:
        model.register_forward_hook(lambda module, args, output: with_dtype(output, torch.float32))


@contextmanager
def _other_rounding(seed: int) -> Iterator[None]:
    """Round the outputs of modules without children, and the gradients that reach them, to another side."""
    generator = torch.Generator().manual_seed(seed)

    def ran(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or [*module.children()]:
            return None
        wide = torch.float32 if output.dtype in SIXTEEN_BITS else torch.float64
        shift = torch.rand(output.shape, generator=generator, dtype=wide) - 0.5
        return (output.to(wide) * (1 + _eps(output.dtype) * shift)).to(output.dtype)

    handle = register_module_forward_hook(ran)
    try:
        yield
    finally:
        handle.remove()


def _of_gradients(
    mine: Mapping[str, Any], truth: GradientTruth, noises: Sequence[GradientTruth], step: int
) -> Iterator[Measured]:
    pair = torch.tensor([mine["loss"], truth.loss], dtype=torch.float64)
    loss = ComparedTensor("loss", "loss", "loss", step, pair[:1], pair[1:], max(abs(truth.loss), 1e-300))
    yield Measured(
        loss, max(abs(each.loss - truth.loss) for each in noises) / loss.scale, _eps(torch.float32)
    )
    whole = sum(float(each.norm()) ** 2 for each in truth.gradients.values()) ** 0.5
    for name in reversed(
        [*truth.gradients, *(name for name in mine["gradients"] if name not in truth.gradients)]
    ):
        zeros = torch.zeros_like(mine["gradients"].get(name, truth.gradients.get(name)))
        got, wanted = mine["gradients"].get(name, zeros), truth.gradients.get(name, zeros)
        scale = max(
            float(wanted.double().norm()),
            float(truth.addends.get(name, zeros).norm()),
            _SHARE * whole,
            1e-300,
        )
        found = ComparedTensor("gradients", "gradient", name, step, got.cpu(), wanted, scale, module_of(name))
        errors = [float((each.gradients.get(name, zeros) - wanted).norm()) / scale for each in noises]
        yield Measured(found, max(errors), _eps(got.dtype))


# Updates -----------------------------------------------------------------------------------------------------------


class _FedOptimizers:
    """Torch's optimizer in fp64 and in the dtype of the masters, on the gradients of the layout."""

    def __init__(self, job: OwnJob, record: Mapping[str, Any]) -> None:
        self._job = job
        self._masters = record["state"]["masters"]
        self._applied = 0
        self._runs = []
        for is_truth in (True, False):
            model = job.make()
            for name, parameter in model.named_parameters():
                master = self._masters.get(name)
                dtype = parameter.dtype if master is None else master.dtype
                parameter.data = parameter.data.to(dtype)
                parameter.data = parameter.data.to(torch.float64 if is_truth else dtype)
            optimizer = TorchOptimizers(model, job.config.optimizer, is_wide=is_truth)
            self._runs.append((dict(model.named_parameters()), optimizer))

    def step(self, mine: Mapping[str, Any], step: int) -> Iterator[Measured]:
        """Yield the norm, the rate, the moments and the masters after a step."""
        gradients = mine["gradients"]
        squares = sum(float(each.double().square().sum()) for each in gradients.values())
        norm, finite = squares**0.5, squares < float("inf")
        yield self._number("counts", "skipped", "norm", step, float(mine["skipped"]), float(not finite), 0.0)
        if finite:
            yield self._number("norm", "norm", "norm", step, mine["norm"], norm, _eps(torch.float32))
        for names, optimizer in self._runs if finite else ():
            lrs, _ = optimizer.set_rates(self._job.config.schedule, self._applied)
            clip = clip_factor(norm, self._job.config.max_grad_norm)
            for name, parameter in names.items():
                given = gradients.get(name)
                parameter.grad = None if given is None else (given.double() * clip).to(parameter.dtype)
            optimizer.step()
        self._applied += finite
        if finite:
            yield self._number("counts", "learning rate", "rate", step, mine["lr"], lrs[0], 0.0)
        yield from self._state(mine, step)

    def _number(
        self, kind: str, name: str, what: str, step: int, got: float, wanted: float, eps: float
    ) -> Measured:
        pair = torch.tensor([got, wanted], dtype=torch.float64)
        scale = max(abs(wanted), 1e-300)
        return Measured(ComparedTensor(kind, what, name, step, pair[:1], pair[1:], scale), 0.0, eps)

    def _state(self, mine: Mapping[str, Any], step: int) -> Iterator[Measured]:
        (truth, optimizer), (plain, rounded) = self._runs
        wanted, noisy = optimizer_state(optimizer, truth)[0], optimizer_state(rounded, plain)[0]
        largest: dict[str, float] = {}
        for name, moment in wanted.items():
            label = name.rsplit(" ", 1)[1]
            largest[label] = max(largest.get(label, 0.0), float(moment.norm()))
        for name, moment in wanted.items():
            parameter, label = name.rsplit(" ", 1)
            scale = max(float(moment.norm()), _SHARE * largest[label], 1e-300)
            got = mine["moments"].get(name, torch.zeros_like(moment))
            found = ComparedTensor("moments", "moment", name, step, got, moment, scale, module_of(parameter))
            yield Measured(found, float((noisy[name].double() - moment).norm()) / scale, _eps(got.dtype))
        for name, master in mine["masters"].items():
            right = truth[name].detach()
            scale = max(float((right.abs() + _RATE).norm()), 1e-300)
            found = ComparedTensor(
                "masters", "master", name, step, master, right.clone(), scale, module_of(name)
            )
            noise = float((plain[name].detach().double() - right).norm()) / scale
            yield Measured(found, noise, _eps(master.dtype))


# Limits ------------------------------------------------------------------------------------------------------------


def hold_to_noise(measured: Sequence[Measured]) -> PassFigures:
    """Hold each tensor to 4 times its noise and 8 eps ([Note: noise of a tensor])."""
    by_kind: dict[tuple[str, int], list[float]] = {}
    for each in measured:
        by_kind.setdefault((each.tensor.kind, each.tensor.step), []).append(each.noise)
    usual = {key: sorted(noises)[len(noises) // 2] for key, noises in by_kind.items()}
    counts, worst, largest, wrong = (
        dict.fromkeys(KINDS, 0),
        dict.fromkeys(KINDS, 0.0),
        dict.fromkeys(KINDS, 0.0),
        [],
    )
    for tensor, noise, eps in measured:
        limit = _TIMES_NOISE * max(noise, usual[tensor.kind, tensor.step]) + _TIMES_EPS * eps
        error = tensor.error
        counts[tensor.kind] += 1
        worst[tensor.kind] = max(worst[tensor.kind], error)
        largest[tensor.kind] = max(largest[tensor.kind], noise)
        if not error <= limit:
            wrong.append(tensor)
    return PassFigures(counts, worst, largest, wrong)
