"""Each kernel of Triton's beside its plain form, on a device: forward and backward, milliseconds and GB/s.

    python benchmarks/kernels/run.py                   all, at sizes of a 1 B model; writes the table of README.md
    python benchmarks/kernels/run.py --only dropout    one, printed

The forms take turns, round by round; the figure is the median of the rounds. Before it is timed, each kernel's results
are compared with the plain form's on the same device, and a second run's bits with the first's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import choice, philox
from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.dropout import MaskKey, keyed_dropout
from shardwise.kernels.gated import gated
from shardwise.kernels.rms_norm import rms_norm
from shardwise.kernels.rotary import angles, rotate
from shardwise.kernels.tables.pooling import merge, pool
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_rules import Adam

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402

ROUNDS, CALLS = 15, 10
B, T, D, HEADS, F, V = 4, 2048, 2048, 16, 5632, 32000
ROWS, WIDTH, PLACES = 1 << 20, 64, 106_496


class Case(NamedTuple):
    """One kernel at one size."""

    run: Callable[[], Sequence[Tensor]]
    """The form that ``choice`` says; forward and backward."""
    moved_bytes: int
    """Least traffic of memory that the work needs."""


def both(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Sequence[Tensor]]:
    held = [x.requires_grad_() for x in inputs]
    pull = torch.randn_like(function(*held))

    def run() -> Sequence[Tensor]:
        out = function(*held)
        return out.detach(), *torch.autograd.grad(out, held, pull)

    return run


def cases(device: torch.device) -> dict[str, Callable[[], Case]]:
    """Made when their turn comes: together they would not fit a small device."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def dropout() -> Case:
        draw = MaskKey(philox.key_of(0, "x"), 1, 0)
        return Case(both(lambda x: keyed_dropout(x, 0.1, draw), random(B, T, D)), 8 * B * T * D)

    def norm() -> Case:
        return Case(both(lambda x, w: rms_norm(x, w, 1e-5), random(B, T, D), random(D)), 10 * B * T * D)

    def rotary() -> Case:
        at = angles(0, T, D // HEADS, 1e4, device)
        x = random(B, T, HEADS, D // HEADS).transpose(1, 2)
        return Case(both(lambda x: rotate(x, at), x), 8 * B * T * D)

    def gate() -> Case:
        return Case(both(gated, random(B, T, 2 * F)), 16 * B * T * F)

    def loss() -> Case:
        targets = torch.randint(0, V, (T,), device=device)
        return Case(both(lambda z: cross_entropy(z, targets), random(T, V)), 6 * T * V)

    def adam() -> Case:
        rule, elements = AdamRule(1e-3, 0.9, 0.95, 1e-8, 0.1, True), 1 << 26
        w, m, v = (random(elements, dtype=torch.float32).abs_() for _ in range(3))
        grad, cast, step = random(elements), random(elements), torch.zeros((), device=device)

        def run() -> Sequence[Tensor]:
            adam_step(rule, w, grad, m, v, step, 2.0, cast)
            return ()

        return Case(run, 28 * elements)

    def bags() -> tuple[Tensor, Tensor]:
        return torch.randint(0, ROWS, (PLACES,), device=device), torch.arange(0, PLACES + 1, 4, device=device)

    def pooling() -> Case:
        index, offsets = bags()
        source = random(ROWS, WIDTH, dtype=torch.float32)
        return Case(lambda: [pool(source, index, offsets).values], 5 * PLACES * WIDTH)

    def merging() -> Case:
        index, offsets = bags()
        rows, inverse = index.unique(return_inverse=True)
        grad = random(len(offsets) - 1, WIDTH, dtype=torch.float32)
        return Case(lambda: [merge(grad, inverse, offsets, len(rows))], 8 * PLACES * WIDTH)

    def stepping() -> Case:
        rule, rows = Adam(), torch.randperm(ROWS, device=device)[:PLACES]
        slab, grads = (
            random(ROWS, 3 * WIDTH, dtype=torch.float32).abs_(),
            random(PLACES, WIDTH, dtype=torch.float32),
        )

        def run() -> Sequence[Tensor]:
            update(rule, slab, rows, grads, lr=1e-3, step=3)
            return ()

        return Case(run, 28 * PLACES * WIDTH)

    return {
        "dropout": dropout, "rms_norm": norm, "rotary": rotary, "gated": gate, "cross_entropy": loss, "adam": adam,
        "pool": pooling, "merge": merging, "update of rows": stepping,
    }  # fmt: skip


def milliseconds(run: Callable[[], object]) -> float:
    """Of one call, in a row of ``CALLS``."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.accelerator.synchronize()
    return (time.perf_counter() - began) * 1e3 / CALLS


def measured(case: Case) -> tuple[float, float, float, bool]:
    """(plain, fused) milliseconds, the largest relative distance of results, whether a second run had the bits."""
    served = choice.DEVICES
    choice.DEVICES = frozenset()
    plain = case.run()
    choice.DEVICES = served
    first, second = case.run(), case.run()
    distance = max(
        [
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(first, plain, strict=True)
        ]
        or [0.0]
    )
    alike = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    times: dict[str, list[float]] = {"plain": [], "fused": []}
    for _ in range(ROUNDS):
        for form, devices in (("plain", frozenset()), ("fused", served)):
            choice.DEVICES = devices
            times[form].append(milliseconds(case.run))
    choice.DEVICES = served
    forms = {form: statistics.median(each) for form, each in times.items()}
    return forms["plain"], forms["fused"], distance, alike


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one kernel by name, printed and not written")
    only = parser.parse_args().only
    if (
        not torch.accelerator.is_available()
        or torch.accelerator.current_accelerator().type not in choice.DEVICES
    ):
        sys.exit(
            "no device here that the kernels serve, or Triton is missing: pip install shardwise[kernels]"
        )
    device = torch.accelerator.current_accelerator()
    lines = [
        "| kernel | plain form, ms | one kernel, ms | GB/s | results apart, relative | same bits twice |",
        "|---|---|---|---|---|---|",
    ]
    for name, make in cases(device).items():
        if only in (None, name):
            case = make()
            plain, fused, distance, alike = measured(case)
            speed = case.moved_bytes / fused / 1e6
            lines.append(
                f"| {name} | {plain:.3f} | {fused:.3f} | {speed:.0f} | {distance:.1e} | {'yes' if alike else 'NO'} |"
            )
            print(lines[-1], flush=True)
    if only is None:
        at = describe()
        said = f"{at['date']}, {at['machine']}, commit {at['commit']}, torch {at['versions']['torch']}."
        page = HERE / "README.md"
        page.write_text(insert(page.read_text(), "\n".join([said, "", *lines])))


if __name__ == "__main__":
    main()
