"""What the ranks of a layout compute, recorded with the engine's own functions for whole tensors.

    start weights, weights    engine.state_dict()
    loss, weight, norm        the result of the step
    gradients                 state.gradients, after the sums over ranks and before clipping
    masters, moments          engine.full_tensor(name, label)
    step counts, rows         what this rank holds: its segments of the optimizer's state, its rows of tables
    activations               outputs of the modules of Units, by the hooks that also record the reference

Rank 0 writes whole tensors; every rank writes the activations that it saw, and its step counts and rows. A rank that
fails writes its error, so that a refusal, a hang and unequal copies are told apart.
"""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import DivergedError, ShardwiseError
from shardwise.comm.world import own_seat
from shardwise.config.run import RunConfig
from shardwise.engine.construction.build import initialize
from shardwise.engine.engine import Engine
from shardwise.plan.placement import PerRank
from shardwise.plan.registry import TensorInfo
from shardwise.verify.activations import ActivationRecorder
from shardwise.verify.failure import FAILURE
from shardwise.verify.held import HeldState
from shardwise.verify.isolate import FedTensors, IsolatingRecorder
from shardwise.verify.reference import LossOf
from shardwise.verify.rows import rows_here


@dataclass(frozen=True)
class LayoutJob:
    """The run of one layout, as every rank gets it."""

    make: Callable[[], nn.Module]
    config: RunConfig
    steps: Sequence[Sequence[Any]]
    """The microbatches of each step, in the order of the global batch."""
    rows: int
    """Samples of a microbatch."""
    loss_of: LossOf | None
    weights: Sequence[float]
    """Weights of the microbatches of a step, in the order of the global batch."""
    deadline_s: int
    records: bool = True
    """Record activations."""
    save_after: int | None = None
    """The step after which a checkpoint is written."""
    checkpoint: str = ""
    """Folder of the checkpoint."""
    resumes: bool = False
    """Load the checkpoint, and run the steps that follow it."""
    saves_at: str = ""
    """Folder of a checkpoint that is written before the first step."""
    fed: str = ""
    """File with tensors of the reference that are fed to each module (isolate.py); "": none."""
    placements: Mapping[tuple[str, str], TensorInfo] = field(default_factory=dict)
    """Placements of the modules' tensors along "tp", by which they are fed."""


def run_rank(job: LayoutJob, folder: str) -> int:
    """Run the steps of ``job`` on one rank, and write what was recorded into ``folder``. Return the rank."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a rank that hangs in a native call ends too
    signal.alarm(job.deadline_s)
    engine = None
    try:
        engine = initialize(job.make(), job.config, loss=job.loss_of)
        found = _recorded(engine, job)
        rank = engine.world.rank
        own = {key: found[key] for key in ("activations", "rows", "counts")}
        torch.save(found if rank == 0 else own, Path(folder, f"{rank}.pt"))
    except (ShardwiseError, MemoryError) as caught:
        rank = own_seat().rank if engine is None else engine.world.rank
        said = {"type": type(caught).__name__, "text": str(caught), "rank": rank}
        Path(folder, f"{rank}.{FAILURE}").write_text(json.dumps(said), encoding="utf-8")
        raise
    finally:
        signal.alarm(0)
    engine.close()
    return rank


def _recorded(engine: Engine, job: LayoutJob) -> dict[str, Any]:
    parts = engine._parts
    held = HeldState(engine, job.records, len(job.steps))
    recorder = _recorder(engine, job, held)
    first = 0
    if job.resumes:
        engine.load(job.checkpoint)
        first = engine.step_count
    found: dict[str, Any] = {
        "start": _whole(engine),
        "state": training_state(engine),
        "steps": [],
        "first": first,
        "rows": [rows_here(engine.tables)],
        "counts": [],
        "dtypes": {
            info.name: info.dtype for kind in ("parameter", "buffer") for info in parts.registry.of_kind(kind)
        },
        "per_rank": [
            info.name
            for info in parts.registry.of_kind("buffer")
            if any(isinstance(each, PerRank) for each in info.placement.values())
        ],
    }
    if job.saves_at:
        engine.save(job.saves_at, asynchronous=False)
    tokens = _tokens_of_passes(engine, recorder)
    activation_gradients: dict[str, Tensor] = {}
    found["diverged"], found["lacks"] = "", held.lacks
    for step in range(first, len(job.steps)):
        try:
            with recorder.recording(engine.module) if job.records else nullcontext():
                facts = _one_step(engine, job, step, held)
        except DivergedError as alarm:
            if not job.records:
                raise
            found["diverged"] = str(alarm)  # the steps before may show the cause
            break
        found["steps"].append(facts)
        found["rows"].append(rows_here(engine.tables))
        found["counts"].append(step_counts(engine))
        divisor = held.summed.divisor
        activation_gradients |= {key: gradient / divisor for key, gradient in recorder.gradients.items()}
        recorder.gradients = {}
        if job.save_after == step + 1:
            engine.save(job.checkpoint, asynchronous=False)
    mesh = engine.plan.mesh
    found["activations"] = {
        "outputs": recorder.outputs,
        "inputs": recorder.inputs,
        "weights": recorder.weights,
        "held": held.found,
        "tokens": tokens,
        "gradients": activation_gradients,
        "place": {
            "dp": mesh.index("data", engine.world.rank),
            **{axis: mesh.index(axis, engine.world.rank) for axis in ("pp", "tp", "cp")},
        },
    }
    return found


def _tokens_of_passes(engine: Engine, recorder: ActivationRecorder) -> dict[str, Tensor]:
    """Return a dictionary that gets the positions of this rank's tokens in each pass whose sequences are cut."""
    found: dict[str, Tensor] = {}
    context = engine._parts.passes.context

    def note(module: Any, args: Any) -> None:
        places = None if context is None else context.places()
        if places is not None and engine._parts.passes.replay.is_running:
            found[recorder.key_of_pass()] = places

    for stage in engine._parts.stages if context is not None else ():
        stage.module.register_forward_pre_hook(note)
    return found


def _recorder(engine: Engine, job: LayoutJob, held: HeldState) -> ActivationRecorder:
    """Return the recorder of a run, which feeds modules if the job says so."""
    replay, mark = engine._parts.passes.replay, held.trail.mark
    if not job.fed:
        return ActivationRecorder(replay, job.rows, weights=not held.lacks, mark=mark)
    given = torch.load(job.fed, weights_only=True)
    tp = engine.plan.mesh.index("tp", engine.world.rank), engine.plan.mesh.size("tp")
    fed = FedTensors(**given, tp=tp, placements=job.placements, rows=held.weight_rows())
    return IsolatingRecorder(replay, job.rows, weights=True, mark=mark, fed=fed)


def _one_step(engine: Engine, job: LayoutJob, step: int, held: HeldState) -> dict[str, Any]:
    """Run one optimizer step, and return its numbers."""
    mine = list(job.steps[step])[engine.dp_index :: engine.dp_size]
    with held.step():
        result = engine.train_step(mine, list(job.weights)[engine.dp_index :: engine.dp_size])
        weights = _whole(engine)
    return {
        "loss": result.loss,
        "norm": result.grad_norm,
        "weight": result.weight,
        "skipped": result.skipped,
        "lr": result.lr,
        "gradients": held.summed.gradients,
        **training_state(engine),
        "weights": weights,
    }


def training_state(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Return the whole masters by parameter and the whole moments by ``parameter label``. Collective."""
    parts = engine._parts
    labels = sorted({info.label for info in parts.registry.of_kind("moment")})
    masters, moments = {}, {}
    for info in parts.registry.of_kind("gradient"):
        for label in ("master", *labels):
            tensor = _state_of(engine, info.name, label)
            if tensor is None:
                continue
            if label == "master":
                masters[info.name] = tensor
            else:
                moments[f"{info.name} {label}"] = tensor
    return {"masters": masters, "moments": moments}


def _state_of(engine: Engine, name: str, label: str) -> Tensor | None:
    try:
        found = engine.full_tensor(name, label)
    except ShardwiseError:
        return None
    return None if found is None else found.detach().cpu().clone()


def step_counts(engine: Engine) -> dict[str, list[float]]:
    """Return the step counts of the parts of each parameter that this rank owns."""
    found: dict[str, list[float]] = {}
    for bucket, optimizer in engine._parts.trained:
        for start, stop, numbers, _ in optimizer.state.scalars():
            for held in bucket.layout.overlaps(*bucket.owned_range):
                if "step" in numbers and held.local < stop and start < held.local + held.stop - held.start:
                    found.setdefault(held.slot.name, []).append(numbers["step"])
    return found


def _whole(engine: Engine) -> dict[str, Tensor]:
    return {name: each for name, each in _copied(engine.state_dict()).items() if isinstance(each, Tensor)}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in tensors.items()
    }
