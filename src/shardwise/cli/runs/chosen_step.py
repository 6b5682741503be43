"""The option ``--step``: which of the steps of a run a command takes.

newest    the newest step that opens
best      the first of the steps that ``checkpoint.keep_best`` keeps, and the next of them if it is gone
NUMBER    the step of this number
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.base.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from shardwise.checkpoint import StepSummary

NEWEST, BEST = "newest", "best"
CHECKPOINTS = "checkpoints"
"""Name of the folder of steps in a run folder."""

StepOption = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="WHICH",
        help="Of a run or its checkpoints: newest, best (of checkpoint.keep_best), or the number of a step.",
    ),
]


def check_word(which: str) -> None:
    """Raise UsageError if the value of ``--step`` is none of its words and no number."""
    if which not in (NEWEST, BEST) and not (which.isascii() and which.isdigit()):
        raise UsageError(f"--step {which}: expected newest, best, or the number of a step")


def step_at(path: Path, which: str = NEWEST) -> "StepSummary":
    """Return a step at ``path``: a run folder, a folder of steps or a step.

    Args:
        path: Path of the run, of its steps or of one step.
        which: ``newest``, ``best``, or the number of a step, in digits.

    Raises:
        UsageError: if ``which`` is another word, or ``path`` is a step and not this one.
        CheckpointError: if there is no such step, or it does not open.
    """
    from shardwise.checkpoint import StepSummary, describe

    check_word(which)
    inside = path / CHECKPOINTS
    found = describe(inside if inside.is_dir() else path, check=False)
    if isinstance(found, StepSummary):
        if which == BEST or which.isdigit() and int(which) != found.step:
            raise UsageError(
                f"--step {which}: {path} is one step; give the run folder or its folder of steps"
            )
        return _opening((found,), path)
    if which == BEST:
        return _best(found.steps, path)
    if which.isdigit():
        same = [step for step in found.steps if step.path.name.startswith(f"step_{int(which):08d}")]
        if not same:
            names = ", ".join(step.path.name for step in found.steps[:5])
            raise CheckpointError(f"--step {which}: {path} has no such step; it has {names}")
        return _opening(same, path)
    return _opening(found.steps, path)


def _opening(steps: "Sequence[StepSummary]", path: Path) -> "StepSummary":
    """Return the first step that opens."""
    for step in steps:
        if not step.problem:
            return step
    raise CheckpointError(f"{path}: none of its {len(steps)} steps opens; the newest: {steps[0].problem}")


def _best(steps: "Sequence[StepSummary]", path: Path) -> "StepSummary":
    """Return the first of the best steps that opens, by the scores in the newest step that opens."""
    from shardwise.engine.state.saved_state import SavedState, best_steps

    newest = _opening(steps, path)
    ranked = best_steps(SavedState.of(newest.trainer, newest.path).engine.best)
    if not ranked:
        raise CheckpointError(
            f"--step best: no step of {path} was saved with a score; set checkpoint.keep_best and train.eval_every for "
            "shardwise train, or give engine.save a score"
        )
    opening = {step.step: step for step in reversed(steps) if not step.problem}
    for number, _ in ranked:
        if number in opening:
            return opening[number]
    raise CheckpointError(
        f"--step best: of the best steps {[number for number, _ in ranked]} of {path} none opens"
    )
