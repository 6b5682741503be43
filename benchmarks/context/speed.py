"""Seconds of a step with the tokens of each sequence on two ranks, beside one rank and two peers, in turns.

    python benchmarks/context/speed.py [--rounds 7] [--documents 256] [--methods planned ring ulysses]
    THEIRS/bin/python benchmarks/context/speed.py --deepspeed    # an environment with deepspeed; PYTHONPATH=src

Every contender trains the same GPT in fp32 on the same tokens with AdamW. One step of each is taken in every round, in
an order that turns, while the processes of all others wait; figures are medians over the rounds, and ratios are medians
of the ratios within a round.

    one          one rank, one thread, the whole sequence
    METHOD       two ranks of mesh.cp: 2, with context: METHOD
    deepspeed    two ranks, DeepSpeed's DistributedAttention (all-to-all over heads) around torch's fused attention
    gathered     two ranks that gather all keys and values, and attend with a mask: what torch does for any mask

With ``--documents N`` the sequence is a packing of documents of N tokens each; the peers see documents by a mask.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import shardwise
from shardwise.comm.world import join
from shardwise.models.gpt import Gpt, GptPolicy

Step = Callable[[], float]
"""Trains one step and returns the loss."""
RATE = 1e-4


def shape(options: argparse.Namespace) -> GptPolicy:
    """Return the model: wide enough that products of weights count, short enough that attention is most of the work."""
    heads = options.width // 64
    return GptPolicy(
        layers=4, width=options.width, heads=heads, kv_heads=heads, context=options.tokens, vocab=256
    )


def batch(options: argparse.Namespace) -> dict[str, Tensor]:
    """Return one sequence of random tokens, and of documents if they are asked for."""
    drawn = torch.randint(0, 256, (1, options.tokens + 1), generator=torch.Generator().manual_seed(0))
    found = {"tokens": drawn[:, :-1].clone(), "targets": drawn[:, 1:].clone()}
    if options.documents:
        found["documents"] = torch.arange(options.tokens)[None] // options.documents
        found["targets"][:, options.documents - 1 :: options.documents] = -100
    return found


def ours(rank: int, options: argparse.Namespace, method: str | None) -> Step:
    """Return the step of an engine."""
    config: dict[str, Any] = {
        "optimizer": {"type": "adamw", "lr": RATE},
        "batch": {"global_size": 1, "micro_size": 1},
        "check_first_step": "off",
    }
    if method is not None:
        config |= {"mesh": {"cp": 2}, "context": method}
    torch.manual_seed(0)
    engine = shardwise.initialize(Gpt(shape(options)), config, world=join(quiet=True))
    given = batch(options)
    return lambda: float(engine.train_step([given]).loss)


def seen_by(start: int, stop: int, options: argparse.Namespace) -> Tensor:
    """Return the mask of the keys that tokens [start, stop) of the packing see, [stop - start, T]."""
    place = torch.arange(options.tokens)
    queries = place[start:stop, None]
    seen = place[None] <= queries
    if options.documents:
        seen &= place[None] // options.documents == queries // options.documents
    return seen


class _Gathered(torch.autograd.Function):
    """Gathers rows of all ranks, [B, N, t, K] -> [B, N, T, K]; the gradients of a rank's rows go home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        going = torch.stack(grad.chunk(2, 2)).contiguous()
        came = torch.empty_like(going)
        dist.all_to_all_single(came, going)
        return came.sum(0)


def theirs(rank: int, options: argparse.Namespace, name: str) -> Step:
    """Return the step of plain torch with the attention of a peer; each rank has one half of the sequence."""
    half = options.tokens // 2
    if name == "deepspeed":
        attention = of_deepspeed(options)
    else:
        seen = seen_by(rank * half, (rank + 1) * half, options)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, _Gathered.apply(k), _Gathered.apply(v), attn_mask=seen)

    torch.manual_seed(0)
    model = Gpt(shape(options), attention=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    whole = batch(options)
    tokens, targets = (whole[name].chunk(2, 1)[rank] for name in ("tokens", "targets"))
    share = float((targets != -100).sum() / (whole["targets"] != -100).sum())
    positions = torch.arange(rank * half, (rank + 1) * half)
    if options.documents:
        positions = positions % options.documents

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, targets, positions=positions) * share
        loss.backward()
        flat = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        dist.all_reduce(flat)
        place = 0
        for each in model.parameters():
            if each.grad is not None:
                each.grad = flat[place : place + each.numel()].view_as(each)
                place += each.numel()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    return step


def of_deepspeed(options: argparse.Namespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the attention of DeepSpeed's sequence parallelism."""
    from deepspeed.sequence.layer import DistributedAttention

    import deepspeed

    deepspeed.init_distributed("gloo")
    seen = seen_by(0, options.tokens, options) if options.documents else None

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = [each.transpose(1, 2) for each in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, is_causal=seen is None)
        return out.transpose(1, 2).contiguous()

    around = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens_first = [each.transpose(1, 2).contiguous() for each in (q, k, v)]
        found: Tensor = around(*tokens_first, 0)
        return found.transpose(1, 2)

    return attention


def rank_main(
    rank: int,
    ranks: int,
    build: Callable[..., Step],
    folder: str,
    options: argparse.Namespace,
    line: Connection,
) -> None:
    """Run one rank of a contender, which takes a step whenever its line says so."""
    torch.set_num_threads(1)
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)}
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    step = build(rank, options)
    line.send("ready")
    while line.recv():
        start = time.perf_counter()
        loss = step()
        line.send((time.perf_counter() - start, loss))


class Contender:
    """The processes of one contender."""

    def __init__(self, ranks: int, build: Callable[..., Step], options: argparse.Namespace) -> None:
        self.folder = tempfile.TemporaryDirectory()
        spawning = mp.get_context("spawn")
        self.lines, self.processes = [], []
        for rank in range(ranks):
            here, there = spawning.Pipe()
            given = (rank, ranks, build, self.folder.name, options, there)
            process = spawning.Process(target=rank_main, args=given, daemon=True)
            process.start()
            self.lines.append(here)
            self.processes.append(process)
        for line in self.lines:
            line.recv()

    def step(self) -> tuple[float, float]:
        """Take a step; return the seconds of the slowest rank, and the loss."""
        for line in self.lines:
            line.send(True)
        found = [line.recv() for line in self.lines]
        return max(seconds for seconds, _ in found), found[0][1]

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
            process.join()
        self.folder.cleanup()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of all contenders, their losses, and the ratios of ours to each."""
    built: dict[str, tuple[int, Callable[..., Step]]] = {"one": (1, partial(ours, method=None))}
    built |= {method: (2, partial(ours, method=method)) for method in options.methods}
    built["gathered"] = (2, partial(theirs, name="gathered"))
    if options.deepspeed:
        built["deepspeed"] = (2, partial(theirs, name="deepspeed"))
    contenders = {name: Contender(ranks, build, options) for name, (ranks, build) in built.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    names = list(contenders)
    for turn in range(options.rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken, losses[name] = contenders[name].step()
            if turn > 1:
                seconds[name].append(taken)
    for each in contenders.values():
        each.end()
    ratios = {
        f"{method} / {name}": statistics.median(
            a / b for a, b in zip(seconds[method], seconds[name], strict=True)
        )
        for method in options.methods
        for name in names
        if name not in options.methods
    }
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {"seconds": medians, "losses": losses, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["planned"])
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options)
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
