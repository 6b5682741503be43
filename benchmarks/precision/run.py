"""What a step costs with dtypes by operation (amp O1) and with bf16 weights, beside plain fp32.

    python benchmarks/precision/run.py [--widths 128 512] [--rounds 10]

One process, one thread, a transformer of four blocks, AdamW, 256 tokens a step. Engines of one process take turns, some
steps each; ratios are of CPU time (user and system) in one round.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import shardwise

WORDS, LENGTH, ROWS, BLOCKS, HEAD = 256, 64, 4, 4, 32
KINDS = {
    "fp32": {"compute": "fp32"},
    "O1 in bf16": {"compute": "fp32", "operations": "bf16"},
    "bf16": {"compute": "bf16"},
}
STEPS, WARM_UP = 4, 2


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, width // HEAD, HEAD).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Predicts the next token; returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def measured(width: int, rounds: int) -> dict[str, list[float]]:
    """CPU ms a step, by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engines = {
        kind: shardwise.initialize(
            Net(width), {"precision": precision}, loss=lambda model, batch: model(*batch)
        )
        for kind, precision in KINDS.items()
    }
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1))
    batch = (tokens[:, :-1], tokens[:, 1:])
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(WARM_UP + rounds):
        for kind, engine in engines.items():
            began = time.process_time()
            for _ in range(STEPS):
                engine.train_step([batch])
            if number >= WARM_UP:
                found[kind].append(1e3 * (time.process_time() - began) / STEPS)
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=10)
    wanted = parser.parse_args()
    print("| width | precision | CPU ms a step | over fp32 (quartiles) |\n|---|---|---|---|")
    for width in wanted.widths:
        found = measured(width, wanted.rounds)
        for kind, each in found.items():
            ratios = [a / b for a, b in zip(each, found["fp32"], strict=True)]
            low, mid, high = statistics.quantiles(ratios, n=4)
            print(f"| {width} | {kind} | {statistics.median(each):.1f} | {mid:.2f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    main()
