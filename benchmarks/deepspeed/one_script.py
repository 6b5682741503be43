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

import torch
from deepspeed.utils import log_dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed


class Sentences(Dataset):
    """Token sequences with structure: each token follows from the two before, but for noise."""

    def __init__(self, count: int, length: int, words: int):
        draws = torch.Generator().manual_seed(7)
        tokens = torch.randint(words, (count, length + 1), generator=draws)
        noise = torch.rand(count, length + 1, generator=draws)
        for place in range(2, length + 1):
            follows = (3 * tokens[:, place - 1] + tokens[:, place - 2]) % words
            tokens[:, place] = torch.where(noise[:, place] < 0.9, follows, tokens[:, place])
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> tuple[int, Tensor, Tensor]:
        return place, self.tokens[place, :-1], self.tokens[place, 1:]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Net(nn.Module):
    """A small language model."""

    def __init__(self, words: int, length: int, width: int, layers: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def configuration(args: argparse.Namespace) -> dict:
    """As a ds_config.json."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.01,
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100},
        },
    }


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
