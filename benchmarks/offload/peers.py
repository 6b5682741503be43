"""A whole step of one rank with state on the host, beside rivals that offload.

    python benchmarks/offload/peers.py [--deepspeed PYTHON] [--precision bf16] [--blocks 24] [--rounds 9]

Every contender is a process of its own with one thread; one at a time does one step, in turns, and figures are medians
of the rounds' ratios. All train the same stack of residual blocks (24 are 201 M parameters) with AdamW on 64 rows of
numbers; with ``bf16`` the blocks compute in it, beside masters and moments in fp32.

    host         shardwise, ``offload.optimizer: host``: on a CPU that is where state lies anyway
    fsdp2        torch's fully_shard by block with CPUOffloadPolicy and its fused AdamW
    deepspeed    stage 2 with offload_optimizer to the CPU and DeepSpeedCPUAdam
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402

WIDTH, HIDDEN, ROWS, LR = 1024, 4096, 64, 1e-4
Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Two linear layers beside a way round them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack(blocks: int) -> nn.Sequential:
    """The model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of a batch."""
    return (model(x).float() - 1).square().mean()


def ours(model: nn.Module, precision: str) -> Step:
    """A step of shardwise."""
    import shardwise

    config: dict[str, Any] = {
        "optimizer": {"type": "adamw", "lr": LR, "weight_decay": 0.0},
        "precision": precision,
        "offload": {"optimizer": "host"},
    }
    engine = shardwise.initialize(model, config, loss=loss_of)
    return lambda x: torch.tensor(engine.train_step([x]).loss)


def fsdp2(model: nn.Module, precision: str) -> Step:
    """A step of torch's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kind: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if precision == "bf16":
        kind["mp_policy"] = mixed
    for block in model.children():
        fully_shard(block, **kind)
    fully_shard(model, **kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True, weight_decay=0.0)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(model: nn.Module, precision: str) -> Step:
    """A step of the package's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    import deepspeed as package  # type: ignore[import-not-found]

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=0.0)
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(engine, x.bfloat16() if precision == "bf16" else x)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


CONTENDERS = {"host": ours, "fsdp2": fsdp2, "deepspeed": deepspeed}


def work(name: str, blocks: int, precision: str) -> None:
    """A contender: a step for every line that it is sent, told in seconds."""
    torch.set_num_threads(1)
    step = CONTENDERS[name](stack(blocks), precision)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    print("RESULT ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        loss = float(step(x))
        print("RESULT", json.dumps([time.perf_counter() - begun, loss]), flush=True)
    os._exit(0)  # what a rival says at its end is not ours to wait for


def answer(process: "subprocess.Popen[str]") -> str | None:
    """The next one; None where the process is gone."""
    assert process.stdout is not None
    return next((line[7:].strip() for line in process.stdout if line.startswith("RESULT ")), None)


def begun(name: str, place: int, asked: argparse.Namespace) -> "subprocess.Popen[str]":
    """A contender's process."""
    python = asked.deepspeed if name == "deepspeed" else sys.executable
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if CONTENDERS[name] is not ours:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(29610 + place), "DS_ACCELERATOR": "cpu"}
    options = ["--precision", asked.precision, "--blocks", str(asked.blocks), "--worker", name]
    return subprocess.Popen(
        [python, __file__, *options],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turns(asked: argparse.Namespace) -> dict[str, list[list[float]]]:
    """(seconds, loss) by contender and round; empty where one does not run here. The first two rounds warm up."""
    names = [name for name in CONTENDERS if name != "deepspeed" or asked.deepspeed]
    running = {name: begun(name, place, asked) for place, name in enumerate(names)}
    found: dict[str, list[list[float]]] = {name: [] for name in running}
    running = {name: process for name, process in running.items() if answer(process) is not None}
    for number in range(asked.rounds + 2):
        for name in list(running)[:: 1 if number % 2 else -1]:
            pipe = running[name].stdin
            assert pipe is not None
            pipe.write("\n")
            pipe.flush()
            told = answer(running[name])
            if told is None:
                del running[name]
            elif number > 1:
                found[name].append(json.loads(told))
    for process in running.values():
        process.communicate()
    return found


def render(found: dict[str, list[list[float]]], asked: argparse.Namespace) -> str:
    """What stands in the README."""
    here, parameters = describe(), sum(p.numel() for p in stack(asked.blocks).parameters())
    command = f"python benchmarks/offload/peers.py --precision {asked.precision} --rounds {asked.rounds}"
    command += " --deepspeed PYTHON" if asked.deepspeed else ""
    lines = [
        f"`{command}`, {here['date']}, {here['machine']}, torch {here['versions']['torch']}, "
        f"{parameters / 1e6:.0f} M parameters.",
        "",
        f"| {asked.precision} | step, s | host / this (quartiles) | loss of the last round |",
        "|---|---|---|---|",
    ]
    for name, rounds in found.items():
        if len(rounds) < asked.rounds:
            lines.append(f"| {name} | does not run here | | |")
            continue
        seconds = statistics.median(each[0] for each in rounds)
        ratios = [ours[0] / other[0] for ours, other in zip(found["host"], rounds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {name} | {seconds:.2f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {rounds[-1][1]:.6f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed", help="the python of an environment with deepspeed")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.blocks, asked.precision)
        return
    print(render(turns(asked), asked))


if __name__ == "__main__":
    main()
