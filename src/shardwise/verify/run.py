"""Run a model in one plain process and on the ranks of a layout, and compare all numbers.

    reference   one process: is the model a function of its batch? then the plain loop in fp64
    fp64        the layout with the model in fp64, beside the reference, or beside the layout of ``against``
    own         the layout in the configuration's own dtypes, each step beside fp64 at the same weights (own.py)
    bitwise     the layout a second time; from a checkpoint of its first step, in new processes; and the checkpoint
                loaded and saved on another layout and loaded again: the same bits of state

The plain process and the ranks are forks that ``shardwise.launch`` starts. They share no memory with this process, and
what they recorded is read from files.

Cost: eight starts of processes, and a few steps of a small model each.
"""

import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise.verify.reference as plain
from shardwise.base.errors import ConfigError, MeshError, PlanError, RankError, ShardwiseError, UsageError
from shardwise.comm.world import is_joined, own_seat
from shardwise.config.run import RunConfig, load
from shardwise.engine.step.check import DtypeRecorder
from shardwise.launch.environment import is_in_job
from shardwise.launch.function import launch
from shardwise.optim.schedule_policy import ends_at, lacks_end
from shardwise.verify.compare import (
    FP64_LIMIT,
    ROUNDED_LIMIT,
    PassFigures,
    both,
    compared,
    hold_to_bits,
    hold_to_limit,
    row_bits,
    state_bits,
)
from shardwise.verify.diagnose import Diagnosis
from shardwise.verify.explain import wrong_slice
from shardwise.verify.failure import diverged_copies, failure_of
from shardwise.verify.layout import VerifiedLayout, layout_of, parse_layout, with_layout
from shardwise.verify.own import Measured, OwnJob, hold_to_noise, measure
from shardwise.verify.own import why_not as why_no_own_pass
from shardwise.verify.ranks import RankRecords
from shardwise.verify.record import LayoutJob, run_rank
from shardwise.verify.rows import narrow_tables
from shardwise.verify.static import activation_placements, static_problems
from shardwise.verify.subject import Verification
from shardwise.verify.tensors import ComparedTensor
from shardwise.verify.trail import cause_lines
from shardwise.verify.verdict import FirstWrong, PassReport, Verdict

_DEADLINE_S = 240
_COLLECTIVE_S = 30.0


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
    against: str | None = None,
    isolate: bool = False,
    explains: bool = False,
) -> Verdict:
    """Compare a model on a layout with one process, and return the verdict.

    The static part comes first; a problem in it makes the verdict "fail", also if all numbers agree.

    Args:
        make: Function that makes the model.
        config: A path (YAML, JSON), a dictionary, or a RunConfig.
        example: The global batch of a step: tensors and Ragged features in any nesting, with the samples along dim 0.
        layout: The layout in words, as ``pp=2,dp=2x2,zero=3``; None: that of the configuration.
        steps: Optimizer steps.
        loss: A function of (model, batch) that returns the loss. None: the model returns the loss.
        overrides: Values as ``a.b=c``.
        shrunk: Old and new values of what was made smaller before the call, for the verdict.
        only_static: True to derive placements, and to start no process.
        against: A second layout, whose run is the reference in place of the plain loop.
        isolate: True to list what is wrong in a first step whose modules the reference feeds, if the pass fp64 fails.
        explains: True to list what a rank did between the last right tensor and the first wrong one.

    Raises:
        UsageError: if called inside a rank, or if the example cannot be cut into the microbatches of a step.
        ConfigError, MeshError: if the configuration or the layout is not possible.
    """
    _refuse_ranks()
    if steps < 2:
        raise UsageError(f"verify: steps is {steps}; at least 2 are needed, because one is saved and resumed")
    own = load(config, overrides)
    wanted = layout_of(own) if layout is None else parse_layout(layout)
    placed = _as_it_runs(with_layout(own, wanted), wanted, steps)
    subject = Verification(make, placed, wanted, example, steps, loss)
    begun = time.monotonic()
    found = Verdict("pass", str(wanted), wanted.ranks, dict(shrunk or {}))
    other = None if against is None else _against(subject, own, against)
    _check_placements(subject, found)
    if not only_static:
        with tempfile.TemporaryDirectory(prefix="shardwise_verify_") as folder:
            _import_before_forks()
            _Passes(subject, found, Path(folder), other, isolate, explains).run()
    elif found.static is None:
        found.verdict = "unverifiable"
    if found.verdict == "pass" and found.static is not None and found.static["problems"]:
        found.verdict, found.failed_in = "fail", "static"
    found.seconds = round(time.monotonic() - begun, 2)
    return found


def _refuse_ranks() -> None:
    """Raise UsageError if this process is a rank of a job, whether the job has been joined or not."""
    if is_joined() or is_in_job() or own_seat().world_size > 1:
        raise UsageError(
            "verify: this process is a rank of a job; verify starts ranks itself, so call it alone, without torchrun, "
            "srun or mpirun"
        )


def _as_it_runs(config: RunConfig, layout: VerifiedLayout, steps: int) -> RunConfig:
    """Return the configuration of the compared runs: copies are guarded, and nothing but the step is left."""
    given = config.model_dump(mode="json", exclude_unset=True)
    for key in ("data", "checkpoint", "monitor", "output_dir"):
        given.pop(key, None)
    if "schedule" in given and lacks_end(config.schedule):
        ends = ends_at(config.schedule, config.train.steps or steps)
        given["schedule"] = ends.model_dump(mode="json", exclude_unset=True)
    batch = config.batch.derived(layout.mesh.size("data"))
    given["batch"] = {"accumulation": batch.accumulation or 1}
    given["train"] = {"seed": config.train.seed}
    given |= {"check_first_step": "off", "guard": {"every": 1}}
    given["comm"] = {**given.get("comm", {}), "timeout_s": _COLLECTIVE_S}
    return load(given)


def _against(subject: Verification, own: RunConfig, text: str) -> Verification:
    """Return the subject on another layout, with the same microbatches.

    Raises:
        ConfigError, MeshError: if the layout is not possible.
        UsageError: if the microbatches of a step cannot be dealt to its data-parallel ranks.
    """
    wanted = parse_layout(text)
    dp = wanted.mesh.size("data")
    if subject.pieces % dp:
        raise UsageError(
            f"verify: the step has {subject.pieces} microbatches, which cannot be dealt to dp={dp} of --against "
            f"{text}; set batch.accumulation so that {dp} divides the microbatches of a step"
        )
    placed = _as_it_runs(with_layout(own, wanted), wanted, subject.steps)
    placed = load(placed, [f"batch.accumulation={subject.pieces // dp}"])
    return replace(subject, config=placed, layout=wanted)


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
        subject.placements = activation_placements(part)
    else:
        found.left_out.append("static part: the layout has one rank, so nothing is cut and nothing is summed")


# Passes ------------------------------------------------------------------------------------------------------------


@dataclass
class _Passes:
    """The passes of one verification, which run until one fails."""

    subject: Verification
    found: Verdict
    folder: Path
    against: Verification | None
    """The layout whose run is the reference; None: the plain loop."""
    isolates: bool = False
    explains: bool = False
    is_silent: bool = False
    """True if dropout is off, because the model is a function of its batch only without it."""
    left_out: dict[str, str] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Run the passes, and complete the verdict."""
        subject, found = self.subject, self.found
        reason = plain.why_not(subject.config.optimizer, subject.config.schedule)
        if subject.config.offload.step == "delayed":
            reason = "offload.step: delayed applies each update one step late, which no plain loop does"
        if reason and self.against is None:
            found.verdict = "unverifiable"
            found.left_out.append(f"all: {reason}")
            return
        try:
            self.is_silent = _check_function(subject, found)
        except RankError as error:
            found.verdict = "unverifiable"
            found.left_out.append(f"all: the plain model fails in fp64: {_last_line(error)}")
            return
        if found.verdict != "pass":
            return
        try:
            self._fp64()
            if found.verdict == "pass":
                self._own_and_bitwise(reason)
        except _RunFailed as failed:
            found.verdict, found.first = "fail", failed.first
        found.left_out += [f"{name}: {why}" for name, why in self.left_out.items()]
        for why in dict.fromkeys(self.declared.values()):
            names = [name for name, said in self.declared.items() if said == why]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.declared.append(f"{names[0]}{more}: {why}")

    def _fp64(self) -> None:
        """Hold whole runs in fp64 to one limit."""
        subject, found = self.subject, self.found
        found.failed_in = "fp64"
        if self.against is None:
            truth = _reference(subject, self.is_silent)
        else:
            other, _, ranks = _run(
                self.against, _job_in_fp64(self.against, self.is_silent), self.folder / "against"
            )
            truth = plain.Reference.of_layout(other)
            if ranks[0]["rows"][0]:
                self.left_out["rows of tables"] = "--against compares what is computed from them"
        if subject.together > 1:
            self.left_out["activations"] = "synchronized statistics make one microbatch of those of all ranks"
        layout, activations, by_rank = _run(
            subject, _job_in_fp64(subject, self.is_silent), self.folder / "fp64"
        )
        done = replace(truth, steps=truth.steps[: len(layout["steps"])])
        if layout["lacks"]:
            self.left_out["copies of weights, and gradients before the sums"] = layout["lacks"]
        seen = activations if self.against is None and subject.together == 1 else None
        tensors = compared(layout, done, seen, self.left_out, by_rank, self.declared)
        figures = hold_to_limit(tensors, subject.limit)
        self._take("fp64", figures, f"{subject.limit:g}", truth, seen)
        if figures.wrong and seen is not None:
            if self.explains:
                found.between = cause_lines(figures.wrong, seen.by_rank)
            if self.isolates:
                self._isolate(truth, seen)
        if found.verdict == "pass" and layout["diverged"]:
            raise _RunFailed(diverged_copies(layout["diverged"]))

    def _isolate(self, truth: plain.Reference, records: RankRecords) -> None:
        """Run the first step with each module fed by the reference, and list what is wrong then."""
        subject, found = self.subject, self.found
        first = replace(truth, steps=truth.steps[:1])
        divisors = [each["held"]["divisors"] for each in records.by_rank]
        if subject.layout.mesh.cp > 1:
            self.left_out["isolated run"] = (
                'the reference feeds tensors of whole sequences, and the ranks along "cp" hold parts of them'
            )
            return
        if not divisors[0]:
            self.left_out["isolated run"] = (
                "the layout finished no step, so that the divisor of its sums is unknown"
            )
            return
        path = self.folder / "fed.pt"
        fed = {"inputs": truth.inputs, "outputs": truth.activations, "gradients": truth.activation_gradients}
        torch.save({**fed, "divisor": divisors[0][0]}, path)
        job = _job_in_fp64(subject, self.is_silent)
        job = replace(job, steps=job.steps[:1], fed=str(path), placements=subject.placements)
        try:
            layout, activations, by_rank = _run(subject, job, self.folder / "isolated")
        except _RunFailed as failed:
            self.left_out["isolated run"] = failed.first.explanation
            return
        tensors = compared(
            layout, replace(first, steps=first.steps[: len(layout["steps"])]), activations, {}, by_rank
        )
        wrong = hold_to_limit(tensors, subject.limit).wrong
        found.isolated, found.wrong = True, []
        for each in wrong:
            if each.kind in ("activations", "loss", "gradients") or "in the forward pass" in each.name:
                said = self._explanation(each, first, activations)
                found.wrong.append(f"{each.what} {each.name}" + (f": {said}" if said else ""))

    def _own_and_bitwise(self, no_plain_loop: str) -> None:
        """Hold each step in the configuration's dtypes to its noise, and further runs to the same bits."""
        subject, found = self.subject, self.found
        checkpoint = self.folder / "checkpoint"
        job = _job(subject, self.is_silent, subject.config, None)
        job = replace(job, records=False, save_after=1, checkpoint=str(checkpoint))
        found.failed_in = "own"
        layout, _, by_rank = _run(subject, job, self.folder / "own")
        reason = no_plain_loop or why_no_own_pass(
            subject.config, layout["dtypes"].values(), bool(layout["rows"][0])
        )
        if not reason:
            reason = self._own(layout)
        if reason:
            self.left_out["pass own"] = reason
        if found.verdict != "pass":
            return
        found.failed_in = "bitwise"
        again, _, rows = _run(subject, replace(job, save_after=None), self.folder / "again")
        figures, why = hold_to_bits(layout, again), "two runs of the layout differ"
        figures = both(figures, row_bits(by_rank, rows, layout["first"], again["first"]))
        if not figures.wrong:
            resumed, _, rows = _run(
                subject, replace(job, save_after=None, resumes=True), self.folder / "resumed"
            )
            figures = both(figures, hold_to_bits(layout, resumed))
            figures = both(figures, row_bits(by_rank, rows, layout["first"], resumed["first"]))
            why = "a resumed run differs from one that went through"
        if not figures.wrong:
            moved = self._moved(job, layout, by_rank)
            figures, why = (
                both(figures, moved),
                "a checkpoint that another layout loaded and saved is not the same",
            )
        self._take("bitwise", figures, "equal bits: again, resumed, and moved to another layout and back")
        if figures.wrong and found.first is not None:
            found.first.explanation = why
        if found.verdict == "pass":
            found.failed_in = ""

    def _own(self, layout: Mapping[str, Any]) -> str:
        """Hold the recorded steps to their noise. Return the reason if there is no plain loop in these dtypes."""
        try:
            measured = _measured(self.subject, self.is_silent, layout, self.folder)
        except RankError as error:
            return f"the plain loop fails in these dtypes: {_last_line(error)}"
        self._take("own", hold_to_noise(measured), "4 x plain loop + 8 eps")
        return ""

    def _moved(
        self, job: LayoutJob, layout: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]
    ) -> PassFigures:
        """Load the checkpoint on another layout, save it there, load that here, and compare the state to the bit."""
        subject, back = self.subject, self.folder / "back"
        try:
            other = self.against or _against(subject, subject.config, "dp=1")
        except (ConfigError, MeshError, PlanError, UsageError) as error:
            self.left_out["moved to one rank and back"] = str(error)
            return hold_to_limit(iter(()))
        there = _job(other, self.is_silent, other.config, None)
        there = replace(
            there,
            steps=job.steps[:1],
            records=False,
            resumes=True,
            checkpoint=job.checkpoint,
            saves_at=str(back),
        )
        try:
            _run(other, there, self.folder / "there")
        except _RunFailed as failed:
            if failed.first.kind != "refused":
                raise
            self.left_out[f"moved to {other.layout} and back"] = failed.first.explanation
            return hold_to_limit(iter(()))
        here = replace(job, steps=job.steps[:1], save_after=None, resumes=True, checkpoint=str(back))
        found, _, rows = _run(subject, here, self.folder / "here")
        state = {**found["state"], "weights": found["start"]}
        before = layout["steps"][0]
        if subject.config.offload.state == "int8":
            before, state = {**before, "moments": {}}, {**state, "moments": {}}
            self.found.declared.append(
                "moments in int8: another layout cuts them into other blocks, whose elements share a scale, so they "
                "are rounded again where a checkpoint moves to another layout, and are not compared there"
            )
        figures = state_bits(before, state, 0, set(layout["per_rank"]))
        return both(figures, row_bits(by_rank, rows, 0, 1))

    def _take(
        self,
        name: str,
        figures: PassFigures,
        limit: str,
        truth: plain.Reference | None = None,
        records: RankRecords | None = None,
    ) -> None:
        """Add the figures of a pass to the verdict, with the first wrong tensor."""
        subject, found = self.subject, self.found
        found.passes.append(PassReport(name, figures.compared, figures.worst, figures.noise, limit))
        if not figures.wrong:
            return
        found.verdict, found.failed_in = "fail", name
        found.wrong = [f"{each.what} {each.name}, step {each.step}" for each in figures.wrong]
        first = figures.wrong[0]
        found.first = FirstWrong(
            f"{first.name}, step {first.step}",
            first.what.removeprefix("activation ") if "gradient" in first.what else first.what,
            first.module,
            _line_of(subject, first.module),
            wrong_slice(first.got, first.wanted, subject.limit if name == "fp64" else 1e-3),
            list(first.ranks),
            self._explanation(first, truth, records),
        )

    def _explanation(
        self, wrong: ComparedTensor, truth: plain.Reference | None, records: RankRecords | None
    ) -> str:
        """Return the sentence that explains a wrong tensor; "" if none fits."""
        config = self.subject.config
        known = plain.Reference({}, [], []) if truth is None else truth
        accumulation = config.batch.accumulation or 1
        return Diagnosis(
            known, records, self.subject.layout.mesh, accumulation, config.optimizer, config.max_grad_norm
        ).explanation(wrong)


def _check_function(subject: Verification, found: Verdict) -> bool:
    """Check that the model is a function of its batch. Return True if dropout has to be off for that."""
    for is_silent in (False, True):
        said, rounds, narrow = _plain_process(_unstable, subject, is_silent)
        if narrow and not is_silent:
            more = f" and {len(narrow) - 1} more" if len(narrow) > 1 else ""
            found.left_out.append(
                f"rounding of {narrow[0]}{more} to 16 bits: the pass fp64 stores rows and their optimizer state in fp64"
            )
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


# Processes ---------------------------------------------------------------------------------------------------------


class _RunFailed(Exception):
    """The run of a layout that ended with an error in place of numbers."""

    def __init__(self, first: FirstWrong) -> None:
        super().__init__(first.explanation)
        self.first = first


def _import_before_forks() -> None:
    """Make one step of an optimizer of torch, which imports what each forked process would import for a second."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


def _plain_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in one process of its own, without a process group."""
    return launch(function, *arguments, ranks=1)


def _unstable(subject: Verification, is_silent: bool) -> Any:
    narrow = narrow_tables(subject.make())
    model = subject.made(torch.float64, is_silent)()
    batch = subject.batches(torch.float64)[0][0]
    plain.PlainTables(model, torch.float64, subject.config.tables)
    with DtypeRecorder() as seen:
        said = plain.unstable_module(model, batch, subject.loss, subject.config.train.seed, subject.rows)
    return said, seen.rounds_to_fp32, narrow


def _reference(subject: Verification, is_silent: bool) -> plain.Reference:
    """Return the plain loop's run in fp64, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="shardwise_verify_") as folder:
        path = str(Path(folder, "reference.pt"))
        _plain_process(_write_reference, subject, is_silent, path)
        return plain.Reference.from_plain(torch.load(path, weights_only=True))


def _write_reference(subject: Verification, is_silent: bool, path: str) -> None:
    config = subject.config
    found = plain.run_reference(
        subject.made(torch.float64, is_silent)(),
        config.optimizer,
        [list(zip(step, subject.round_weights, strict=True)) for step in subject.rounds(torch.float64)],
        subject.loss,
        clip=config.max_grad_norm,
        seed=config.train.seed,
        rows=subject.rows * subject.together,
        schedule=config.schedule,
        table_policy=config.tables,
        records=subject.together == 1,
    )
    torch.save(found.to_plain(), path)


def _measured(
    subject: Verification, is_silent: bool, layout: Mapping[str, Any], folder: Path
) -> list[Measured]:
    """Return the layout's tensors in its own dtypes beside the truth, from a process of its own."""
    path = str(folder / "own.pt")
    _plain_process(_write_measured, subject, is_silent, layout, path)
    found = torch.load(path, weights_only=True)
    return [Measured(ComparedTensor(*tensor), noise, eps) for tensor, noise, eps in found]


def _write_measured(subject: Verification, is_silent: bool, layout: Mapping[str, Any], path: str) -> None:
    job = OwnJob(
        subject.made(None, is_silent),
        subject.config,
        subject.rounds(None),
        subject.round_weights,
        subject.rows * subject.together,
        subject.loss,
        subject.loss_of is not None,
    )
    torch.save([(tuple(tensor), noise, eps) for tensor, noise, eps in measure(job, layout)], path)


def _job_in_fp64(subject: Verification, is_silent: bool) -> LayoutJob:
    """Return the run of the layout with the model, the state and Newton-Schulz in fp64."""
    keys = ["precision=fp64"]
    keys += ["offload.state=fp32"] if subject.config.offload.state != "fp32" else []
    keys += ["tables.wire=fp32"] if subject.config.tables.wire != "fp32" else []
    keys += ["optimizer.ns_dtype=fp64"] if subject.config.optimizer.type == "muon" else []
    return _job(subject, is_silent, load(subject.config, keys), torch.float64)


def _job(subject: Verification, is_silent: bool, config: RunConfig, dtype: torch.dtype | None) -> LayoutJob:
    return LayoutJob(
        subject.made(dtype, is_silent),
        config,
        subject.batches(dtype),
        subject.rows,
        subject.loss_of,
        subject.weights,
        _DEADLINE_S,
    )


def _run(
    subject: Verification, job: LayoutJob, folder: Path
) -> tuple[dict[str, Any], RankRecords, list[dict[str, Any]]]:
    """Run a layout on its ranks, and return what rank 0 recorded, the activations, and what each rank recorded.

    Raises:
        _RunFailed: if a rank failed.
    """
    folder.mkdir()
    try:
        launch(run_rank, job, str(folder), ranks=subject.layout.ranks)
    except RankError as error:
        raise _RunFailed(failure_of(folder, str(error), _names_in(subject))) from None
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(subject.layout.ranks)]
    by_rank = [each["activations"] for each in ranks]
    shapes = {name: tuple(each.shape) for name, each in ranks[0]["start"].items()}
    records = RankRecords(by_rank, subject.layout.mesh.tp, shapes, subject.placements)
    return ranks[0], records, ranks


def _last_line(error: RankError) -> str:
    """Return the last line of an error's traceback, which names it."""
    return str(error).strip().splitlines()[-1]


def _names_in(subject: Verification) -> set[str]:
    """Return the names of the model's modules and parameters; nothing if the model cannot be made on meta."""
    with suppress(Exception), torch.device("meta"):
        model = subject.make()
        return {name for name, _ in [*model.named_modules(), *model.named_parameters()] if name}
    return set()


def _line_of(subject: Verification, name: str) -> str:
    """Return the file and line of the forward function of a module; "" if there is no such source."""
    with suppress(Exception), torch.device("meta"):
        module: Any = subject.make().get_submodule(name)
        forward = type(module).forward
        return f"{Path(inspect.getsourcefile(forward) or '').name}:{inspect.getsourcelines(forward)[1]}"
    return ""
