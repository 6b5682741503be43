"""Kernels are launched once while an engine is built: every kernel of the first step, with its dtypes and widths.

The pretended device stands in for a device that Triton serves: it shows which operations are launched and with what.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.comm.world import World, join
from shardwise.engine.construction.warm_up import compile_kernels
from shardwise.kernels import choice
from shardwise.models import Gpt, GptPolicy
from tests.accelerator.mirror import mirror_world
from tests.accelerator.pretend import Bench, register
from tests.ranks import RankPool

LLAMA = {"family": "llama", "kv_heads": 2}
GPT2 = {"family": "gpt2", "dropout": 0.1}
EXPERTS = {"experts": {"count": 4, "shared": 1, "router": {"score": "sigmoid", "balance": "bias"}}}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "llama, bf16": (LLAMA, 1, {"precision": "bf16"}),
    "llama, fp32": (LLAMA, 1, {}),
    "llama, zero 3, bf16": (LLAMA, 4, {"precision": "bf16", "zero": {"stage": 3}}),
    "llama, tp 2, bf16": (LLAMA, 2, {"precision": "bf16", "mesh": {"tp": 2}}),
    "llama, plain adam": (LLAMA, 1, {"precision": "bf16", "optimizer": {"type": "adam", "lr": 0.1}}),
    "experts, bf16": (LLAMA | EXPERTS, 1, {"precision": "bf16"}),
    "experts, ep 2, bf16": (LLAMA | EXPERTS, 2, {"precision": "bf16", "mesh": {"ep": 2}}),
    "gpt2, bf16": (GPT2, 1, {"precision": "bf16"}),
    "gpt2, fp32": (GPT2, 1, {}),
    "sgd": (GPT2, 1, {"optimizer": {"type": "sgd", "lr": 0.1}}),
}

Launch = tuple[Any, ...]


def _described(value: Any, has_width: bool) -> Any:
    """Return what a kernel is compiled for; the kernel of dropout is the same for all widths."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, bool) else None
    return str(value.dtype), *(value.shape[-1:] if has_width and value.dim() > 1 else ())


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Yield the launches of our kernels: name, dtype and width of each tensor, flags."""
    found: list[Launch] = []
    inner = Bench.__torch_dispatch__

    def watched(self: Bench, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("shardwise::"):
            values = [_described(each, has_width=name != "shardwise::dropped") for each in tree_leaves(args)]
            found.append((name.partition("::")[2], *values))
        return inner(self, func, types, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "__torch_dispatch__", watched)
        yield found


def built_and_stepped(_: Any, name: str) -> tuple[set[Launch], set[Launch], int]:
    """Return the launches of the build, those of the first step, and the operations of a build without kernels."""
    changes, ranks, config = CASES[name]
    device = register()
    policy = {"layers": 2, "width": 32, "heads": 4, "hidden": 48, "context": 16, "vocab": 50, **changes}
    batch = torch.randint(0, 50, (2, 2, 16), generator=torch.Generator().manual_seed(0))

    def build() -> Any:
        torch.manual_seed(0)
        world = mirror_world(ranks, device)
        return shardwise.initialize(
            Gpt(GptPolicy.model_validate(policy)), {**config, "check_first_step": "off"}, world=world
        )

    with Bench(), launches() as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "DEVICES", frozenset({device.type}))
            patch.setattr(choice, "has_grouped_mm", lambda device: device.type != "cpu")
            engine = build()
            warm = set(found)
            found.clear()
            engine.train_step([(batch[0], batch[1])])
            stepped = set(found)
            engine.close()
            found.clear()
        build().close()
        return warm, stepped, len(found)


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_launches_what_the_build_has_launched(device_process: RankPool, name: str) -> None:
    [(warm, stepped, without)] = device_process.run(built_and_stepped, name)
    assert stepped, "the step launches kernels"
    assert stepped <= warm, f"compiled in the first step: {stepped - warm}"
    assert without == 0, "a device without the kernels launches nothing"


def test_nothing_is_launched_on_a_cpu() -> None:
    assert choice.DEVICES.isdisjoint({"cpu"})
    engine = shardwise.initialize(torch.nn.Linear(2, 2), {}, world=world())
    parts = engine._parts
    assert compile_kernels([parts.model], parts.trained, [torch.float32], torch.device("cpu")) == 0
    engine.close()


def world() -> World:
    """Return the World of one process."""
    return join(quiet=True)
