"""Instructions of a pipeline's stages: those of all stages fit together."""

from typing import Any

import pytest

from shardwise.deepspeed.training.instructions import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)


def slots(steps: Any, kind: type) -> dict[int, int]:
    """The slot of each instruction of a kind, counted."""
    places = [slot for slot, step in enumerate(steps) for each in step if type(each) is kind]
    return dict(enumerate(places))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_schedules_of_all_stages_fit_together(stages: int, microbatches: int) -> None:
    """What one stage sends in a slot the other receives in the same slot, and every pass has its slot."""
    trains = [list(TrainSchedule(microbatches, stages, stage)) for stage in range(stages)]
    infers = [list(InferenceSchedule(microbatches, stages, stage)) for stage in range(stages)]
    for stage, steps in enumerate(trains):
        assert slots(steps, ForwardPass) == {m: 2 * m + stage for m in range(microbatches)}
        assert slots(steps, BackwardPass) == {m: 2 * m + 2 * stages - 1 - stage for m in range(microbatches)}
        assert len(steps) == 2 * (microbatches + stages - 1)
        assert [type(each).__name__ for each in steps[-1][-3:]] == [
            "ReduceTiedGrads",
            "ReduceGrads",
            "OptimizerStep",
        ]
    for stage in range(stages - 1):
        for steps in (trains, infers):
            assert slots(steps[stage], SendActivation) == slots(steps[stage + 1], RecvActivation)
        assert slots(trains[stage], RecvGrad) == slots(trains[stage + 1], SendGrad)
    for steps in infers:
        assert len(slots(steps, ForwardPass)) == microbatches
    assert len(list(DataParallelSchedule(microbatches, 1, 0))) == microbatches
    with pytest.raises(NotImplementedError, match="yields its steps"):
        next(PipeSchedule(1, 1, 0))
