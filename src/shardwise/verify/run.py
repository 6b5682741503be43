"""Run a model in one plain process and on the ranks of a layout, and compare all numbers.

    reference   one process: is the model a function of its batch? then the plain loop in fp64
    fp64        the layout with the model in fp64, beside the reference
    own         the layout and the plain loop in the configuration's own dtypes, beside fp64 from the same weights
    bitwise     the layout a second time; and from a checkpoint of its first step, in new processes

The plain process and the ranks are forks that ``shardwise.launch`` starts. They share no memory with this process, and
what they recorded is read from files.

Cost: six starts of the ranks' processes, and a few steps of a small model each.
"""

import inspect
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import shardwise.verify.reference as plain
from shardwise.base.errors import RankError, ShardwiseError, UsageError
from shardwise.base.pytree import tensors_in
from shardwise.comm.world import is_joined
from shardwise.config.run import RunConfig, load
from shardwise.engine.step.check import DtypeRecorder
from shardwise.launch.function import launch
from shardwise.verify.compare import (
    FP64_LIMIT,
    ROUNDED_LIMIT,
    ComparedTensor,
    PassFigures,
    RankActivations,
    compared,
    hold_to_bits,
    hold_to_limit,
    hold_to_noise,
)
from shardwise.verify.explain import explain, wrong_slice
from shardwise.verify.layout import VerifiedLayout, layout_of, parse_layout, with_layout
from shardwise.verify.record import FAILURE, LayoutJob, run_rank
from shardwise.verify.static import static_problems
from shardwise.verify.verdict import FirstWrong, PassReport, Verdict

_DEADLINE_S = 240
_COLLECTIVE_S = 30.0


@dataclass
class Verification:
    """One model, one configuration with its layout, and the batches of the steps."""

    make: Callable[[], nn.Module]
    config: RunConfig
    layout: VerifiedLayout
    example: Any
    steps: int
    loss_of: plain.LossOf | None
    limit: float = FP64_LIMIT
    """Largest relative error of the pass in fp64."""

    def __post_init__(self) -> None:
        self.pieces = self.layout.mesh.size("dp") * (self.config.batch.accumulation or 1)
        size = next((each.shape[0] for each in tensors_in(self.example) if each.dim()), 0)
        self.rows = size // self.pieces
        if not self.rows:
            raise UsageError(
                f"verify: the example has {size} samples, fewer than the {self.pieces} microbatches of a step "
                f"({self.layout.mesh.size('dp')} data-parallel ranks x {self.config.batch.accumulation or 1}); give "
                "an example with more samples"
            )

    def batches(self, dtype: torch.dtype | None) -> list[list[Any]]:
        """Return the microbatches of each step; each step has the samples in another order."""
        whole = self.example if dtype is None else plain.with_dtype(self.example, dtype)

        def piece(step: int, place: int) -> Any:
            def cut(tensor: Tensor) -> Tensor:
                rolled = tensor.roll(-step, 0) if tensor.dim() else tensor
                return rolled[place * self.rows : (place + 1) * self.rows].clone() if tensor.dim() else rolled

            return tree_map_only(Tensor, cut, whole)

        return [[piece(step, place) for place in range(self.pieces)] for step in range(self.steps)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the plain model."""
        if self.loss_of is not None:
            return self.loss_of(model, batch)
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if isinstance(output, Tensor):
            return output
        found = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None and isinstance(output, tuple):
            found = output[0]
        if not isinstance(found, Tensor):
            raise UsageError("verify: the model returns no loss; give loss=, or a batch with labels")
        return found

    def made(self, dtype: torch.dtype | None, is_silent: bool) -> Callable[[], nn.Module]:
        """Return the function that makes the same model each time."""
        seed, make = self.config.train.seed, self.make

        def same() -> nn.Module:
            torch.manual_seed(seed)
            model = make()
            if is_silent:
                plain.silence_dropout(model)
            return model if dtype is None else model.to(dtype)

        return same

    def own_compute(self) -> tuple[torch.dtype | None, str]:
        """Return the dtype in which the configuration computes, and why the pass in it is left out."""
        policy = self.config.precision
        if policy.operations is not None or policy.linear is not None:
            return None, "precision.operations and precision.linear have no plain loop"
        dtypes = {each.dtype for each in self.made(None, False)().parameters()}
        if policy.compute is None and torch.float64 in dtypes:
            return None, "the model is in fp64, as in the pass fp64"
        compute = policy.dtypes("", torch.float32)
        if compute.compute not in (torch.float32, torch.float64):
            return None, "the plain loop does not set a reliable limit in 16 bits"
        if compute.master not in (torch.float32, torch.float64):
            return None, "the plain loop has no masters in 16 bits"
        return compute.compute, ""


def verify(
    make: Callable[[], nn.Module],
    config: str | Path | Mapping[str, Any] | RunConfig,
    example: Any,
    *,
    layout: str | None = None,
    steps: int = 3,
    loss: plain.LossOf | None = None,
    overrides: Sequence[str] = (),
    shrunk: Mapping[str, Any] | None = None,
    only_static: bool = False,
) -> Verdict:
    """Compare a model on a layout with one process, and return the verdict.

    The static part comes first; a problem in it makes the verdict "fail", also if all numbers agree.

    Args:
        make: Function that makes the model.
        config: A path (YAML, JSON), a dictionary, or a RunConfig.
        example: The global batch of a step: tensors in any nesting, with the samples along dim 0.
        layout: The layout in words, as ``pp=2,dp=2x2,zero=3``; None: that of the configuration.
        steps: Optimizer steps.
        loss: A function of (model, batch) that returns the loss. None: the model returns the loss.
        overrides: Values as ``a.b=c``.
        shrunk: Old and new values of what was made smaller before the call, for the verdict.
        only_static: True to derive placements, and to start no process.

    Raises:
        UsageError: if called inside a rank, or if the example has too few samples.
        ConfigError, MeshError: if the configuration or the layout is not possible.
    """
    if is_joined():
        raise UsageError(
            "verify: this process is a rank of a job; verify starts ranks itself, so call it alone"
        )
    if steps < 2:
        raise UsageError(f"verify: steps is {steps}; at least 2 are needed, because one is saved and resumed")
    own = load(config, overrides)
    wanted = layout_of(own) if layout is None else parse_layout(layout)
    placed = _as_it_runs(with_layout(own, wanted), wanted)
    subject = Verification(make, placed, wanted, example, steps, loss)
    begun = time.monotonic()
    found = Verdict("pass", str(wanted), wanted.ranks, dict(shrunk or {}))
    if own.schedule is not None:
        found.left_out.append(
            "schedule: the learning rate stays at optimizer.lr in the reference and in the layout"
        )
    _check_placements(subject, found)
    if only_static:
        if found.static is None:
            found.verdict = "unverifiable"
        elif found.static["problems"]:
            found.verdict, found.failed_in = "fail", "static"
    else:
        with tempfile.TemporaryDirectory(prefix="shardwise_verify_") as folder:
            _verify(subject, found, Path(folder))
        if found.verdict == "pass" and found.static is not None and found.static["problems"]:
            found.verdict, found.failed_in = "fail", "static"
    found.seconds = round(time.monotonic() - begun, 2)
    return found


def _as_it_runs(config: RunConfig, layout: VerifiedLayout) -> RunConfig:
    """Return the configuration of the compared runs: copies are guarded, and nothing but the step is left."""
    given = config.model_dump(mode="json", exclude_unset=True)
    for key in ("schedule", "data", "checkpoint", "monitor", "output_dir"):
        given.pop(key, None)
    batch = config.batch.derived(layout.mesh.size("dp"))
    given["batch"] = {"accumulation": batch.accumulation or 1}
    given["train"] = {"seed": config.train.seed}
    given |= {"check_first_step": "off", "guard": {"every": 1}}
    given["comm"] = {**given.get("comm", {}), "timeout_s": _COLLECTIVE_S}
    return load(given)


def _check_placements(subject: Verification, found: Verdict) -> None:
    """Derive placements along "tp" and run the sums of gradients on numbered elements, without a process."""
    make = subject.made(None, False)
    batch = subject.batches(None)[0][0]
    try:
        part = static_problems(make, subject.config, subject.layout.ranks, batch, subject.loss_of)
    except ShardwiseError as error:
        found.left_out.append(f"static part: {error}")
        return
    except Exception as error:  # a user's model may fail on tensors without numbers in any way
        found.left_out.append(f"static part: the model fails on shapes with {type(error).__name__}: {error}")
        return
    if part.operations or part.reduced:
        found.static = part.as_json()
    else:
        found.left_out.append("static part: the layout has one rank, so nothing is cut and nothing is summed")


def _verify(subject: Verification, found: Verdict, folder: Path) -> None:
    """Run the passes until one fails."""
    if not plain.can_optimize(subject.config.optimizer):
        found.verdict = "unverifiable"
        found.left_out.append(f"all: the reference has no optimizer {subject.config.optimizer.type!r}")
        return
    is_silent = _check_function(subject, found)
    if found.verdict != "pass":
        return
    left_out: dict[str, str] = {}
    try:
        _fp64_pass(subject, found, folder, is_silent, left_out)
        if found.verdict == "pass":
            _own_passes(subject, found, folder, is_silent, left_out)
    except _RunFailed as failed:
        found.verdict, found.first = "fail", failed.first
    found.left_out += [f"{name}: {reason}" for name, reason in left_out.items()]


# Passes ------------------------------------------------------------------------------------------------------------


def _check_function(subject: Verification, found: Verdict) -> bool:
    """Check that the model is a function of its batch. Return True if dropout has to be off for that."""
    for is_silent in (False, True):
        said, rounds = _plain_process(_unstable, subject, is_silent)
        if rounds and subject.limit == FP64_LIMIT:
            subject.limit = ROUNDED_LIMIT
            found.declared.append(
                f"the model rounds fp64 to fp32 in its forward pass: the limit of the pass fp64 is {ROUNDED_LIMIT:g}"
            )
        if said is None:
            if is_silent:
                found.declared.append(
                    "dropout without a key (drawn from torch's generator) is off in all passes"
                )
            return is_silent
        name, is_nan = said
        if is_nan or is_silent:
            why = (
                "the output of the plain model is not finite"
                if is_nan
                else "the plain model gives two outputs for one batch: it is no function of its batch"
            )
            found.verdict, found.failed_in = "fail", "reference"
            found.first = FirstWrong(name, "reference", name, _line_of(subject, name), explanation=why)
            return is_silent
    return True


def _fp64_pass(
    subject: Verification, found: Verdict, folder: Path, is_silent: bool, left_out: dict[str, str]
) -> None:
    found.failed_in = "fp64"
    truth = _reference(subject, is_silent, torch.float64, None)
    job = _job(subject, is_silent, truth, load(subject.config, ["precision=fp64"]), torch.float64)
    layout, activations = _run(subject, job, folder / "fp64")
    done = replace(truth, steps=truth.steps[: len(layout["steps"])])
    figures = hold_to_limit(compared(layout, done, activations, left_out), subject.limit)
    _take(subject, found, "fp64", figures, f"{subject.limit:g}", truth, layout)
    if found.verdict == "pass" and layout["diverged"]:
        raise _RunFailed(FirstWrong("", "replica", explanation=layout["diverged"]))


def _own_passes(
    subject: Verification, found: Verdict, folder: Path, is_silent: bool, left_out: dict[str, str]
) -> None:
    compute, reason = subject.own_compute()
    checkpoint = str(folder / "checkpoint")
    labels = _reference(subject, is_silent, torch.float64, None)
    job = _job(subject, is_silent, labels, subject.config, None)
    job = replace(job, records=False, save_after=1, checkpoint=checkpoint)
    found.failed_in = "own"
    layout, _ = _run(subject, job, folder / "own")
    if compute is None:
        left_out["pass own"] = reason
    else:
        rounded = _reference(subject, is_silent, torch.float64, None)
        mine = _reference(subject, is_silent, None, compute)
        plain_run = {
            "start": mine.start,
            "steps": [
                {
                    "loss": each.loss,
                    "norm": each.norm,
                    "gradients": each.gradients,
                    "moments": moments,
                    "weights": each.weights,
                }
                for each, moments in zip(mine.steps, mine.moments, strict=True)
            ],
        }
        noise = list(compared(plain_run, rounded, None, {}))
        figures = hold_to_noise(list(compared(layout, rounded, None, left_out)), noise, compute)
        _take(subject, found, "own", figures, "4 x plain loop + 8 eps", rounded, layout)
    if found.verdict != "pass":
        return
    found.failed_in = "bitwise"
    again, _ = _run(subject, replace(job, save_after=None), folder / "again")
    resumed, _ = _run(subject, replace(job, save_after=None, resumes=True), folder / "resumed")
    figures, more = hold_to_bits(layout, again), hold_to_bits(layout, resumed)
    counts = {kind: count + more.compared[kind] for kind, count in figures.compared.items()}
    both = figures._replace(compared=counts, wrong=[*figures.wrong, *more.wrong])
    _take(
        subject, found, "bitwise", both, "equal bits, run again and resumed from a checkpoint", labels, layout
    )
    if both.wrong and found.first is not None:
        found.first.explanation = (
            "two runs of the layout differ"
            if figures.wrong
            else "a resumed run differs from one that went through"
        )
    if found.verdict == "pass":
        found.failed_in = ""


def _take(
    subject: Verification,
    found: Verdict,
    name: str,
    figures: PassFigures,
    limit: str,
    truth: plain.Reference,
    layout: Mapping[str, Any],
) -> None:
    """Add the figures of a pass to the verdict, with the first wrong tensor."""
    found.passes.append(PassReport(name, figures.compared, figures.worst, figures.noise, limit))
    if not figures.wrong:
        return
    found.verdict, found.failed_in = "fail", name
    found.wrong = [f"{each.what} {each.name}, step {each.step}" for each in figures.wrong]
    first = figures.wrong[0]
    found.first = FirstWrong(
        f"{first.name}, step {first.step}",
        first.what,
        first.module,
        _line_of(subject, first.module),
        wrong_slice(first.got, first.wanted, subject.limit if name == "fp64" else 1e-3),
        list(first.ranks),
        _explanation(subject, first, truth, layout),
    )


def _explanation(
    subject: Verification, wrong: ComparedTensor, truth: plain.Reference, layout: Mapping[str, Any]
) -> str:
    mesh = subject.layout.mesh
    factors = {axis: float(mesh.size(axis)) for axis in ("tp", "dp", "pp", "cp", "ep")}
    factors |= {
        "microbatches": float(subject.config.batch.accumulation or 1),
        "microbatches of a step": subject.pieces,
    }
    addends: list[Tensor] = []
    others: dict[str, Tensor] = {}
    if wrong.what == "gradient" and wrong.name in truth.steps[wrong.step].gradients:
        addends = [each[wrong.name] for each in truth.steps[wrong.step].pieces if wrong.name in each]
        for step, each in enumerate(truth.steps):
            if step != wrong.step:
                others[f"the gradient of step {step}"] = each.gradients[wrong.name]
        for name, other in truth.steps[wrong.step].gradients.items():
            if name != wrong.name:
                others[f"the gradient of {name}"] = other
    return explain(wrong.got, wrong.wanted, factors, addends, others)


# Processes ---------------------------------------------------------------------------------------------------------


class _RunFailed(Exception):
    """The run of a layout that ended with an error in place of numbers."""

    def __init__(self, first: FirstWrong) -> None:
        super().__init__(first.explanation)
        self.first = first


def _plain_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in one process of its own, without a process group."""
    return launch(function, *arguments, ranks=1)


def _unstable(subject: Verification, is_silent: bool) -> Any:
    model = subject.made(torch.float64, is_silent)()
    batch = subject.batches(torch.float64)[0][0]
    with DtypeRecorder() as seen:
        said = plain.unstable_module(model, batch, subject.loss, subject.config.train.seed, subject.rows)
    return said, seen.rounds_to_fp32


def _reference(
    subject: Verification, is_silent: bool, dtype: torch.dtype | None, compute: torch.dtype | None
) -> plain.Reference:
    """Return the plain loop's run, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="shardwise_verify_") as folder:
        path = str(Path(folder, "reference.pt"))
        _plain_process(_write_reference, subject, is_silent, dtype, compute, path)
        return plain.Reference.from_plain(torch.load(path, weights_only=True))


def _write_reference(
    subject: Verification,
    is_silent: bool,
    dtype: torch.dtype | None,
    compute: torch.dtype | None,
    path: str,
) -> None:
    model = subject.made(dtype, is_silent)()
    is_other = compute is not None and any(p.dtype != compute for p in model.parameters())
    found = plain.run_reference(
        model,
        subject.config.optimizer,
        [[(batch, float(subject.rows)) for batch in step] for step in subject.batches(dtype)],
        subject.loss,
        clip=subject.config.max_grad_norm,
        seed=subject.config.train.seed,
        rows=subject.rows,
        compute=compute if is_other else None,
    )
    torch.save(found.to_plain(), path)


def _job(
    subject: Verification,
    is_silent: bool,
    truth: plain.Reference,
    config: RunConfig,
    dtype: torch.dtype | None,
) -> LayoutJob:
    return LayoutJob(
        subject.made(dtype, is_silent),
        config,
        subject.batches(dtype),
        subject.rows,
        subject.loss_of,
        tuple(sorted({name.rsplit(" ", 1)[1] for name in truth.moments[0]})),
        _DEADLINE_S,
    )


def _run(subject: Verification, job: LayoutJob, folder: Path) -> tuple[dict[str, Any], RankActivations]:
    """Run a layout on its ranks, and return what they recorded.

    Raises:
        _RunFailed: if a rank failed.
    """
    folder.mkdir()
    try:
        launch(run_rank, job, str(folder), ranks=subject.layout.ranks)
    except RankError as error:
        raise _RunFailed(_failure(folder, str(error))) from None
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(subject.layout.ranks)]
    by_rank = [each["activations"] for each in ranks]
    return ranks[0], RankActivations(by_rank, subject.layout.mesh.tp, ranks[0]["units"])


def _failure(folder: Path, said: str) -> FirstWrong:
    """Return the verdict on ranks that ended with an error."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"*{FAILURE}"))]
    types = {each["type"] for each in records}
    ranks = sorted({each["rank"] for each in records if each["rank"] >= 0})
    own = next((each["text"] for each in records if each["type"] not in ("CommError", "DeadlineError")), "")
    if "DivergedError" in types:
        return FirstWrong("", "replica", ranks=ranks, explanation=own)
    if not own and (types & {"CommError", "DeadlineError"} or "SIGALRM" in said):
        text = next((each["text"] for each in records), said)
        return FirstWrong("", "hang", ranks=ranks, explanation=text)
    return FirstWrong("", "refused", ranks=ranks, explanation=own or said)


def _line_of(subject: Verification, name: str) -> str:
    """Return the file and line of the forward function of a module; "" if there is no such source."""
    with suppress(Exception), torch.device("meta"):
        module: Any = subject.make().get_submodule(name)
        forward = type(module).forward
        return f"{Path(inspect.getsourcefile(forward) or '').name}:{inspect.getsourcelines(forward)[1]}"
    return ""
