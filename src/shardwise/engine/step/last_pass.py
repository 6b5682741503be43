"""The end of the last backward pass of a step: no more gradients are added, and those of the step can be summed.

The list of a step ends with its last pass. Whether a backward pass is the last one may be known only afterwards, when
the caller asks for the gradients or for the update; the reductions of that pass then run late, in one place.
"""

import torch

from shardwise.base.errors import UsageError
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.step.end import finish_reductions
from shardwise.plan.action import Kind


def end_passes(parts: EngineParts) -> None:
    """End the backward passes of this step: nothing more is added to its gradients.

    The step's list ends with the last pass. If that pass was not known to be the last one, its Units are reduced now. A
    second call does nothing.
    """
    step, walker = parts.accumulation, parts.walker
    for hooks in parts.hooks:
        hooks.recover()
    if step.is_summed:
        return
    parts.program.follow(step.passes)
    last = {(Kind.REDUCE, step.passes - 1), (Kind.ARRIVE, step.passes - 1)}
    late = [action for action in parts.program.step() if (action.kind, action.microbatch) in last]
    missing = {unit for hooks in parts.hooks for unit in hooks.windows.not_reduced}
    late = [action for action in late if action.unit in missing]
    if late:
        walker.insert(late, "nobody knew that the backward pass was the last one of its step")
    step.is_summed = True


def settled_divisor(parts: EngineParts) -> float:
    """Sum all gradients where their masters lie, and return the divisor that turns the sums into means. Collective.

    Raises:
        UsageError: if microbatches of the step have still to run.
    """
    step = parts.accumulation
    if not step.is_complete:
        raise UsageError(
            f"gradients: {step.done + bool(step.backwards)} of {step.microbatches} microbatches have run; call it "
            "after the last backward and before step()"
        )
    end_passes(parts)
    parts.walker.run(until=lambda action: action.kind is Kind.NORM)  # SUM comes before it
    weight = torch.tensor([float(step.weight)], dtype=torch.float64, device=parts.device)
    parts.dp.all_reduce(weight, "the summed weights", purpose="control").wait()
    finish_reductions(parts.trained)
    return step.divisor_of(float(weight))
