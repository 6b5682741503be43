"""The tensor-parallel pieces of one 7B-wide block, at the shapes of tp = 1, 2, 4 and 8, on one accelerator.

Each of the four matrices is our cut layer and a plain ``nn.Linear`` of the same shape, in turns: forward and backward,
TFLOP/s of both and their ratio. No rank is beside this one, so collectives are the identity: what is measured is
whether the cut layers keep the speed of the products that they are made of, and what the products lose by being
narrower. The last row of each tp is the whole block: norms, rotation, attention, feed-forward.

    python blocks_gpu.py                 bf16 on the accelerator
    python blocks_gpu.py --tiny          a toy block, also on a processor: does it run?

Shapes: D 4096, H 32 heads, F 11008; tokens [B, T]; FLOP 6·B·T·rows·columns for a product forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import beside  # noqa: F401
import torch
from machine import describe
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.rotary import angles
from shardwise.models.layers import Attention, RmsNorm, SwiGlu, TransformerBlock
from shardwise.parallel.tensor.layers import ColumnLinear, RowLinear
from shardwise.parallel.tensor.region import ParallelRegion


class Shape(NamedTuple):
    """A block and what it is given."""

    width: int = 4096
    heads: int = 32
    hidden: int = 11008
    batch: int = 2
    tokens: int = 2048

    def products(self, tp: int) -> dict[str, tuple[str, int, int]]:
        """Each matrix as (kind of cut, inputs, outputs) of one rank."""
        d, f = self.width, self.hidden
        return {
            "qkv": ("column", d, 3 * d // tp),
            "out": ("row", d // tp, d),
            "gate_up": ("column", d, 2 * f // tp),
            "down": ("row", f // tp, d),
        }

    def flops(self, tp: int) -> int:
        """Of the block, forward and backward: its products and half of the square of attention."""
        rows = self.batch * self.tokens
        matrices = sum(inputs * outputs for _, inputs, outputs in self.products(tp).values())
        return 6 * rows * matrices + 6 * rows * self.tokens * self.width // tp


TINY = Shape(width=64, heads=8, hidden=192, batch=1, tokens=32)


def alone() -> ParallelRegion:
    """A region whose only rank is this one."""
    return ParallelRegion(Group.alone("tp"), sequence=False)


def cut(linear: nn.Linear, kind: str, name: str) -> nn.Module:
    """Our layer around the same weight."""
    return (ColumnLinear if kind == "column" else RowLinear)(linear, name, alone())


def block_of(shape: Shape, tp: int, *, ours: bool) -> nn.Module:
    """One rank's share of the block, its matrices ours or plain."""
    heads = shape.heads // tp
    size = shape.width // shape.heads
    mix = Attention(shape.width, heads, heads, size, False, 0.0, causal_attention)
    mlp = SwiGlu(shape.width, shape.hidden // tp, 0.0)
    if ours:
        mix.qkv, mix.out = cut(mix.qkv, "column", "qkv"), cut(mix.out, "row", "out")  # type: ignore[assignment]
        mlp.gate_up, mlp.down = cut(mlp.gate_up, "column", "gate_up"), cut(mlp.down, "row", "down")  # type: ignore[assignment]
    return TransformerBlock(RmsNorm(shape.width, eps=1e-5), mix, RmsNorm(shape.width, eps=1e-5), mlp)


def both_ways(module: nn.Module, x: Tensor, *rest: Any) -> Callable[[], None]:
    """Forward and backward of one call."""
    grad = torch.ones_like(module(x, *rest))

    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x, *rest).backward(grad)

    return run


def seconds(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Of one call, over several in a row: the host runs ahead as it does in training."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - begin) / repeats


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def compare(
    ours: Callable[[], None], plain: Callable[[], None], flops: int, rounds: int, repeats: int, device: Any
) -> dict[str, float]:
    """TFLOP/s of both, medians of rounds in which they take turns."""
    for run in (ours, plain):
        seconds(run, repeats, device)
    pairs = [(seconds(ours, repeats, device), seconds(plain, repeats, device)) for _ in range(rounds)]
    ours_s, plain_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "ours_tflops": flops / ours_s / 1e12,
        "plain_tflops": flops / plain_s / 1e12,
        "ours_over_plain": statistics.median(a / b for a, b in pairs),
    }


def measure(
    shape: Shape, tp: int, dtype: torch.dtype, device: torch.device, rounds: int, repeats: int
) -> list[dict[str, Any]]:
    """Rows of one tp."""
    out: list[dict[str, Any]] = []

    def row(name: str, ours: nn.Module, plain: nn.Module, inputs: int, flops: int, *rest: Any) -> None:
        x = torch.randn(shape.batch, shape.tokens, inputs, device=device, dtype=dtype, requires_grad=True)
        runs = [both_ways(module.to(device=device, dtype=dtype), x, *rest) for module in (ours, plain)]
        out.append({"tp": tp, "piece": name} | compare(*runs, flops, rounds, repeats, device))

    for name, (kind, inputs, outputs) in shape.products(tp).items():
        plain = nn.Linear(inputs, outputs, bias=False)
        work = 6 * shape.batch * shape.tokens * inputs * outputs
        row(name, cut(nn.Linear(inputs, outputs, bias=False), kind, name), plain, inputs, work)
    at = angles(0, shape.tokens, shape.width // shape.heads, 10_000.0, device)
    ours, plain = (block_of(shape, tp, ours=which) for which in (True, False))
    row("block", ours, plain, shape.width, shape.flops(tp), at)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a toy block")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in which ours and plain take turns")
    parser.add_argument("--repeats", type=int, default=10, help="calls per round")
    parser.add_argument("--out", type=Path, help="where JSON goes besides the table")
    arguments = parser.parse_args()
    found = torch.accelerator.current_accelerator()
    if found is None and not arguments.tiny:
        raise SystemExit("blocks_gpu.py: no accelerator here; --tiny runs a toy block on the processor")
    device = found or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = [
        row
        for tp in (1, 2, 4, 8)
        for row in measure(
            TINY if arguments.tiny else Shape(), tp, dtype, device, arguments.rounds, arguments.repeats
        )
    ]
    print("| tp | piece | ours, TFLOP/s | plain, TFLOP/s | time of ours / plain |\n|---|---|---|---|---|")
    for row in rows:
        rates = f"{row['ours_tflops']:.4g} | {row['plain_tflops']:.4g} | {row['ours_over_plain']:.3f}"
        print(f"| {row['tp']} | {row['piece']} | {rates} |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(describe() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
