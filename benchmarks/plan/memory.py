"""Memory of a training step: foreseen, counted in a real run, grown in the kernel, and by the formulas of others.

    python benchmarks/plan/memory.py

One process per size trains a GPT for two steps on the CPU. Its storages are counted by a dispatch mode, and the kernel
gives its largest resident memory. The growth between two sizes leaves out what the process itself takes; each size
runs ROUNDS times, and the median counts. Formulas are
those of published text, for bf16 with fp32 masters on one device:

    DeepSpeed       20 P                                                      (estimate_zero2_model_states_mem_needs)
    Megatron        18 P + L·s·b·h·(18 + 4·f/h) + 8·s·b + s·b·h + 4·s·b·h·(1 + v/h)    (theoretical_memory_utils)
    llm-analysis    18 P + L·(34·s·b·h + 5·a·s²·b)                            (arXiv:2205.05198, as it is implemented)

torch's ``FSDPMemTracker`` runs FSDP2 on tensors without memory and a process group without ranks, on the CPU. It is
held to the storages of a real FSDP2 step, because it foresees that engine and not this one: fp32 shards, bf16 in the
passes.

P parameters, L layers, s context, b batch, h width, f hidden, a heads, v vocabulary. Megatron's script and Korthikanti
et al. count a GPT with GELU and dropout, so both families are shown.
"""

import json
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.engine.fit.foresee import foresee
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.storages import LiveBytes

BATCH = 4
ROUNDS = 3
CONFIG: dict[str, Any] = {"precision": "bf16", "tiles": {"logits": "off"}}
BASE: dict[str, Any] = {"width": 256, "heads": 4, "context": 256, "vocab": 4096}
SIZES: list[dict[str, Any]] = [
    {**BASE, "family": family, "layers": layers} for family in ("gpt2", "llama") for layers in (4, 12)
]


def made(shape: dict[str, Any]) -> nn.Module:
    """Return the model on meta."""
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(shape))


def batch(shape: dict[str, Any]) -> dict[str, Tensor]:
    """Return one microbatch."""
    ids = torch.arange(BATCH * shape["context"]).remainder(shape["vocab"]).view(BATCH, shape["context"])
    return {"tokens": ids, "targets": ids}


def run(shape: dict[str, Any]) -> None:
    """Train two steps, and print the most bytes of storages and the largest resident memory."""
    live = LiveBytes()
    with live:
        data = batch(shape)
        engine = shardwise.initialize(made(shape), CONFIG)
        engine.train_step([data])
        live.most = live.held
        engine.train_step([data])
    print(json.dumps([live.most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def run_fsdp(shape: dict[str, Any], is_real: bool) -> None:
    """Train two steps with FSDP2, really or in torch's tracker, and print the most bytes."""
    if is_real:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cpu", (1,))
    live = LiveBytes()
    with live if is_real else FakeTensorMode():
        data = batch(shape)
        model = Gpt(GptPolicy.model_validate(shape)) if not is_real else made(shape).to_empty(device="cpu")
        if is_real:
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(module, mesh=mesh, mp_policy=policy)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step() -> None:
            model(data["tokens"], data["targets"]).backward()
            optimizer.step()
            optimizer.zero_grad()

        if is_real:
            step()
            live.most = live.held
            step()
            print(json.dumps(live.most))
            return
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((data,))
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        [found] = tracker.get_tracker_snapshot("peak").values()
        print(json.dumps(found["Total"]))


def formulas(shape: dict[str, Any]) -> dict[str, float]:
    """Return the bytes by the published formulas."""
    model = made(shape)
    parameters = sum(each.numel() for each in model.parameters())
    s, b, h, a, v = shape["context"], BATCH, shape["width"], shape["heads"], shape["vocab"]
    layers, f = shape["layers"], 4 * h
    state = 18 * parameters
    return {
        "DeepSpeed": 20 * parameters,
        "Megatron": state
        + layers * s * b * h * (18 + 4 * f / h)
        + 8 * s * b
        + s * b * h
        + 4 * s * b * h * (1 + v / h),
        "llm-analysis": state + layers * (34 * s * b * h + 5 * a * s * s * b),
    }


def of_process(shape: dict[str, Any], *way: str) -> Any:
    """Return what a process of its own prints for ``shape``."""
    command = [sys.executable, __file__, json.dumps(shape), *way]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(told.splitlines()[-1])


def main() -> None:
    """Print a table of errors for each size, and of the growth between two sizes."""
    before: tuple[str, float, float] | None = None
    for shape in SIZES:
        step = foresee(lambda shape=shape: made(shape), CONFIG, example=batch(shape)).step
        assert step is not None
        rows = step.points["step"].rows
        ours = sum(size for row, size in rows.items() if row not in ("process", "rings", "holes"))
        heap = ours + rows.get("holes", 0)
        runs = [of_process(shape) for _ in range(ROUNDS)]
        counted, resident = runs[0][0], statistics.median(each[1] for each in runs)
        fsdp, tracked = (of_process(shape, way) for way in ("fsdp", "tracker"))
        errors = {"shardwise": ours / counted - 1, "FSDPMemTracker, of FSDP2": tracked / fsdp - 1} | {
            name: size / counted - 1 for name, size in formulas(shape).items()
        }
        said = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
        print(f"{shape['family']} {shape['layers']} layers: counted {counted / 2**20:.1f} MiB; {said}")
        if before is not None and before[0] == shape["family"]:
            grown, wanted = resident - before[1], heap - before[2]
            print(
                f"  growth by the kernel {grown / 2**20:.1f} MiB, foreseen {wanted / 2**20:.1f} MiB: "
                f"{wanted / grown - 1:+.1%}"
            )
        before = shape["family"], resident, heap


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif len(sys.argv) == 2:
        run(json.loads(sys.argv[1]))
    else:
        run_fsdp(json.loads(sys.argv[1]), is_real=sys.argv[2] == "fsdp")
