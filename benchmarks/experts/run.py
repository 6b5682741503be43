"""A layer of experts over ranks: seconds and memory of a forward and backward pass, beside a dense layer and a peer.

    python benchmarks/experts/run.py speed [--rounds 9] [--dtype bfloat16] [--load 3.5]
    THEIRS/bin/python benchmarks/experts/run.py speed --deepspeed     # an environment with deepspeed; PYTHONPATH=src
    python benchmarks/experts/run.py memory

``speed`` runs all contenders by turns, round by round, in the same processes on the same tokens and the same weights of
the router, calibrated so that the fullest expert gets ``--load`` times the mean (0: as drawn). ``dense`` is one SwiGLU
on as many rows as the experts get pairs, so it costs the same operations. ``memory`` is what the rank that
takes all tokens of all ranks holds at most in a pass, over that of routing that is even.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.parallel.expert.dispatch import Dispatcher
from shardwise.parallel.expert.experts import Experts
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.plan.mesh import Mesh

EXPERTS, TOP_K, WIDTH, HIDDEN = 8, 2, 512, 1024

Contender = tuple[nn.Module, Callable[[Tensor], Tensor]]


class Mlp(nn.Module):
    """down(silu(gate) · up) of torch's own layers: an expert of DeepSpeed's, and the dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


def layer_over(dispatcher: Dispatcher, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    """Ours, with this rank's experts alone and a dispatcher around them."""
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, RouterPolicy(top_k=TOP_K)).to(dtype)
    experts, place = layer.experts, dispatcher.ep
    assert isinstance(experts, Experts)
    for stack in experts.parameters():
        stack.data = stack.data.chunk(place.size)[place.index].clone()
    experts.forward = partial(dispatcher, compute=experts.compute)  # type: ignore[method-assign]
    return layer


def tokens_and_router(count: int, load: float, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens [count, WIDTH] of this rank, and a router that sends ``load`` times the mean to expert 0; 0: as drawn."""
    router = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(0)) * WIDTH**-0.5
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(rank + 1))
    x[:, 0] = 1.0
    router[:, 0] = 0.0
    router /= router.norm(dim=1, keepdim=True)  # else experts with longer rows are chosen more often
    low, high = 0.0, 20.0
    while load and high - low > 1e-3:
        router[0, 0] = (low + high) / 2
        share = float(((x @ router.T).topk(TOP_K).indices == 0).any(1).float().mean())
        low, high = (
            (low, float(router[0, 0])) if share > load * TOP_K / EXPERTS else (float(router[0, 0]), high)
        )
    return x, router


def theirs(router: Tensor, ranks: int, dtype: torch.dtype) -> Contender:
    """DeepSpeed's layer without drops, second choice not drawn."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.moe.layer import MoE

    import deepspeed

    deepspeed.init_distributed("gloo")
    layer = MoE(
        WIDTH, Mlp(), EXPERTS, ep_size=ranks, k=TOP_K, drop_tokens=False, top2_2nd_expert_sampling=False
    )
    layer.set_deepspeed_parallelism()
    layer.deepspeed_moe.experts.to(dtype)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(router)
    return layer, lambda x: layer(x[None])[0][0]


def speed(rank: int, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each contender's rounds."""
    dtype = getattr(torch, options.dtype)
    dispatcher = dispatcher_of(world, None)
    x, router = tokens_and_router(options.tokens, options.load, rank)
    x = x.to(dtype)
    layer, dense = layer_over(dispatcher, dtype), Mlp().to(dtype)
    with torch.no_grad():
        layer.router.weight.copy_(router)
    repeated = x.repeat(TOP_K, 1).requires_grad_()
    contenders: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]] = {
        "ours": (layer, lambda x: layer(x[None])[0], x.clone().requires_grad_()),
        "dense": (dense, dense, repeated),
    }
    if options.deepspeed:
        contenders["deepspeed"] = (*theirs(router, world.size, dtype), x.clone().requires_grad_())
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 2):
        for name, (module, call, given) in contenders.items():
            module.zero_grad(set_to_none=True)
            given.grad = None
            grad = torch.ones_like(given)
            world.barrier()
            start = time.perf_counter()
            call(given).backward(grad)
            world.barrier()
            if turn > 1:
                found[name].append(time.perf_counter() - start)
    chosen = F.linear(x.float(), layer.router.weight.float()).topk(TOP_K).indices
    fullest = torch.bincount(chosen.flatten(), minlength=EXPERTS).max() * EXPERTS / chosen.numel()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratios = {
        f"ours / {name}": statistics.median(a / b for a, b in zip(found["ours"], found[name], strict=True))
        for name in found
        if name != "ours"
    }
    return {"load": float(fullest), "seconds": medians, "ratios": ratios}


def memory(rank: int, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """MiB of tensors that a pass held at most, with even routing or with all tokens to rank 0."""
    here = EXPERTS // world.size
    rows = int(options.tokens * TOP_K * 1.1) if options.rows else None
    dispatcher = dispatcher_of(world, rows)
    experts = layer_over(dispatcher).experts
    generator = torch.Generator().manual_seed(rank)
    among = here if options.all_to_one else EXPERTS
    index = torch.rand(options.tokens, among, generator=generator).argsort(1)[:, :TOP_K]
    weights = torch.rand(options.tokens, TOP_K, generator=generator).requires_grad_()
    x = torch.randn(options.tokens, WIDTH, generator=generator).requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for warm in (True, False):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=not warm) as found:
            experts(x, index, weights).backward(torch.ones_like(x))
    sizes = [event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return {"peak_mib": max(accumulate(sizes)) / 2**20}


def dispatcher_of(world: World, rows: int | None) -> Dispatcher:
    clock, policy, traffic = StepClock(300.0), CommPolicy(), Traffic()
    clock.steps_done = 1
    ranks = tuple(range(world.size))
    ep = world.group_among(ranks, "ep", policy, clock, traffic)
    etp = world.group(Mesh(dp_shard=world.size), "tp", policy, clock, traffic)
    return Dispatcher(ep, etp, EXPERTS, rows)


def rank_main(
    rank: int, work: Callable[..., dict[str, Any]], folder: str, options: argparse.Namespace
) -> None:
    """One rank; each writes what it measured."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", options.ranks), rank=rank, world_size=options.ranks
    )
    world = join(quiet=True)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(work(rank, world, options)))
    world.barrier()
    world.close()
    dist.destroy_process_group()


def run(work: Callable[..., dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (work, folder, options), nprocs=options.ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--ranks", type=int, default=0, help="2 for speed, 4 for memory")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--load", type=float, default=0.0, help="of the fullest expert, over the mean")
    parser.add_argument("--deepspeed", action="store_true")
    options = parser.parse_args()
    options.ranks = options.ranks or (2 if options.what == "speed" else 4)
    if options.what == "speed":
        print(json.dumps(run(speed, options)[0], indent=1))
        return
    peaks = {}
    for name, all_to_one, rows in (
        ("even", False, True),
        ("all to one", True, True),
        ("unbounded", True, False),
    ):
        options.all_to_one, options.rows = all_to_one, rows
        peaks[name] = max(each["peak_mib"] for each in run(memory, options))
        print(f"{name:12} {peaks[name]:7.0f} MiB  {peaks[name] / peaks['even']:.2f}")


if __name__ == "__main__":
    main()
