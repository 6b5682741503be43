"""Memory of activations with sequences cut over ranks, measured and foreseen, and the longest sequence that fits.

    python benchmarks/context/memory.py [--tokens 8192] [--ranks 1 2 4] [--methods planned ring ulysses]
    python benchmarks/context/memory.py --longest 600MiB [--train]

A GPT in fp32 trains one sequence with AdamW; ranks have one thread each. "activations" is what the step holds beside
model state at its most on the rank that holds most: what autograd keeps and what operations work with, as
``engine.measure_memory`` counts it. ``--longest`` looks for the longest sequence that fits a memory on one rank and on
two, and with ``--train`` trains a step of each.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import join
from shardwise.models.gpt import Gpt, GptPolicy

_ROWS = ("kept", "received", "at work")


def model(options: argparse.Namespace, tokens: int) -> nn.Module:
    """Return the model for sequences of ``tokens`` tokens."""
    heads = options.width // 64
    shape = GptPolicy(
        layers=options.layers, width=options.width, heads=heads, kv_heads=heads, context=tokens, vocab=256
    )
    torch.manual_seed(0)
    return Gpt(shape)


def batch(tokens: int) -> dict[str, Tensor]:
    """Return one sequence of random tokens."""
    drawn = torch.randint(0, 256, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


def config_of(ranks: int, method: str) -> dict[str, Any]:
    """Return the configuration of ``ranks`` ranks along "cp"."""
    return {
        "mesh": {"cp": ranks},
        "context": method,
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "batch": {"global_size": 1, "micro_size": 1},
        "check_first_step": "off",
    }


def held(options: argparse.Namespace, ranks: int, method: str, tokens: int) -> tuple[dict[str, int], float]:
    """Train two steps on this rank, and return what the second held by row, and its loss."""
    torch.set_num_threads(1)
    engine = shardwise.initialize(model(options, tokens), config_of(ranks, method), world=join(quiet=True))
    batches = [batch(tokens)]
    engine.train_step(batches)
    with engine.measure_memory(batches):
        loss = float(engine.train_step(batches).loss)
    found = engine.held_bytes()
    engine.close()
    return {row: found.get(row, 0) for row in _ROWS}, loss


def activations(options: argparse.Namespace) -> None:
    """Print the activations of each number of ranks and method."""
    print("| ranks | method | activations, MiB | over one rank | kept, MiB | foreseen, MiB |")
    print("|---|---|---|---|---|---|")
    alone = 0
    for ranks in options.ranks:
        for method in options.methods if ranks > 1 else ("planned",):
            by_rank = shardwise.launch(held, options, ranks, method, options.tokens, ranks=ranks, every=True)
            rows, _ = max(by_rank, key=lambda each: sum(each[0].values()))
            total = sum(rows.values())
            alone = alone or total
            example = {name: each.to("meta") for name, each in batch(options.tokens).items()}
            outlook = shardwise.foresee(
                lambda: model(options, options.tokens), config_of(ranks, method), ranks, example=example
            )
            assert outlook.step is not None, "an example was given"
            foreseen = sum(outlook.rows(outlook.step).get(row, 0) for row in _ROWS)
            name = method if ranks > 1 else "-"
            figures = (total / 2**20, total / alone, rows["kept"] / 2**20, foreseen / 2**20)
            print(f"| {ranks} | {name} | " + " | ".join(f"{each:.2f}" for each in figures) + " |", flush=True)


def longest(options: argparse.Namespace) -> None:
    """Print the longest sequences that fit a memory, on one rank and on two."""
    found = {}
    for ranks in (1, 2):
        for method in options.methods if ranks > 1 else ("planned",):
            best = shardwise.longest(
                lambda tokens: model(options, tokens),
                config_of(ranks, method),
                {"device": options.longest},
                lambda tokens: {name: each.to("meta") for name, each in batch(tokens).items()},
                ranks=ranks,
            )
            name = f"{ranks} {method}" if ranks > 1 else "1"
            found[name] = best.tokens
            print(
                f"{name}: {best.tokens:,} tokens, {best.tokens / found['1']:.2f} times one rank", flush=True
            )
            if options.train:
                _, loss = shardwise.launch(held, options, ranks, method, best.tokens, ranks=ranks)
                print(f"    two steps of it: loss {loss:.4f}", flush=True)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--methods", nargs="+", default=["planned", "ring", "ulysses"])
    parser.add_argument("--longest", help="memory of a rank, such as 600MiB")
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    (longest if options.longest else activations)(options)


if __name__ == "__main__":
    main()
