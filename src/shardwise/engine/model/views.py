"""Functions that read an engine from outside: its Plan, the timeline of a step, gradients, one line for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.config.run import RunConfig
from shardwise.engine.parts.metrics import agree
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import state
from shardwise.engine.state.mapped_state import mapped_state_dict
from shardwise.engine.step.last_pass import settled_divisor
from shardwise.engine.step.pipeline import PipelineRunner
from shardwise.memory.ledger import PREDICTED
from shardwise.plan.action import Action
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline
from shardwise.simulate.price import replay_timeline


def plan(parts: EngineParts, pipeline: PipelineRunner | None) -> Plan:
    """Return the Plan in the order that the ranks follow now. Implements ``Engine.plan``."""
    return parts.program.plan if pipeline is None else pipeline.plan()


def timeline(parts: EngineParts, pipeline: PipelineRunner | None) -> tuple[Timeline, Timeline]:
    """Return (predicted, measured) of the last step. Implements ``Engine.timeline``."""
    if pipeline is None:
        measured = Timeline.of(parts.walker.last.spans(0))
        lists: Mapping[int, Sequence[Action]] = {
            rank: [span.action for span in measured.passes(rank)] for rank in measured.spans
        }
    else:
        measured, lists = pipeline.timeline(), pipeline.passes()
    typical = measured.typical_pass_s()
    predicted = replay_timeline(lists, lambda action: typical.get((action.kind, action.stage), 0.0))
    return predicted, measured


def graph_breaks(config: RunConfig) -> dict[str, int]:
    """Return the graph breaks of this process so far, by reason. Implements ``Engine.graph_breaks``."""
    if config.compile.scope == "none":
        return {}
    from torch._dynamo.utils import counters  # slow to import, and only needed by runs that compile

    return dict(counters["graph_break"])


def gradients(parts: EngineParts) -> dict[str, Tensor]:
    """Return the full mean gradients by name. Implements ``Engine.gradients``."""
    return state.gradients(parts, settled_divisor(parts))


def save_pretrained(parts: EngineParts, folder: str | Path, options: dict[str, Any]) -> None:
    """Save the whole model through its own ``save_pretrained``. Implements ``Engine.save_pretrained``."""
    save: Callable[..., Any] | None = getattr(parts.model, "save_pretrained", None)
    if save is None:
        raise UsageError(
            f"save_pretrained: a {type(parts.model).__name__} has none of its own, as models of transformers do; "
            "save engine.state_dict(), or call engine.save(directory)"
        )
    whole = mapped_state_dict(parts, Path(folder), trained_only=False, dtype=None)
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


def state_bytes(parts: EngineParts) -> dict[str, int]:
    """Return the bytes of model state on this rank by row. Implements ``Engine.state_bytes``."""
    held = parts.site.ledger.bytes_by_row()
    return {row: held[row] for row in PREDICTED if row in held}


def in_words(parts: EngineParts) -> str:
    """Return the mesh and the model in a few lines."""
    trained = sum(info.elements for info in parts.registry.of_kind("master"))
    every = sum(info.elements for info in parts.registry.of_kind("parameter"))
    held = sum(state_bytes(parts).values())
    return (
        f"shardwise.Engine({type(parts.model).__name__}: {every:,} parameters, {trained:,} trained; "
        f"mesh {parts.mesh}, ZeRO-{parts.config.zero.stage}; rank {parts.world.rank} of {parts.world.size} on "
        f"{parts.device}, {held:,} bytes of model state; {parts.progress.step_count} steps done)"
    )
