"""A small language model, written down as data: no module is made."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch

from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.compose.spec import (
    AxisPlacement,
    BufferSpec,
    ModelSpec,
    ParameterSpec,
    StageBlocks,
    positions_by_order,
)
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Partial, Replicate, Shard, ShardBlock
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.precision.policy import PrecisionPolicy
from shardwise.tiers.offload import OffloadPolicy

WIDTH, HEADS, KV_HEADS, VOCABULARY = 16, 4, 2, 32
_ALONE, _ADDEND = AxisPlacement(Replicate(), Replicate()), AxisPlacement(Replicate(), Partial())


def _cut(dim: int, *blocks: ShardBlock) -> AxisPlacement:
    return AxisPlacement(Shard(dim, blocks), Shard(dim, blocks))


_HEAD = WIDTH // HEADS
BLOCK = {
    "norm.weight": ((WIDTH,), _ADDEND),
    "qkv.weight": (
        ((HEADS + 2 * KV_HEADS) * _HEAD, WIDTH),
        _cut(0, ShardBlock(WIDTH, HEADS), *2 * [ShardBlock(KV_HEADS * _HEAD, KV_HEADS)]),
    ),
    "out.weight": ((WIDTH, WIDTH), _cut(1)),
    "out.bias": ((WIDTH,), _ADDEND),
}
"""Shape and place on "tp" of a block's parameters."""
HIDDEN = 8
GATE_UP = (ShardBlock(HIDDEN, HIDDEN), ShardBlock(HIDDEN, HIDDEN))


def experts(count: int) -> dict[str, tuple[tuple[int, ...], dict[str, AxisPlacement]]]:
    """Shapes and places of a stack's parameters."""
    return {
        "experts.gate_up": ((count, 2 * HIDDEN, WIDTH), {"ep": _cut(0), "etp": _cut(1, *GATE_UP)}),
        "experts.down": ((count, WIDTH, HIDDEN), {"ep": _cut(0), "etp": _cut(2)}),
        "experts.bias": ((count, WIDTH), {"ep": _cut(0), "etp": _ADDEND}),
    }


def model(
    blocks: int = 4,
    tied: bool = False,
    frozen: str = "",
    tables: Mapping[str, tuple[str, ...]] | None = None,
    stack: int = 0,
) -> ModelSpec:
    """``stack``: how many experts each block has, in a Unit of their own; ``tied``: the head is the embedding;
    ``frozen``: the parameter that does not train; ``tables``: all names of each collection of embedding tables, outside
    of blocks in front of them."""
    rows = {"embedding.weight": ((VOCABULARY, WIDTH), _cut(0))}
    rows |= {f"blocks.{i}.{name}": row for i in range(blocks) for name, row in BLOCK.items()}
    stacks = {
        f"blocks.{i}.{name}": row for i in range(blocks) for name, row in experts(stack).items() if stack
    }
    rows |= {name: (shape, _ALONE) for name, (shape, _) in stacks.items()}
    rows |= {"norm.weight": ((WIDTH,), _ADDEND)}
    head = "head.weight"
    rows |= {} if tied else {head: ((VOCABULARY, WIDTH), _cut(0))}
    canonical = {name: name for name in rows} | ({head: "embedding.weight"} if tied else {})
    aliases = {"embedding.weight": (head,)} if tied else {}
    parameters = {
        name: ParameterSpec(name, shape, torch.float32, name != frozen, aliases.get(name, ()))
        for name, (shape, _) in rows.items()
    }
    names = tuple(f"blocks.{i}" for i in range(blocks))
    buffers = {"mask": BufferSpec((8, 8), torch.bool, False)}
    collections = list(chain(*(tables or {}).values()))
    positions = positions_by_order(canonical, names) | positions_by_order(collections, names) | {"mask": 0}
    weight = sum(torch.Size(shape).numel() for shape, _ in BLOCK.values())
    dealt = StageBlocks(names, (weight,) * blocks, VOCABULARY * WIDTH, VOCABULARY * WIDTH, positions)
    places = {name: {"tp": place} for name, (_, place) in rows.items()}
    places |= {name: place for name, (_, place) in stacks.items()}
    units = tuple(unit for name in names for unit in (name, f"{name}.experts")[: 1 + bool(stack)])
    return ModelSpec(
        parameters,
        buffers,
        canonical,
        tuple(chain(canonical)),
        units,
        dealt,
        places,
        tables or {},
        products=frozenset(
            name
            for name, (shape, _) in rows.items()
            if len(shape) > 1 and name not in (frozen, "embedding.weight") and not name.endswith("bias")
        ),
    )


def plan(
    mesh: Mesh,
    stage: int = 0,
    microbatches: int = 2,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    spec: ModelSpec | None = None,
    updates: Sequence[UpdateRule] = (UpdateRule(("exp_avg",)),),
    group_of: Callable[[str], int] = lambda name: 0,
    on_disk: float = 0.0,
    weights_too: bool = False,
    delayed: bool = False,
    saves: bool = False,
    in_fp8: Sequence[str] = (),
    **zero: object,
) -> Plan:
    """Of the model above; ``on_disk``: share of Units whose state is there, and with ``weights_too`` their weights;
    ``delayed``: with updates that count one step late; ``saves``: what blocks save waits in host memory; ``in_fp8``:
    layers whose weights are gathered in fp8; ``zero``: further keys of ZeroPolicy."""
    disk = {"optimizer": "disk", "disk_path": "/", "fraction": on_disk} if on_disk else {}
    disk |= {"parameters": "disk"} if weights_too else {}
    disk |= {"step": "delayed"} if delayed else {}
    disk |= {"activations": "host"} if saves else {}
    described = spec or model()
    policies = PlanPolicies(
        ZeroPolicy.model_validate({"stage": stage, "prefetch_bytes": 0, **zero}),
        PipelinePolicy.model_validate({"schedule": schedule, "virtual_stages": virtual_stages}),
        PrecisionPolicy(linear="fp8" if in_fp8 else None).with_fp8(in_fp8, gathers=bool(in_fp8)),
        group_of,
        updates,
        microbatches,
        offload=OffloadPolicy.model_validate(disk),
        blocks=described.units,
    )
    return make_plan(described, mesh, policies)
