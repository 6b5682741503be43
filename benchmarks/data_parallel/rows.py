"""The contenders as data: who runs at which ZeRO stage, and which dtypes it keeps. Needs no torch.

A row says for each dtype what its gradients are, so that the reader compares like with like:

    grad    dtype of the gradient that the optimizer is handed
    wire    dtype in which gradients travel between ranks
    master  whether the optimizer steps an fp32 copy of the weights (in fp32 the weights are their own)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Dtype = Literal["fp32", "bf16"]


class Facts(NamedTuple):
    """The dtypes a contender keeps."""

    grad: str
    wire: str
    master: bool


class Row(NamedTuple):
    """One contender."""

    name: str
    stage: int
    package: str
    """The package it needs besides torch; a row whose package is absent is skipped by name."""
    build: str
    """``module:function`` in this folder; called as ``function(row, setting)``."""
    facts: dict[str, Facts]
    options: dict[str, str] = {}

    @property
    def ours(self) -> bool:
        return self.package == "shardwise"


_FP32 = Facts("fp32", "fp32", True)
_PURE = Facts("bf16", "bf16", False)
_KEPT = Facts("fp32", "fp32", True)
_HALF = Facts("bf16", "bf16", True)
_BOTH_PURE = {"fp32": _FP32, "bf16": _PURE}
_BOTH_KEPT = {"fp32": _FP32, "bf16": _KEPT}


def _deepspeed(name: str, stage: int, bf16: Facts, **options: str) -> Row:
    return Row(name, stage, "deepspeed", "deepspeed_peer:build", {"fp32": _FP32, "bf16": bf16}, options)


def _ours(stage: int) -> list[Row]:
    build = "shardwise_rows:build"
    # One microbatch's bf16 gradients travel as they are and are summed into the fp32 buffer.
    facts = {"fp32": _FP32, "bf16": Facts("fp32", "bf16", True)}
    rows = [
        Row(f"shardwise-{stage}-{short}", stage, "shardwise", build, facts, {"transport": transport})
        for short, transport in (("gloo", "torch"), ("shm", "shared_memory"))
    ]
    half = {"transport": "shared_memory", "grad": "bf16"}
    return [*rows, Row(f"shardwise-{stage}-shm-grad16", stage, "shardwise", build, {"bf16": _HALF}, half)]


ROWS: list[Row] = [
    Row("ddp", 0, "torch", "torch_peers:build_ddp", _BOTH_PURE),
    Row("ddp-autocast", 0, "torch", "torch_peers:build_ddp", {"bf16": _KEPT}, {"autocast": "yes"}),
    _deepspeed("deepspeed-0", 0, _HALF),
    *_ours(0),
    Row("torch-zero1", 1, "torch", "torch_peers:build_zero1", _BOTH_PURE),
    Row("torch-zero1-autocast", 1, "torch", "torch_peers:build_zero1", {"bf16": _KEPT}, {"autocast": "yes"}),
    _deepspeed("deepspeed-1", 1, _HALF),
    *_ours(1),
    Row("fsdp2-2", 2, "torch", "torch_peers:build_fsdp2", _BOTH_KEPT, {"reshard": "no"}),
    _deepspeed("deepspeed-2", 2, _HALF),
    *_ours(2),
    Row("fsdp2-3", 3, "torch", "torch_peers:build_fsdp2", _BOTH_KEPT, {"reshard": "yes"}),
    _deepspeed("deepspeed-3", 3, _HALF),
    _deepspeed("deepspeed-3-resident", 3, _HALF, resident="yes"),
    *_ours(3),
]


def select(patterns: list[str], dtype: str) -> list[Row]:
    """Rows that exist in ``dtype`` and match one of the patterns (shell wildcards; none means all)."""
    import fnmatch

    return [
        row
        for row in ROWS
        if dtype in row.facts and (not patterns or any(fnmatch.fnmatch(row.name, p) for p in patterns))
    ]
