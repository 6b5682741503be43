"""A training script as DeepSpeed's tutorials have it, which knows nothing of Shardwise.

    deepspeed:  DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 one_script.py --stage 2 --out theirs.json
    shardwise:  shardwise launch --as-deepspeed --ranks 2 one_script.py --stage 2 --out ours.json

Each rank writes what it saw: samples in their order, losses, norms, learning rates, counters.
``one_script_under_both.py`` runs it under both packages and compares. 50 optimizer steps by default, two microbatches
each, clipped.
"""

import argparse
import json
import time
from pathlib import Path

from deepspeed.utils import log_dist
from language_model import Net, Sentences, configuration
from torch import nn

import deepspeed


def main() -> None:
    """Train, and write what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(1234)
    model = Net(words=64, length=args.length, width=args.width, layers=args.layers)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Sentences(96, args.length, 64),
        config=configuration(args),
    )
    rows: list[dict] = []
    began, seconds = time.perf_counter(), 0.0
    engine.train()
    while engine.global_steps < args.steps:
        for places, tokens, targets in loader:
            if engine.global_steps == 10:  # the first ones make buffers and graphs
                began = time.perf_counter()
            tokens, targets = tokens.to(engine.device), targets.to(engine.device)
            logits = engine(tokens)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            used = engine.get_lr()
            engine.backward(loss)
            engine.step()
            seconds = time.perf_counter() - began
            counters = [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps]
            norm = engine.get_global_grad_norm()
            rows.append(
                {
                    "places": places.tolist(),
                    "loss": loss.item(),
                    "norm": None if norm is None else float(norm),
                    "lr": [float(each) for each in used],
                    "counters": counters,
                    "boundary": engine.is_gradient_accumulation_boundary(),
                    "applied": engine.was_step_applied(),
                }
            )
            if engine.global_steps >= args.steps:
                break
    rank = deepspeed.comm.get_rank()
    log_dist(f"loss {rows[-1]['loss']:.4f}", ranks=[0])
    found = {"rows": rows, "seconds": seconds}
    args.out.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
