import pytest
from pydantic import ValidationError

from shardwise.parallel.pipeline.foreign_schedules import FOREIGN_SCHEDULES, ours_for
from shardwise.parallel.pipeline.policy import SCHEDULES, PipelinePolicy


def test_defaults_and_names_from_yaml() -> None:
    assert PipelinePolicy() == PipelinePolicy(schedule="1f1b", virtual_stages=1, partition="parameters")
    assert PipelinePolicy.model_validate({"partition": ["blocks.2", "blocks.5"]}).partition == (
        "blocks.2",
        "blocks.5",
    )
    assert PipelinePolicy(schedule="interleaved_1f1b", virtual_stages=2).virtual_stages == 2


def test_every_foreign_name_of_a_schedule_is_answered_with_keys_that_exist() -> None:
    for name, ours in FOREIGN_SCHEDULES.items():
        assert name not in SCHEDULES and ours_for(name.upper()) == ours
        first = ours.removeprefix("schedule: ").partition(" ")[0].rstrip(",;")
        assert first in SCHEDULES or first in ("mesh.pp:", "engine.evaluate"), name


@pytest.mark.parametrize(
    "given, says",
    [
        ({"schedule": "1f1"}, "did you mean '1f1b'"),
        ({"schedule": "gpipe", "virtual_stages": 2}, "set schedule: interleaved_1f1b, or virtual_stages: 1"),
        ({"schedule": "interleaved_1f1b"}, "set virtual_stages: 2, or schedule: 1f1b"),
        ({"virtual_stages": 0}, "greater than 0"),
        ({"partition": "uniformly"}, "did you mean 'uniform'"),
        ({"partition": "type:("}, "no regular expression of class names"),
        ({"partition": ["blocks.1", "blocks.1"]}, "'blocks.1' begins two stages"),
        ({"partition": []}, "names no block"),
        ({"partition": "measured"}, "partition: measured and seconds belong together.*blocks.json"),
        ({"seconds": "blocks.json"}, "partition is 'parameters' and seconds is 'blocks.json'"),
        ({"partition": "mesured"}, "did you mean 'measured'"),
        ({"schedule": "zb_v", "wgrad_delay": 1}, "leave wgrad_delay out, or set schedule: zb_h1"),
        ({"stages": 2}, "unknown key 'stages'"),
        (
            {"schedule": "ScheduleZBVZeroBubble"},
            "another tool's name of a schedule; here it is schedule: zb_v",
        ),
        ({"schedule": "Interleaved1F1B"}, "here it is schedule: interleaved_1f1b with virtual_stages"),
        ({"schedule": "TrainSchedule"}, "here it is schedule: 1f1b"),
        ({"schedule": "forward_backward_no_pipelining"}, "here it is mesh.pp: 1"),
    ],
)
def test_what_cannot_be_says_what_can(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PipelinePolicy.model_validate(given)


def test_recomputation_of_whole_blocks_leaves_no_products_waiting() -> None:
    """What waits for W are the inputs of layers, which recomputation frees; a delay that is given stays."""
    policy = PipelinePolicy(schedule="zb_h1")
    assert policy.beside_recomputation(True).wgrad_delay == 0
    assert policy.beside_recomputation(False) == policy
    far = PipelinePolicy(schedule="zb_h1", wgrad_delay=1)
    assert far.beside_recomputation(True) == far
    other = PipelinePolicy(schedule="zb_v")
    assert other.beside_recomputation(True) == other
