"""Steps of DeepSpeed with one optimizer, in an environment of its own; rank 0 writes what a step took as JSON.

[seconds by the clock, CPU seconds of all ranks], a list each:

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_peer.py OPTIMIZER STAGE STEPS OUT
"""

import json
import sys
import time
from pathlib import Path

import torch
from net import batch, made

import deepspeed

KINDS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-3}},
    "muon": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.95, "ns_method": "standard"}},
}


def main() -> None:
    """Time the steps."""
    kind, stage, steps, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    model = made()
    if kind == "muon":
        for name, parameter in model.named_parameters():
            parameter.use_muon = name.startswith("blocks") and parameter.dim() == 2
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": KINDS[kind],
        "steps_per_print": 100000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    wall, cpu = [], []
    for step in range(steps):
        deepspeed.comm.barrier()
        start, spent = time.perf_counter(), time.process_time()
        engine.backward(engine(*batch(step, engine.global_rank)))
        engine.step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - spent)
    of_all = torch.tensor(cpu, dtype=torch.float64)
    deepspeed.comm.all_reduce(of_all)
    if engine.global_rank == 0:
        out.write_text(json.dumps([wall, of_all.tolist()]))


if __name__ == "__main__":
    main()
