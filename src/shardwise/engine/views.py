"""Looking at an engine from outside: its Plan, a pipeline's timeline, gradients, one line for a terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.config.run import RunConfig
from shardwise.engine import state
from shardwise.engine.metrics import agree
from shardwise.engine.parts import Parts
from shardwise.engine.pipeline import Pipeline
from shardwise.memory.ledger import PREDICTED
from shardwise.plan.action import Kind
from shardwise.plan.errors import UsageError
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline


def plan(parts: Parts, pipeline: Pipeline | None) -> Plan:
    """See ``Engine.plan``."""
    return parts.program.plan if pipeline is None else pipeline.plan()


def timeline(pipeline: Pipeline | None) -> tuple[Timeline, Timeline] | None:
    """See ``Engine.timeline``."""
    if pipeline is None:
        return None
    measured = pipeline.timeline()
    return pipeline.predicted(measured), measured


def graph_breaks(config: RunConfig) -> dict[str, int]:
    """See ``Engine.graph_breaks``."""
    if config.compile.scope == "none":
        return {}
    from torch._dynamo.utils import counters  # heavy, and needed by runs that compile alone

    return dict(counters["graph_break"])


def gradients(parts: Parts) -> dict[str, Tensor]:
    """See ``Engine.gradients``."""
    step = parts.accumulation
    if not step.is_complete:
        raise UsageError(
            f"gradients: {step.done} of {step.microbatches} microbatches have run; call it after the last backward "
            "and before step()"
        )
    for hooks in parts.hooks:
        hooks.recover()
    parts.walker.run(until=lambda action: action.kind is Kind.NORM)  # SUM comes before it
    weight = torch.tensor([step.weight], dtype=torch.float64, device=parts.device)
    parts.dp.all_reduce(weight, "the summed weights", purpose="control").wait()
    return state.gradients(parts, step.divisor_of(float(weight)))


def save_pretrained(parts: Parts, folder: str | Path, options: dict[str, Any]) -> None:
    """See ``Engine.save_pretrained``."""
    save: Callable[..., Any] | None = getattr(parts.model, "save_pretrained", None)
    if save is None:
        raise UsageError(
            f"save_pretrained: a {type(parts.model).__name__} has none of its own, as models of transformers do; "
            "save engine.state_dict(), or call engine.save(directory)"
        )
    whole = state.state_dict(parts)
    failed = None
    if parts.world.rank == 0:
        try:
            save(str(folder), state_dict=whole, **options)
        except Exception as error:
            failed = error
    if agree(parts, failed is not None) and failed is None:
        raise UsageError(f"save_pretrained: rank 0 could not write {folder}; its own error says why")
    if failed is not None:
        raise failed


def state_bytes(parts: Parts) -> dict[str, int]:
    """See ``Engine.state_bytes``."""
    held = parts.site.ledger.bytes_by_row()
    return {row: held[row] for row in PREDICTED if row in held}


def in_words(parts: Parts) -> str:
    """The mesh and the model in a few lines."""
    trained = sum(info.elements for info in parts.registry.of_kind("master"))
    every = sum(info.elements for info in parts.registry.of_kind("parameter"))
    held = sum(state_bytes(parts).values())
    return (
        f"shardwise.Engine({type(parts.model).__name__}: {every:,} parameters, {trained:,} trained; "
        f"mesh {parts.mesh}, ZeRO-{parts.config.zero.stage}; rank {parts.world.rank} of {parts.world.size} on "
        f"{parts.device}, {held:,} bytes of model state; {parts.progress.step_count} steps done)"
    )
