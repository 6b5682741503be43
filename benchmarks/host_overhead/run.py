"""What sharding costs the host: 32 blocks of 9 tiny parameters at stage 3, over the bare module.

With tiny parameters and torch's fake process group, whose collectives return at once, nothing is left of a step
but the work of Python and of the dispatcher: hooks, bookkeeping, views, calls. One process plays rank 0 of 8.
Forward and backward are timed, in rounds that give each contender its turn; a step's overhead is

    (time of the contender - time of the bare module) / blocks          in the same round, then the median

    python run.py --rounds 30 --steps 5 --contenders bare,fsdp2,shardwise

Cost: about one minute, no network, no other process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

BLOCKS = 32
PARAMETERS_PER_BLOCK = 9
WIDTH = 16
TOKENS = 4
WARM_UP_ROUNDS = 2

Step = Callable[[Tensor], None]


class Block(nn.Module):
    """Nine square weights, one after the other, around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARAMETERS_PER_BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y


class Stack(nn.Module):
    """The blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def bare(passes: int) -> Step:
    """The module alone."""
    model = Stack()

    def step(x: Tensor) -> None:
        model(x).backward()
        model.zero_grad(set_to_none=True)

    return step


def fsdp2(passes: int) -> Step:
    """``fully_shard`` on each block and the root, weights released after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Stack()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def step(x: Tensor) -> None:
        model(x).backward()
        model.zero_grad(set_to_none=True)

    return step


def shardwise(passes: int) -> Step:
    """Stage 3 of the engine: ``engine(batch)`` and ``engine.backward(loss)``, as the others without an update.

    All ``passes`` are microbatches of one step, which is never taken; at stage 3 each one reduces its gradients,
    as each backward pass of FSDP2 does.
    """
    from shardwise import initialize
    from shardwise.comm.collectives import Group
    from shardwise.comm.world import World

    class AllAlike(World):
        """A World whose other ranks post the texts that this rank posts, since they do not exist."""

        def post(self, key: str, text: str) -> None:
            for rank in range(self.size):
                self.board.post(key, rank, text)

    ranks = dist.get_world_size()
    Group.all_equal = lambda *_: True  # type: ignore[method-assign]  # a fake sum is that of one rank
    config = {
        "zero": {"stage": 3},
        "batch": {"global_size": TOKENS * ranks * passes, "micro_size": TOKENS},
        "precision": "fp32",
        "optimizer": {"type": "adamw", "lr": 1e-3},
    }
    engine = initialize(Stack(), config=config, world=AllAlike(0, ranks, backend="fake"))

    def step(x: Tensor) -> None:
        loss = engine(x)
        engine.backward(loss)

    return step


CONTENDERS: dict[str, Callable[[int], Step]] = {"bare": bare, "fsdp2": fsdp2, "shardwise": shardwise}


def measure(names: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, one sample per round."""
    passes = (WARM_UP_ROUNDS + rounds) * (steps + 1)
    built = {name: CONTENDERS[name](passes) for name in names}
    x = torch.randn(TOKENS, WIDTH)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, step in built.items():
            gc.collect()
            step(x)
            begin = time.perf_counter()
            for _ in range(steps):
                step(x)
            if number >= WARM_UP_ROUNDS:  # the first rounds fill caches and settle orders
                samples[name].append((time.perf_counter() - begin) / steps)
    return samples


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the overhead over the bare module of the same round."""
    out: dict[str, Any] = {}
    for name, seconds in samples.items():
        extra = [(s - b) / BLOCKS for s, b in zip(seconds, samples["bare"], strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        out[name] = {
            "step_s": statistics.median(seconds),
            "overhead_s_per_block": middle,
            "overhead_s_per_block_quartiles": [low, high],
        }
    return out


def render(results: dict[str, Any]) -> str:
    """The table, with the command that made it."""
    lines = [
        f"`{results['command']}`, {results['date']}, {results['machine']}, one thread, "
        f"commit {results['commit']}, torch {results['versions']['torch']}, {results['ranks']} ranks (fake).",
        "",
        "| contender | forward and backward, ms | over the bare module, ms a block (quartiles) |",
        "|---|---|---|",
    ]
    for name, row in results["rows"].items():
        low, high = (1e3 * bound for bound in row["overhead_s_per_block_quartiles"])
        over = "" if name == "bare" else f"{1e3 * row['overhead_s_per_block']:.3f} ({low:.3f}-{high:.3f})"
        lines.append(f"| {name} | {1e3 * row['step_s']:.2f} | {over} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="of " + ", ".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round and contender")
    parser.add_argument("--ranks", type=int, default=8, help="size of the fake process group")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--readme", type=Path, help="also write the table between the markers of this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    names = ["bare", *(n for n in arguments.contenders.split(",") if n not in ("bare", ""))]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake gather leaves memory as it was, and denormal numbers are slow
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.ranks)
    rows = summary(measure(names, arguments.rounds, arguments.steps))
    words = ["python", "run.py", *(sys.argv[1:] if argv is None else argv)]
    results = describe() | {"command": " ".join(words), "ranks": arguments.ranks, "rows": rows}
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    text = render(results)
    print(text)
    if arguments.readme is not None:
        arguments.readme.write_text(insert(arguments.readme.read_text(), text))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
