"""The handlers: the function that a rank calls for each Action of its list.

The table of Kinds (plan/kinds.py) names the object and the method of each Kind; this module resolves the names:

    passes       F, B and I: of a stage by the schedule's executor, or by the user's own Python; of a Unit that no hook
                 reported, so that the walker went past it. W: of a stage by the executor, of a Unit by its hooks
    schedule     SEND, RECV                                   parallel/pipeline/executor.py
    windows      LOAD_WEIGHT, UNSHARD, RESHARD, OFFLOAD, RELOAD, REDUCE, ARRIVE of a Unit     parallel/zero/windows.py
    tables       FETCH, DELIVER                                                     engine/parts/table_units.py
    experts      BALANCE                                      engine/parts/followers.py
    end          SUM, NORM, DIRECTION, TRUST_RATIO, ALL_TO_ALL, SWAP_WEIGHT, LOAD, STEP, STORE, WAIT
                                                                                    engine/step/end.py

Each method writes the row of its Action into the trace (``plan.trace.recorded``).
"""

from collections.abc import Callable, Mapping, Sequence

from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.step.end import StepEndHandlers
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.action import Action, Kind
from shardwise.plan.walker import Handler


class PassHandlers:
    """The handlers of F, B, I and W.

    Args:
        hooks_of: Hooks of the stage that has each Unit, by the Unit's number on the rank.
        schedule: The executor of a pipeline's schedule, or None.
    """

    def __init__(self, hooks_of: Sequence[UnitHooks], schedule: ScheduleExecutor | None):
        self._hooks_of = hooks_of
        self._schedule = schedule

    def forward(self, action: Action) -> None:
        """Run the forward pass of a stage; note a Unit's pass that no hook has reported."""
        if action.unit >= 0:
            self._hooks_of[action.unit].passed_by(action)
        elif self._schedule is not None:
            self._schedule.forward(action)

    def backward(self, action: Action) -> None:
        """Run the backward pass of a stage; note a Unit's pass that no hook has reported."""
        if action.unit >= 0:
            self._hooks_of[action.unit].passed_by(action)
        elif self._schedule is not None:
            self._schedule.backward(action)

    def weights(self, action: Action) -> None:
        """Compute the gradients of weights that wait, of all Units of a stage or of one."""
        if action.unit >= 0:
            self._hooks_of[action.unit].add_weights(action)
        elif self._schedule is not None:
            self._schedule.weights(action)


def handlers_of(
    parts: EngineParts, end: StepEndHandlers, schedule: ScheduleExecutor | None
) -> Mapping[Kind, Handler]:
    """Return the handler of each Kind.

    Args:
        parts: the parts of the engine; the Units of all stages are numbered consecutively.
        end: the end of a step.
        schedule: the executor of a pipeline's schedule, or None.
    """
    hooks_of = [hooks for hooks in parts.hooks for _ in hooks.states]
    actors = {
        **{each.name: each for each in parts.followers if each.name},
        "passes": PassHandlers(hooks_of, schedule),
        "schedule": schedule,
        "tables": parts.program.tables,
        "end": end,
    }

    def of_windows(method: str) -> Handler:
        if len(parts.hooks) == 1:  # no call in between: this is done for every Action of every Unit
            bound: Handler = getattr(parts.hooks[0].windows, method)
            return bound
        do: Callable[[UnitWindows, Action], None] = getattr(UnitWindows, method)
        return lambda action: do(hooks_of[action.unit].windows, action)

    found: dict[Kind, Handler] = {}
    for kind in Kind:
        actor, method = kind.row.handler or ("", "")
        if actor == "windows":
            found[kind] = of_windows(method)
        elif actors.get(actor) is not None:
            found[kind] = getattr(actors[actor], method)
    return found
