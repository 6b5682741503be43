"""The contenders as data. Needs no torch.

Contenders of one ``case`` do the same computation and are compared: tensor parallelism with or without a cut sequence,
or one schedule with one number of microbatches. Cases with as many microbatches take turns with one another.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

MICROBATCHES = (4, 8)
_TENSOR = {"no": "tensor parallelism", "yes": "tensor and sequence parallelism"}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
RECOMPUTED = ("1f1b", "zb_h1", "zb_v")
"""Schedules that also run with blocks that are computed again in the backward pass, with four microbatches."""


class Contender(NamedTuple):
    """One contender."""

    name: str
    case: str
    package: str
    """The package it needs besides torch."""
    build: str
    """``module:function`` in this folder; called as ``function(contender, setting)``."""
    ranks: int = 2
    microbatches: int = 1
    options: dict[str, str] = {}

    @property
    def ours(self) -> bool:
        return self.package == "shardwise"


def _ours(name: str, case: str, microbatches: int = 1, **options: str) -> Contender:
    return Contender(name, case, "shardwise", "ours:build", 2, microbatches, options)


def _single(case: str, microbatches: int) -> Contender:
    name = "single" if microbatches == 1 else f"single-{microbatches}"
    return Contender(name, case, "torch", "single:build", 1, microbatches)


def _dtensor(name: str, **options: str) -> Contender:
    return Contender(name, _TENSOR[options["sequence"]], "torch", "tensor_peer:build", 2, 1, options)


def _tensor() -> list[Contender]:
    rows = [
        _single(_TENSOR["no"], 1),
        _dtensor("dtensor", sequence="no", matrices="separate"),
        _dtensor("dtensor-fused", sequence="no", matrices="fused"),
        _dtensor("dtensor-sequence", sequence="yes", matrices="separate"),
        _dtensor("dtensor-sequence-fused", sequence="yes", matrices="fused"),
    ]
    for transport, short in (("torch", "gloo"), ("shared_memory", "shm")):
        for sequence, word in (("no", ""), ("yes", "-sequence")):
            options = {"kind": "tensor", "sequence": sequence, "transport": transport}
            rows.append(_ours(f"shardwise{word}-{short}", _TENSOR[sequence], **options))
    return rows


def _delayed(name: str, delay: int, recompute: str = "none") -> Contender:
    """``zb_h1`` whose gradients of weights follow those of inputs by ``delay`` microbatches; fewer take less memory."""
    word = "" if recompute == "none" else "-recompute"
    options = {"schedule": "zb_h1", "recompute": recompute, "kind": "pipeline", "transport": "shared_memory"}
    return _ours(
        f"shardwise-zb_h1-4-shm-{name}{word}", f"zb_h1{word}, 4", 4, **options, wgrad_delay=str(delay)
    )


def _default_cut(schedule: str, recompute: str = "none") -> Contender:
    """``schedule`` whose stages are cut by parameters, as without a partition in the configuration.

    The others have the uniform cut that torch's have. In a V it gives the embedding, the head and half of the blocks
    to rank 0.
    """
    word = "" if recompute == "none" else "-recompute"
    options = {"schedule": schedule, "recompute": recompute, "kind": "pipeline", "transport": "shared_memory"}
    name = f"shardwise-{schedule}-4-shm-parameters{word}"
    return _ours(name, f"{schedule}{word}, 4", 4, **options, partition="parameters")


def _pipeline(schedule: str, microbatches: int, recompute: str = "none") -> list[Contender]:
    word = "" if recompute == "none" else "-recompute"
    case = f"{schedule}{word}, {microbatches}"
    options = {"schedule": schedule, "recompute": recompute}
    name = f"torch-{schedule}-{microbatches}{word}"
    rows = [Contender(name, case, "torch", "pipeline_peer:build", 2, microbatches, options)]
    for transport, short in (("torch", "gloo"), ("shared_memory", "shm")):
        own = options | {"kind": "pipeline", "transport": transport}
        rows.append(_ours(f"shardwise-{schedule}-{microbatches}-{short}{word}", case, microbatches, **own))
    return rows


CONTENDERS: list[Contender] = [
    *_tensor(),
    *(
        row
        for microbatches in MICROBATCHES
        for row in [
            _single(f"gpipe, {microbatches}", microbatches),
            *(row for schedule in SCHEDULES for row in _pipeline(schedule, microbatches)),
        ]
    ),
    *(row for schedule in RECOMPUTED for row in _pipeline(schedule, 4, "full")),
    _delayed("near", 0),
    _delayed("far", 1, "full"),
    *(_default_cut(schedule, recompute) for schedule in ("1f1b", "zb_v") for recompute in ("none", "full")),
]


def select(patterns: list[str]) -> list[Contender]:
    """Those that match one of the patterns (shell wildcards; none means all)."""
    return [row for row in CONTENDERS if not patterns or any(fnmatch.fnmatch(row.name, p) for p in patterns)]


def turns(rows: list[Contender]) -> list[list[Contender]]:
    """The contenders that run side by side: tensor parallelism, then each number of microbatches."""
    keys = list(dict.fromkeys(row.microbatches for row in rows))
    return [[row for row in rows if row.microbatches == key] for key in keys]
