"""Memory of a training step: foreseen, counted in a real run, grown in the kernel, and by the formulas of others.

    python benchmarks/plan/memory.py

One process per size trains a GPT for two steps on the CPU. Its storages are counted by a dispatch mode, and the kernel
gives its largest resident memory. The growth between two sizes leaves out what the process itself takes. Formulas are
those of published text, for bf16 with fp32 masters on one device:

    DeepSpeed       20 P                                                      (estimate_zero2_model_states_mem_needs)
    Megatron        18 P + L·s·b·h·(18 + 4·f/h) + 8·s·b + s·b·h + 4·s·b·h·(1 + v/h)    (theoretical_memory_utils)
    llm-analysis    18 P + L·(34·s·b·h + 5·a·s²·b)                            (arXiv:2205.05198, as it is implemented)

P parameters, L layers, s context, b batch, h width, f hidden, a heads, v vocabulary. Megatron's script and Korthikanti
et al. count a GPT with GELU and dropout, so both families are shown.
"""

import json
import resource
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.engine.fit.foresee import foresee
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.storages import LiveBytes

BATCH = 4
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


def main() -> None:
    """Print a table of errors for each size, and of the growth between two sizes."""
    before: tuple[str, float, float] | None = None
    for shape in SIZES:
        step = foresee(lambda shape=shape: made(shape), CONFIG, example=batch(shape)).step
        assert step is not None
        rows = step.points["step"].rows
        ours = sum(size for row, size in rows.items() if row not in ("process", "rings", "holes"))
        heap = ours + rows.get("holes", 0)
        command = [sys.executable, __file__, json.dumps(shape)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        counted, resident = json.loads(told.splitlines()[-1])
        errors = {"shardwise": ours / counted - 1} | {
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
    run(json.loads(sys.argv[1])) if len(sys.argv) > 1 else main()
