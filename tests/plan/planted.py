"""Plans in which faults are planted."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from tests.plan.described import model, plan

from shardwise.compose.spec import BufferSpec
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Placement, Replicate, Shard
from shardwise.plan.plan import Plan
from shardwise.plan.registry import Registry, UpdateRule

MICROBATCHES = 2


@cache
def good(name: str) -> Plan:
    made: dict[str, Callable[[], Plan]] = {
        "zero0": lambda: plan(Mesh(dp_shard=2)),
        "zero1": lambda: plan(Mesh(dp_shard=2), 1),
        "zero2": lambda: plan(Mesh(dp_shard=2), 2),
        "zero3": lambda: plan(Mesh(dp_shard=2), 3),
        "hsdp": lambda: plan(Mesh(dp_replicate=2, dp_shard=2), 3, prefetch_bytes=1),
        "frozen": lambda: plan(Mesh(dp_shard=2), 3, spec=frozen_block()),
        "tp": lambda: plan(Mesh(dp_shard=2, tp=4), 1),
        "pp": lambda: plan(Mesh(pp=2, dp_shard=2), 3),
        "tied": lambda: plan(Mesh(pp=2, dp_shard=2), 2, spec=model(tied=True)),
        "interleaved": lambda: plan(Mesh(pp=2, dp_shard=2), 3, 2, "interleaved_1f1b", 2),
        "step": lambda: plan(
            Mesh(pp=2, dp_shard=2), 3, 2, "interleaved_1f1b", 2, reshard_after_forward=False
        ),
        "norms": lambda: plan(Mesh(pp=2, dp_shard=2), 1, updates=[UpdateRule(("exp_avg",), "norm")]),
        "matrices": lambda: plan(Mesh(dp_shard=2, tp=2), 1, updates=MIXED, group_of=matrix_or_rest),
        "routers": lambda: plan(Mesh(pp=2, dp_shard=2), 1, spec=with_a_router()),
        "fp8": lambda: plan(Mesh(pp=2, dp_shard=2), 3, in_fp8=[QKV.removesuffix(".weight")]),
        "disk": lambda: plan(Mesh(dp_shard=2), 1, on_disk=0.5),
        "leaving": lambda: plan(Mesh(), on_disk=1.0),
        "delayed": lambda: plan(Mesh(dp_shard=2), 1, on_disk=1.0, delayed=True),
        "weights on disk": lambda: plan(Mesh(dp_shard=2), 3, on_disk=0.5, weights_too=True, prefetch_bytes=1),
        "halves": lambda: plan(Mesh(pp=2, dp_shard=2), 2, schedule="zb_h1"),
        "saved": lambda: plan(Mesh(pp=2, dp_shard=2), 3, saves=True, prefetch_bytes=1),
        "tables": lambda: plan(Mesh(dp_shard=2), 1, spec=with_tables()),
        "tables tp": lambda: plan(Mesh(tp=2), 0, spec=with_tables()),
        "tables pp": lambda: plan(Mesh(pp=2, dp_shard=2), 3, spec=with_tables()),
    }
    return made[name]()


MIXED = (UpdateRule(("momentum_buffer",), "matrix"), UpdateRule(("exp_avg", "exp_avg_sq")))


def matrix_or_rest(name: str) -> int:
    """The matrices of blocks, and all else: Unit 0 has no matrix."""
    return 0 if name.startswith("blocks") and name.endswith(("qkv.weight", "out.weight")) else 1


def frozen_block() -> Any:
    whole = model()
    frozen = {
        name: each._replace(trained=not name.startswith("blocks.1."))
        for name, each in whole.parameters.items()
    }
    return replace(whole, parameters=frozen)


def with_a_router() -> Any:
    """The bias of a router in the last block, which the second stage holds."""
    whole, bias = model(), {"blocks.3.router.bias": BufferSpec((4,), torch.float32, True)}
    assert whole.blocks is not None
    blocks = whole.blocks._replace(positions={**whole.blocks.positions, **dict.fromkeys(bias, 3)})
    return replace(
        whole,
        buffers={**whole.buffers, **bias},
        blocks=blocks,
        shared_buffers=frozenset(bias),
        load_buffers=frozenset(bias),
    )


def with_tables() -> Any:
    """Collections in front of the blocks and in one: Units 5 and 6, with stages 3 of either."""
    return model(tables={"users": ("users",), "blocks.2.items": ("blocks.2.items",)})


def registered(whole: Plan, kind: str, name: str, **changes: Any) -> Plan:
    changed = Registry(whole.mesh)
    for info in whole.registry:
        is_meant = (info.kind, info.name) == (kind, name)
        changed.add(replace(info, **changes) if is_meant else info)
    return replace(whole, registry=changed)


QKV = "blocks.0.qkv.weight"

CUT, WHOLE, ADDEND = Shard(), Replicate(), Partial()


DP: dict[str, Placement] = {"dp_replicate": WHOLE, "dp_shard": WHOLE}


class WrongPlacement(NamedTuple):
    """An entry of a registry that contradicts the rest of its Plan."""

    plan: str
    """A Plan of ``good``."""
    kind: str
    tensor: str
    changes: dict[str, Any]
    """What is registered instead."""
    says: str
    """The error, a regular expression."""


WRONG_PLACEMENTS = [
    WrongPlacement(*row)
    for row in [
        (
            "zero3",
            "parameter",
            QKV,
            {"placement": DP},
            "weight is registered R on dp_shard, but its buffer is S",
        ),
        (
            "zero0",
            "parameter",
            QKV,
            {"placement": {"dp_shard": CUT}},
            "registered S on dp_shard, but its buffer is R",
        ),
        (
            "zero2",
            "gradient",
            QKV,
            {"placement": {"dp_shard": ADDEND}},
            "its grad is registered R on dp_replicate",
        ),
        (
            "zero1",
            "moment",
            QKV,
            {"placement": DP},
            "exp_avg is registered R on dp_shard, but its buffer is S",
        ),
        ("tp", "parameter", QKV, {"grad_placement": {"dp_shard": WHOLE}}, "different gradient placements"),
        (
            "tp",
            "parameter",
            QKV,
            {"placement": DP},
            r"its slot is \[12, 16\], but by the registry .* \[32, 16\]",
        ),
        (
            "tp",
            "parameter",
            "blocks.0.out.weight",
            {"placement": {"tp": Shard(0)}},
            r"holds \[4, 16\] of \[16, 16\]",
        ),
        ("pp", "parameter", QKV, {"stages": (1,)}, "the registry has it on stages"),
        ("tied", "parameter", QKV, {"stages": (0, 1)}, "tied to nothing"),
        ("zero0", "parameter", QKV, {"shape": (32, 15)}, "its slot is"),
        ("zero1", "master", QKV, {"shape": (16, 16)}, r"master is registered as .*\[16, 16\]"),
        ("zero1", "master", QKV, {"dtype": torch.bfloat16}, "master is registered as torch.bfloat16"),
        ("zero2", "gradient", QKV, {"shape": (16, 16)}, r"grad is registered as \[16, 16\]"),
        ("zero2", "gradient", QKV, {"dtype": torch.float64}, "grad is registered as torch.float64"),
        ("zero3", "moment", QKV, {"shape": (16, 16)}, r"exp_avg is registered as \[16, 16\]"),
        ("zero3", "moment", QKV, {"dtype": torch.float64}, "exp_avg is registered as torch.float64"),
        ("zero3", "moment", QKV, {"label": "other"}, "exp_avg|other"),
    ]
]
