"""One job of ``run.py`` on one rank: a check that must hold, or a row of the table. Rank 0 writes what it found.

python jobs.py JOB --out FILE [--device cpu] [--tiny]           RANK and WORLD_SIZE from the launcher

checks      resume, ahead, syncs, pp, tp, profile               raise where something is wrong
rows        row:shardwise-0 ... row:shardwise-3, row:torch, row:fsdp2, row:deepspeed
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
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
from shardwise.base.ragged import Ragged
from shardwise.models import Gpt, GptPolicy
from shardwise.observe.flops import mfu, needed_per_token, peak_of
from shardwise.observe.memory import peak_resident_bytes
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import DynamicPolicy, RowOptimizerPolicy, TablePolicy
from shardwise.plan.action import Kind

Batch = tuple[Tensor, Tensor]
_SENDS = {
    Kind.UNSHARD,
    Kind.REDUCE,
    Kind.SUM,
    Kind.NORM,
    Kind.SEND,
    Kind.RECV,
    Kind.ALL_TO_ALL,
    Kind.TRUST_RATIO,
}


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
    """Timed, behind three that warm up."""

    def policy(self) -> GptPolicy:
        """The model."""
        names = ("layers", "width", "heads", "hidden", "context", "vocab")
        return GptPolicy(**{name: getattr(self, name) for name in names})


TABLE = Work(
    layers=16, width=2048, heads=16, hidden=5632, context=2048, vocab=32_000, micro_batch=8, steps=20
)
"""A billion parameters."""
CHECK = Work(layers=8, width=512, heads=8, hidden=1408, context=512, vocab=4096, micro_batch=4, steps=3)
TINY = Work(layers=4, width=32, heads=4, hidden=64, context=16, vocab=61, micro_batch=2, steps=2)


class Job:
    """What a job is given."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.wanted = device
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


# Rows ---------------------------------------------------------------------------------------------------------------


def _shardwise(job: Job, work: Work, stage: int) -> tuple[Callable[[Batch], object], Any]:
    engine = job.engine(work, zero={"stage": stage})
    return lambda batch: engine.train_step([batch]), engine


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


def _torch(job: Job, work: Work) -> tuple[Callable[[Batch], object], Any]:
    """The loop of torch alone: fp32 weights under autocast; DDP over several ranks."""
    _join(job)
    model = _plain_model(job, work)
    if job.size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(job, model, True), None


def _fsdp2(job: Job, work: Work) -> tuple[Callable[[Batch], object], Any]:
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
    return _loop(job, model, False), None


def _deepspeed(job: Job, work: Work) -> tuple[Callable[[Batch], object], Any]:
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

    return step, None


def row(job: Job, name: str) -> dict[str, Any]:
    """Tokens/s, MFU, exposed communication, syncs, memory of one contender."""
    work = job.table
    makers = {"torch": _torch, "fsdp2": _fsdp2, "deepspeed": _deepspeed}
    if name.startswith("shardwise-"):
        step, engine = _shardwise(job, work, int(name[-1]))
    else:
        step, engine = makers[name](job, work)
    batches = [job.batch(work, number) for number in range(4)]
    for batch in batches[:3]:
        step(batch)
    gc.collect()
    if job.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    job.wait()
    begin = time.perf_counter()
    for number in range(work.steps):
        step(batches[number % 4])
    job.wait()
    step_s = (time.perf_counter() - begin) / work.steps
    waits = syncs_of(job, lambda: step(batches[0]))
    tokens = work.micro_batch * work.context * job.size
    needed = needed_per_token(_products(work), work.layers, work.context, work.width) * tokens
    peak = peak_of(job.device, job.dtype)
    return {
        "ranks": job.size,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "mfu": mfu(needed, step_s, None if peak is None else peak * job.size),
        "exposed": None if engine is None else _exposed(engine),
        "syncs": None if waits is None else len(waits),
        "memory": peak_resident_bytes()
        if job.device.type == "cpu"
        else torch.accelerator.max_memory_allocated(),
        "reserved": None if job.device.type == "cpu" else torch.accelerator.max_memory_reserved(),
    }


def _products(work: Work) -> int:
    """Weights that take part in a product."""
    return work.layers * (4 * work.width**2 + 3 * work.width * work.hidden) + work.vocab * work.width


def _exposed(engine: Any) -> float:
    """Share of the last step that its stream spent in Actions which send: what they hide takes no time there."""
    rows = list(engine.trace.rows())
    whole = max(done.stop_s for done in rows) - min(done.start_s for done in rows)
    return sum(done.stop_s - done.start_s for done in rows if done.action.kind in _SENDS) / whole


CHECKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    each.__name__: each for each in (resume, ahead, syncs, one, pp, tp, profile)
}


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
    job = Job(given.device, given.tiny)
    kind, _, name = given.job.partition(":")
    found = row(job, name) if kind == "row" else CHECKS[kind](job)
    if job.rank == 0:
        given.out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
