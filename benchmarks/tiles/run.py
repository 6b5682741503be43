"""Peak memory and time of head and loss, of feed-forward parts and of a block, by tiles of tokens and whole.

    python benchmarks/tiles/run.py [--vocabulary 131072] [--tokens 8192] [--width 512] [--rounds 3] [--dtype fp32]
                                   [--only "loss 1" "loss 2" "gated 1" "gelu 1" "block 1"]

A pass is forward and backward of the layer alone, its weight trained; the block is one of a ``gpt``, its sequences of
2,048 tokens. The forms take turns in one process (a rank: a
thread; tp 2: two of them), so that load on the machine meets all alike. Peaks are those of resident memory over what
was there before the pass: x, the weight and the targets are not in them, the weight's gradient is.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.compose.module_steps import recompute_blocks
from shardwise.kernels.head_loss import LossTile
from shardwise.models import Gpt, GptPolicy
from shardwise.models.layers import GeluMlp, Head, SwiGlu
from shardwise.models.tiles import tile_model
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.parallel.tensor.region import ParallelRegion
from shardwise.passes.recompute import RecomputePolicy
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.passes.tiles import TilesPolicy
from shardwise.plan.mesh import Mesh
from shardwise.precision.policy import DTYPES

Forms = dict[str, Callable[[], Tensor]]


def status_bytes(key: str) -> int:
    """A row of this process's memory as the kernel counts it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Resident bytes at the most, over those before."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


def tp_group(world: World) -> Group:
    """Of all ranks."""
    if world.size == 1:
        return Group.alone("tp")
    clock = StepClock(600.0)
    clock.steps_done = 1
    return world.group(Mesh(tp=world.size), "tp", CommPolicy(), clock, Traffic())


def loss_forms(args: argparse.Namespace, world: World) -> tuple[Forms, list[nn.Module]]:
    """The loss whole, by tiles, and by tiles whose gradients wait for the backward pass."""
    group, dtype = tp_group(world), DTYPES[args.dtype]
    columns = args.vocabulary // group.size
    x = torch.randn(1, args.tokens, args.width, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, args.vocabulary, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    head: Any = Head(args.width, columns, bias=False, dtype=dtype)
    if group.size > 1:
        first = group.index * columns
        rows = slice(first, first + columns)
        head = VocabularyHead(head, "head", ParallelRegion(group, False), rows, args.vocabulary)

    def by(tile: LossTile | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            head.tile = tile
            loss: Tensor = head(x, targets)
            return loss

        return run

    forms = {"whole": by(None), "tiles": by(LossTile()), "tiles, in backward": by(LossTile(at_once=False))}
    return forms, [head]


def mlp_forms(kind: Any, args: argparse.Namespace, world: World) -> tuple[Forms, list[nn.Module]]:
    """A feed-forward part, whole and by tiles."""
    dtype = DTYPES[args.dtype]
    x = torch.randn(1, args.tokens, args.width, dtype=dtype, requires_grad=True)
    nets = [nn.ModuleList([kind(args.width, 4 * args.width, 0.0)]).to(dtype) for _ in range(2)]
    tile_model(nets[1], TilesPolicy(mlp=512), DrawReplay(), at_once=True)
    return {
        name: lambda net=net: net[0](x).sum() for name, net in zip(("whole", "tiles"), nets, strict=True)
    }, list(nets)


def block_forms(args: argparse.Namespace, world: World) -> tuple[Forms, list[nn.Module]]:
    """A transformer block with and without tiles and recomputation."""
    dtype, forms, models, replay = DTYPES[args.dtype], {}, [], DrawReplay()
    x = torch.randn(args.tokens // 2048, 2048, args.width, dtype=dtype, requires_grad=True)
    for name, mlp, scope in (
        ("whole", "off", "none"),
        ("tiles", 512, "none"),
        ("whole, recomputed", "off", "full"),
        ("tiles, recomputed", 512, "full"),
    ):
        heads = args.width // 64
        policy = GptPolicy(
            layers=1, width=args.width, hidden=4 * args.width, heads=heads, context=2048, vocab=64
        )
        model = Gpt(policy).to(dtype)
        tile_model(model, TilesPolicy(mlp=mlp), replay, at_once=True)
        recompute_blocks(model, ["blocks.0"], RecomputePolicy(scope=scope), replay)
        at = model._angles(torch.arange(2048, device=x.device))

        def run(block: nn.Module = model.blocks[0], at: Any = at) -> Tensor:
            with replay.at(BatchPosition(0)):
                loss: Tensor = block(x, at).sum()
            return loss

        forms[name] = run
        models.append(model)
    return forms, list(models)


FORMS: dict[str, Callable[[argparse.Namespace, World], tuple[Forms, list[nn.Module]]]] = {
    "loss": loss_forms,
    "gated": partial(mlp_forms, SwiGlu),
    "gelu": partial(mlp_forms, GeluMlp),
    "block": block_forms,
}


def measure(args: argparse.Namespace, what: str) -> dict[str, tuple[float, float, float]]:
    """By form: median seconds, median CPU seconds, peak bytes."""
    torch.set_num_threads(1)
    world = join(quiet=True)
    forms, modules = FORMS[what](args, world)
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in forms}
    for _ in range(args.rounds):
        for name, form in forms.items():
            for module in modules:
                module.zero_grad()
            wall, cpu = time.perf_counter(), time.process_time()
            peak = peak_bytes(lambda form=form: form().backward())
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu, peak))
    world.close()
    return {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in found.items()}  # type: ignore[misc]


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    for key, value in (("vocabulary", 131072), ("tokens", 8192), ("width", 512), ("rounds", 3)):
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--only", nargs="*", default=["loss 1", "loss 2", "gated 1", "gelu 1", "block 1"])
    args = parser.parse_args()
    print(
        "| what | form | time, s | over whole | CPU time over whole | peak, MiB | over whole |\n"
        "|---|---|---|---|---|---|---|"
    )
    for case in args.only:
        what, ranks = case.split()
        by_rank = shardwise.launch(measure, args, what, ranks=int(ranks), every=True)
        for name in by_rank[0]:
            wall, cpu, peak = (max(rank[name][i] for rank in by_rank) for i in range(3))
            wall0, cpu0, peak0 = (max(rank["whole"][i] for rank in by_rank) for i in range(3))
            where = what if ranks == "1" else f"{what}, tp {ranks}"
            print(
                f"| {where} | {name} | {wall:.1f} | {wall / wall0:.2f} | {cpu / cpu0:.2f} | {peak / 2**20:.0f} | "
                f"1/{peak0 / peak:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
