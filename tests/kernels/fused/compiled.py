"""Compiles every kernel of Triton's, as its callers launch it, for a device that is not there; nothing runs.

    python -m tests.kernels.fused.compiled cuda 90          one line a kernel, and the bytes of its machine code

The interpreter takes anything that numpy can do; a compiler also refuses dtypes that do not fit and globals that are
no constants. tests/kernels/test_fused.py runs it.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from shardwise.kernels import choice
from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.dropout import EqualPart, MaskKey, keyed_dropout
from shardwise.kernels.expert_choice import chosen_experts, expert_weights, load_counts, route_counts
from shardwise.kernels.expert_rows import RowPlaces, message_places, pair_gradients, pairs_by_expert
from shardwise.kernels.gated import gated
from shardwise.kernels.rms_norm import rms_norm, rms_norm_of_sum
from shardwise.kernels.rotary import angles, rotate, split_heads
from shardwise.kernels.tables.pooling import merge, pool
from shardwise.kernels.tables.row_optimizers import update
from shardwise.kernels.tables.row_rules import Adagrad, Adam, Ftrl, Momentum, RowwiseAdagrad, Sgd
from shardwise.kernels.uniform import uniform_rows


def dropout(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 40, dtype=dtype, requires_grad=True)
    keyed_dropout(x, 0.5, MaskKey(1 << 63, 1, 4), EqualPart(1, 2, 1)).sum().backward()


def norm(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 40, dtype=dtype, requires_grad=True)
    weight = torch.zeros(40, dtype=dtype, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    total, out = rms_norm_of_sum(x, x, weight, 1e-5)
    (total + out).sum().backward()


def rotary(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 5, 16, dtype=dtype, requires_grad=True)
    at = angles(0, 5, 16, 1e4, x.device)
    rotate(x, at).sum().backward()
    product = torch.zeros(2, 5, 4 * 16, dtype=dtype, requires_grad=True)
    torch.stack(split_heads(product, (2, 1, 1), 16, at)[1:]).sum().backward()


def gate(dtype: torch.dtype) -> None:
    gated(torch.zeros(3, 40, dtype=dtype, requires_grad=True)).sum().backward()


def loss(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 40, dtype=dtype, requires_grad=True)
    cross_entropy(logits, torch.zeros(3, dtype=torch.int64)).backward()


def adam(dtype: torch.dtype) -> None:
    w, m, v = torch.zeros(3, 4)
    for decoupled in (True, False):
        rule = AdamRule(0.1, 0.9, 0.99, 1e-8, 0.1, decoupled)
        adam_step(
            rule, w, torch.zeros(4, dtype=dtype), m, v, torch.zeros(()), 2.0, torch.zeros(4, dtype=dtype)
        )


def tables(dtype: torch.dtype) -> None:
    source, index, offsets = (
        torch.zeros(4, 5, dtype=dtype),
        torch.zeros(6, dtype=torch.int64),
        torch.tensor([0, 6]),
    )
    for kind, weights in (("sum", None), ("mean", None), ("max", None), ("sum", torch.zeros(6))):
        places = pool(source, index, offsets, kind, weights).places
        merge(source[:1], index, offsets, 4, kind, weights, places)
    merge(source, index[:4], None, 4)
    merge(source.expand(300, 4, 5)[:, 0], torch.zeros(300, dtype=torch.int64), None, 4)
    for rule in (
        Sgd(),
        Momentum(),
        Momentum(nesterov=True),
        Adagrad(),
        RowwiseAdagrad(),
        Adam(),
        Adam(exact=True),
    ):
        update(rule, torch.zeros(4, 5 + rule.columns(5)), index[:2], torch.zeros(2, 5), lr=0.1, step=1)
    update(Ftrl(), torch.zeros(4, 15), index[:2], torch.zeros(2, 5), lr=0.1, step=1)


def uniform(dtype: torch.dtype) -> None:
    uniform_rows(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 5, 1 << 63, 1, 2)


def choices(dtype: torch.dtype) -> None:
    for is_sigmoid, bias in ((False, None), (True, torch.zeros(12))):
        logits = torch.zeros(3, 12, requires_grad=True)
        index = chosen_experts(logits.detach(), bias, 2, is_sigmoid) % 12
        weights, scores = expert_weights(logits, index, is_sigmoid, not is_sigmoid, 1.0)
        (weights.sum() + (scores.sum() if is_sigmoid else 0)).backward()
        load_counts(index, index, scores.detach(), is_sigmoid, 4)
        route_counts(index, 12, (2, 4), 1)


def rows(dtype: torch.dtype) -> None:
    index, values, weights = (
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(6, 40, dtype=dtype),
        torch.zeros(3, 2),
    )
    for is_padded in (False, True):
        message_places(index, 0, 8, 2, 6, is_padded)
    for chosen in (index, index.int()):
        pairs_by_expert(chosen, 0, 8, 6, 0)
    places = torch.zeros(3, 2, dtype=torch.int64)
    for held in (None, weights):
        RowPlaces(places, 6).sum(values, held)
    slots = torch.zeros(6, dtype=torch.int64)
    pair_gradients(torch.zeros(3, 40, dtype=dtype), values, weights, slots, slots)


CALLS: list[Callable[[torch.dtype], None]] = [
    *(dropout, norm, rotary, gate, loss, adam, tables, uniform, choices, rows)
]


def compile_all(target: GPUTarget) -> dict[str, int]:
    """Bytes of machine code by kernel."""
    absent = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    driver.set_active(absent)
    sizes: dict[str, int] = {}
    run = JITFunction.run

    def compiled(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        name = f"{self.module.rpartition('.')[2]}.{self.__name__}"
        sizes[name] = max(sizes.get(name, 0), len(kernel.kernel))

    JITFunction.run = compiled
    choice.DEVICES = frozenset({"cpu"})
    for call in CALLS:
        call(torch.bfloat16)
    return sizes


if __name__ == "__main__":
    kind, arch = sys.argv[1:]
    found = compile_all(GPUTarget(kind, int(arch) if kind == "cuda" else arch, 32 if kind == "cuda" else 64))
    assert triton.__version__ and found
    for name, size in found.items():
        print(name, size)
