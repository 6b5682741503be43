"""One job of ``run.py`` on one rank: a check that must hold, or a row of the table. Rank 0 writes what it found.

python jobs.py JOB --out FILE [--device cpu] [--tiny]           RANK and WORLD_SIZE from the launcher

checks      resume, ahead, syncs, one, pp, tp, profile          raise an error if something is wrong
faults      killed, late                                        every rank that goes on writes FILE.RANK
rows        row:NAME of table_rows.py, row:torch, row:fsdp2, row:deepspeed
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CommError
from shardwise.base.ragged import Ragged
from shardwise.engine.fit.outside import HOLES_ROW, OUTSIDE_ROW
from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import GptExperts, flops_per_token
from shardwise.observe.flops import mfu, peak_of
from shardwise.observe.memory import peak_resident_bytes
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from shardwise.plan.plan import bytes_by_tier

sys.path.append(str(Path(__file__).resolve().parent))
from table_rows import ROWS, Row  # noqa: E402

Batch = Any
_WARM_UP = 3
_MEASURED = 3
"""Steps in which waits are measured, behind the timed steps."""
_LATE_S = 90.0
"""Longest time that the late rank computes alone."""


class Work(NamedTuple):
    """What all contenders train."""

    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    vocab: int
    micro_batch: int
    steps: int
    """Timed steps, behind three that warm up."""
    keys: int = 0
    """Samples of a rank's batch for the tables."""
    table_rows: int = 0

    def policy(self, experts: bool = False) -> GptPolicy:
        """Return the model: a GPT, or one with 8 experts of a quarter of its hidden width in each block."""
        names = ("layers", "width", "heads", "hidden", "context", "vocab")
        sizes = {name: getattr(self, name) for name in names}
        return GptPolicy(**sizes, experts=GptExperts(count=8, hidden=self.hidden // 4) if experts else None)


TABLE = Work(
    layers=16, width=2048, heads=16, hidden=5632, context=2048, vocab=32_000, micro_batch=8, steps=10,
    keys=8192, table_rows=200_000,
)  # fmt: skip
"""A billion parameters."""
CHECK = Work(layers=8, width=512, heads=8, hidden=1408, context=512, vocab=4096, micro_batch=4, steps=3)
TINY = Work(
    layers=4, width=32, heads=4, hidden=64, context=16, vocab=61, micro_batch=4, steps=2, keys=16, table_rows=100
)  # fmt: skip


class Job:
    """What a job is given: its rank, its device, and the sizes of its models."""

    def __init__(self, device: str, tiny: bool, out: Path) -> None:
        self.wanted, self.out = device, out
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        found = None if device == "cpu" else torch.accelerator.current_accelerator()
        self.device = (
            torch.device("cpu")
            if found is None
            else torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))
        )
        self.check, self.table = (TINY, TINY) if tiny else (CHECK, TABLE)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)

    def config(self, work: Work, microbatches: int = 1, **more: Any) -> dict[str, Any]:
        """Of our engine."""
        return {
            "batch": {"accumulation": microbatches},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "precision": "fp32" if self.dtype == torch.float32 else "bf16",
            "comm": {"device": "cpu" if self.device.type == "cpu" else "auto"},
            **more,
        }

    def engine(self, work: Work, microbatches: int = 1, **more: Any) -> Any:
        """Ours, over a model that is drawn where it lives."""
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Gpt(work.policy())
        return shardwise.initialize(model, self.config(work, microbatches, **more))

    def batch(self, work: Work, number: int, rank: int | None = None) -> Batch:
        """Tokens and targets on the host: [B, T] each, a rank's own unless it is told which."""
        seed = number * 1000 + (self.rank if rank is None else rank)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, work.vocab, (work.micro_batch, work.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def wait(self) -> None:
        """Till the device has done everything."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def syncs_of(job: Job, run: Callable[[], object]) -> list[str] | None:
    """Where ``run`` makes the host wait, as torch counts it; None on a CPU, where it always does."""
    if job.device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return [
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchronizing" in str(each.message)
    ]


# Checks -------------------------------------------------------------------------------------------------------------


def resume(job: Job) -> dict[str, Any]:
    """Check that a step after ``load`` computes the same bits as without it.

    The engines have ``deterministic: true``. Without the key the backward pass of flash attention adds by atomics, and
    the norms of two equal steps differ in their last bits.
    """
    work = job.check
    with tempfile.TemporaryDirectory() as folder:
        engine = job.engine(work, zero={"stage": 3}, deterministic=True)
        for step in range(2):
            engine.train_step([job.batch(work, step)])
        engine.save(folder, asynchronous=False)
        expected = engine.train_step([job.batch(work, 2)])
        engine.close()
        engine = job.engine(work, zero={"stage": 3}, deterministic=True)
        assert engine.load(folder) is not None, "nothing was found to load"
        found = engine.train_step([job.batch(work, 2)])
        engine.close()
    assert found.loss == expected.loss, f"loss {found.loss} after load, {expected.loss} without"
    assert found.grad_norm == expected.grad_norm, (
        f"norm {found.grad_norm} after load, {expected.grad_norm} without"
    )
    return {"found": f"loss {found.loss:.6f} and norm {found.grad_norm:.6f}, equal to the bit"}


class _Clicks(nn.Module):
    """A static and a dynamic table under a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            TablePolicy(name="fixed", width=8, rows=1000),
            TablePolicy(name="grows", width=8, dynamic=DynamicPolicy()),
        ]
        self.tables = EmbeddingCollection(tables, RowOptimizerPolicy(lr=0.05), seed=0)
        self.out = nn.Linear(16, 1)

    def forward(self, sparse: Any, labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        logits = self.out(torch.cat([found["fixed"], found["grows"]], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def _clicks(step: int) -> tuple[dict[str, Ragged], Tensor]:
    generator = torch.Generator().manual_seed(step)
    keys = torch.randint(0, 1000, (2, 64, 3), generator=generator).tolist()
    features = {name: Ragged.of_lists(rows) for name, rows in zip(("fixed", "grows"), keys, strict=True)}
    return features, torch.randint(0, 2, (64,), generator=generator).float()


def ahead(job: Job) -> dict[str, Any]:
    """Keys that go a step ahead give the losses of keys that do not."""
    losses: list[list[float]] = []
    for depth in (0, 1):
        torch.manual_seed(0)
        engine = shardwise.initialize(_Clicks(), {**job.config(job.check), "precision": "fp32"})
        steps = ([_clicks(step)] for step in range(4))
        losses.append([engine.train_step(batches).loss for batches in engine.prefetch(steps, depth=depth)])
        engine.close()
    assert losses[0] == losses[1], f"{losses[0]} in the step, {losses[1]} ahead"
    return {"found": f"losses of 4 steps equal to the bit, the last {losses[0][-1]:.6f}"}


def syncs(job: Job) -> dict[str, Any]:
    """A step waits for its device once: for the norm."""
    work, stages = job.check, {}
    for stage in range(4):
        engine = job.engine(work, 2, zero={"stage": stage})
        batches = [job.batch(work, i) for i in range(2)]
        for _ in range(3):
            engine.train_step(batches)
        stages[stage] = syncs_of(job, lambda: engine.train_step(batches))  # noqa: B023
        engine.close()
    if stages[0] is None:
        return {"found": "not on a CPU"}
    told = "; ".join(
        f"stage {stage}: {len(found or ())} {sorted(set(found or ()))}" for stage, found in stages.items()
    )
    assert all(found is not None and len(found) <= 1 for found in stages.values()), told
    return {"found": told}


def _first_losses(job: Job, mesh: dict[str, int], microbatches: int) -> list[float]:
    engine = job.engine(job.check, microbatches, mesh=mesh)
    losses = [
        engine.train_step(
            [job.batch(job.check, microbatches * step + i, rank=0) for i in range(microbatches)]
        ).loss
        for step in range(3)
    ]
    engine.close()
    return losses


def one(job: Job) -> dict[str, Any]:
    """What the cut models below are compared with."""
    return {"found": "the losses that pp and tp are compared with", "losses": _first_losses(job, {}, 4)}


def pp(job: Job) -> dict[str, Any]:
    """A pipeline over all ranks."""
    losses = _first_losses(job, {"pp": job.size}, 4)
    return {"found": f"losses {losses}", "losses": losses}


def tp(job: Job) -> dict[str, Any]:
    """Matrices cut over all ranks."""
    losses = _first_losses(job, {"tp": job.size}, 4)
    return {"found": f"losses {losses}", "losses": losses}


def profile(job: Job) -> dict[str, Any]:
    """Which kernels stage 3 spends its time in."""
    work = job.table
    engine = job.engine(work, zero={"stage": 3})
    batches = [job.batch(work, 0)]
    for _ in range(3):
        engine.train_step(batches)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if job.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        engine.train_step(batches)
        job.wait()
    order = "self_cpu_time_total" if job.device.type == "cpu" else "self_device_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, order))[:12]
    total = sum(getattr(event, order) for event in found.key_averages()) or 1
    engine.close()
    rows = [f"{getattr(e, order) / total:6.1%}  {e.count:6d}  {e.key[:80]}" for e in events]
    return {"found": "in the list below", "profile": rows}


# Faults -------------------------------------------------------------------------------------------------------------


def _begun(job: Job) -> Any:
    """Return an engine in the middle of its third step: of two microbatches one is computed on every rank."""
    engine = job.engine(job.check, 2, zero={"stage": 3})
    for step in range(3):
        batches = [job.batch(job.check, 2 * step + i) for i in range(2)]
        engine.backward(engine(*batches[0]))
        if step < 2:
            engine.step()
            engine.backward(engine(*batches[1]))
            engine.step()
    return engine


def _go_on(job: Job, engine: Any) -> Any:
    """Run the rest of the third step."""
    engine.step()
    engine.backward(engine(*job.batch(job.check, 5)))
    return engine.step()


def killed(job: Job) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a step; the others end with an error that names it."""
    engine = _begun(job)
    if job.rank == 1:
        job.wait()
        job.out.with_suffix(".at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):  # a rank that runs ahead of its device may finish a step or two
            _go_on(job, engine)
            engine.backward(engine(*job.batch(job.check, 4)))
    except CommError as error:
        return {"found": str(error)}
    raise AssertionError("the ranks went on without rank 1")


class _Told(logging.Handler):
    """Keeps the log lines that name rank 1, and writes the first one for the late rank to see."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if "rank 1" in line and not self.line:
            self.line = line
            self.path.write_text(line)


def late(job: Job) -> dict[str, Any]:
    """Rank 1 computes alone in the middle of a step until another rank has named it; then all go on."""
    named = job.out.with_suffix(".named")
    told = _Told(named)
    logging.getLogger("shardwise").addHandler(told)
    engine = _begun(job)
    begin = time.monotonic()
    if job.rank == 1:
        job.wait()
        job.out.with_suffix(".at").write_text(str(begin))
        while not named.exists() and time.monotonic() - begin < _LATE_S:
            sum(range(10_000))
    result = _go_on(job, engine)
    engine.close()
    if job.rank == 0:
        assert told.line, f"nobody named rank 1, which was late for {time.monotonic() - begin:.0f} s"
    return {"found": told.line, "loss": result.loss}


# Rows ---------------------------------------------------------------------------------------------------------------


class _Contender(NamedTuple):
    """What a row trains."""

    step: Callable[[Sequence[Batch]], object]
    batch: Callable[[int], Batch]
    """Batch of this rank, by number."""
    samples: int
    """Tokens of a step over all ranks, or samples of a model with tables."""
    flops: int | None = None
    """Floating-point operations that a step needs, over all ranks; None: not counted."""
    engine: Any = None
    foreseen: int | None = None
    """Bytes that ``foresee`` predicts for the tensors of rank 0 at the peak of a step, on a CPU for its process; None
    for tables, because the keys of a batch decide."""
    microbatches: int = 1


class _Ranking(nn.Module):
    """26 static tables under a small multilayer perceptron, as models of clicks have them."""

    def __init__(self, rows: int, width: int = 64) -> None:
        super().__init__()
        self.names = [f"feature_{place}" for place in range(26)]
        tables = [TablePolicy(name=name, width=width, rows=rows) for name in self.names]
        self.tables = EmbeddingCollection(tables, RowOptimizerPolicy(lr=0.05), seed=0)
        self.net = nn.Sequential(nn.Linear(26 * width, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, sparse: Any, labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        logits = self.net(torch.cat([found[name] for name in self.names], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def batch(self, samples: int, rows: int, seed: int) -> Batch:
        """Return one key a feature and sample, and the labels."""
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randint(0, rows, (26, samples), generator=generator)
        offsets = torch.arange(samples + 1)
        features = {name: Ragged(values, offsets) for name, values in zip(self.names, keys, strict=True)}
        return features, torch.randint(0, 2, (samples,), generator=generator).float()


def _foreseen(job: Job, make: Callable[[], nn.Module], config: dict[str, Any], example: Batch) -> int:
    """Return the bytes of tensors at the peak of a step on rank 0, as ``foresee`` predicts them.

    Torch's statistics of a device count tensors alone, so the driver's memory and the allocator's holes are left out.
    On a CPU the whole process is counted.
    """
    step = shardwise.foresee(make, config, job.size, job.device, example=example).steps[0]
    if job.device.type == "cpu":
        return step.bytes_by_tier["device"]
    inside = {name: size for name, size in step.peak.rows.items() if name not in (OUTSIDE_ROW, HOLES_ROW)}
    return bytes_by_tier(inside)["device"]


def _ours(job: Job, work: Work, row: Row) -> _Contender:
    """Return the row of an engine of ours."""
    count = row.microbatches(job.size)
    work = work._replace(micro_batch=max(1, work.micro_batch // row.smaller))
    own = {**row.config(job.size), **(row.cpu if job.device.type == "cpu" else {})}
    config = {**job.config(work, count), **own}
    torch.manual_seed(0)
    if row.model == "tables":
        model = _Ranking(work.table_rows)
        engine = shardwise.initialize(model, config)
        return _Contender(
            engine.train_step,
            lambda number: model.batch(work.keys, work.table_rows, 1000 * number + job.rank),
            work.keys * job.size,
            engine=engine,
        )
    policy = work.policy(row.model == "experts")

    def make() -> nn.Module:
        with torch.device("meta"):
            return Gpt(policy)

    engine = shardwise.initialize(make(), config)
    tokens = work.micro_batch * work.context * count * engine.dp_size
    return _Contender(
        engine.train_step,
        lambda number: job.batch(work, number, engine.dp_index),
        tokens,
        flops_per_token(policy) * tokens,
        engine,
        _foreseen(job, make, config, job.batch(work, 0)),
        count,
    )


def _plain_model(job: Job, work: Work) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(job.device):
        return Gpt(work.policy())


def _join(job: Job) -> None:
    if job.size > 1 and not dist.is_initialized():
        dist.init_process_group(dist.get_default_backend_for_device(job.device))


def _loop(job: Job, model: nn.Module, autocast: bool) -> Callable[[Batch], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: Batch) -> float:
        tokens, targets = (each.to(job.device) for each in batch)
        with torch.autocast(job.device.type, job.dtype, enabled=autocast and job.dtype != torch.float32):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _torch(job: Job, work: Work) -> Callable[[Batch], object]:
    """The loop of torch alone: fp32 weights under autocast; DDP over several ranks."""
    _join(job)
    model = _plain_model(job, work)
    if job.size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(job, model, True)


def _fsdp2(job: Job, work: Work) -> Callable[[Batch], object]:
    """``fully_shard`` of every block and of the root, weights freed after forward, as stage 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        store = None if job.size > 1 else dist.HashStore()
        backend = dist.get_default_backend_for_device(job.device)
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.size)
    model = _plain_model(job, work)
    mesh = init_device_mesh(job.device.type, (job.size,))
    mixed = MixedPrecisionPolicy()
    if job.dtype != torch.float32:
        mixed = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return _loop(job, model, False)


def _deepspeed(job: Job, work: Work) -> Callable[[Batch], object]:
    """Stage 3 as its defaults have it."""
    deepspeed = importlib.import_module("deepspeed")
    if job.size == 1:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
        }
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": job.dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=_plain_model(job, work), config=config)

    def step(batch: Batch) -> float:
        loss = engine(*(each.to(job.device) for each in batch))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _theirs(job: Job, work: Work, name: str) -> _Contender:
    """Return the row of another library."""
    step = {"torch": _torch, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[name](job, work)
    tokens = work.micro_batch * work.context * job.size
    return _Contender(
        lambda batches: step(batches[0]),
        lambda number: job.batch(work, number),
        tokens,
        flops_per_token(work.policy()) * tokens,
    )


def row(job: Job, name: str) -> dict[str, Any]:
    """Measure one contender: seconds of a step, exposed communication, syncs, memory."""
    work = job.table
    found = _ours(job, work, ROWS[name]) if name in ROWS else _theirs(job, work, name)
    batches = [[found.batch(4 * number + i) for i in range(found.microbatches)] for number in range(4)]
    for number in range(_WARM_UP):
        found.step(batches[number])
    gc.collect()
    if job.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    job.wait()
    begin = time.perf_counter()
    for number in range(work.steps):
        found.step(batches[number % 4])
    job.wait()
    step_s = (time.perf_counter() - begin) / work.steps
    waits = syncs_of(job, lambda: found.step(batches[0]))
    peak = peak_of(job.device, job.dtype)
    return {
        "ranks": job.size,
        "step_s": step_s,
        "per_s": found.samples / step_s,
        "unit": "samples" if name in ROWS and ROWS[name].model == "tables" else "tokens",
        "mfu": None
        if found.flops is None
        else mfu(found.flops, step_s, None if peak is None else peak * job.size),
        "exposed_s": None if found.engine is None else _exposed(found, batches[0]),
        "syncs": None if waits is None else len(waits),
        "memory": peak_resident_bytes()
        if job.device.type == "cpu"
        else torch.accelerator.max_memory_allocated(),
        "foreseen": found.foreseen,
        "reserved": None if job.device.type == "cpu" else torch.accelerator.max_memory_reserved(),
    }


def _exposed(found: _Contender, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the exposed seconds of a step on rank 0 by axis, the mean of three steps."""
    found.engine.measure_waits()
    found.step(batches)
    total: dict[str, float] = {}
    for _ in range(_MEASURED):
        found.step(batches)
        for axis, seconds in found.engine.trace.waits.seconds().items():
            total[axis] = total.get(axis, 0.0) + seconds / _MEASURED
    return total


CHECKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    each.__name__: each for each in (resume, ahead, syncs, one, pp, tp, profile)
}
FAULTS: dict[str, Callable[[Job], dict[str, Any]]] = {"killed": killed, "late": late}


def main(words: Sequence[str] | None = None) -> None:
    """Do the job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    job = Job(given.device, given.tiny, given.out)
    kind, _, name = given.job.partition(":")
    if kind in FAULTS:
        given.out.with_suffix(f".{job.rank}").write_text(json.dumps(FAULTS[kind](job)))
        return
    found = row(job, name) if kind == "row" else CHECKS[kind](job)
    if job.rank == 0:
        given.out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
