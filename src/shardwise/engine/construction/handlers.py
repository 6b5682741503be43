"""The table from Kind to handler: the function that a rank calls for each Action of its list.

    F, B           of a stage: its module computes, by the schedule's executor or by the user's own Python
                   of a Unit: no hook reported the pass, so the walker went past it
    SEND, RECV     parallel/pipeline/executor.py
    BRING, UNSHARD, RESHARD, RECALL, REDUCE      parallel/zero/windows.py
    ASK, FETCH, DELIVER (and STEP of tables)     engine/parts/table_units.py
    SUM, NORM, DIRECT, TRUST, DEAL               engine/step/end.py
    ADOPT, LOAD, STEP, STORE                     engine/step/end.py

A new Kind needs a line in this table and a handler.
"""

from collections.abc import Callable, Mapping, Sequence

from shardwise.engine.parts.table_units import TableUnits
from shardwise.engine.step.end import StepEnd
from shardwise.parallel.pipeline.executor import ScheduleExecutor
from shardwise.parallel.zero.hooks import UnitHooks
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.plan.action import Action, Kind
from shardwise.plan.walker import Handler


def handlers_of(
    stages: Sequence[UnitHooks], end: StepEnd, tables: TableUnits, schedule: ScheduleExecutor | None
) -> Mapping[Kind, Handler]:
    """Return the handler of each Kind.

    Args:
        stages: hooks of this rank's stages; the Units of all stages are numbered consecutively.
        end: the end of a step.
        tables: the Units of embedding tables.
        schedule: the executor of a pipeline's schedule, or None.
    """
    hooks_of = [hooks for hooks in stages for _ in hooks.states]

    def of_unit(do: Callable[[UnitWindows, Action], None]) -> Handler:
        return lambda action: do(hooks_of[action.unit].windows, action)

    def computes(stage: Handler | None) -> Handler:
        def handle(action: Action) -> None:
            if action.unit >= 0:
                hooks_of[action.unit].passed_by(action)
            elif stage is not None:
                stage(action)

        return handle

    handlers: dict[Kind, Handler] = {
        Kind.F: computes(None if schedule is None else schedule.forward),
        Kind.B: computes(None if schedule is None else schedule.backward),
        Kind.BRING: of_unit(UnitWindows.bring),
        Kind.UNSHARD: of_unit(UnitWindows.unshard),
        Kind.RESHARD: of_unit(UnitWindows.reshard),
        Kind.RECALL: of_unit(UnitWindows.recall),
        Kind.REDUCE: of_unit(UnitWindows.reduce),
        Kind.ASK: tables.ask,
        Kind.FETCH: tables.passed_by,
        Kind.DELIVER: tables.deliver,
        Kind.SUM: end.sum,
        Kind.NORM: end.norm,
        Kind.DIRECT: end.direct,
        Kind.TRUST: end.trust,
        Kind.DEAL: end.deal,
        Kind.ADOPT: end.adopt,
        Kind.LOAD: end.load,
        Kind.STEP: end.step,
        Kind.STORE: end.store,
    }
    if schedule is not None:
        handlers |= {Kind.SEND: schedule.send, Kind.RECV: schedule.receive}
    return handlers
