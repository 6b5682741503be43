import pytest
from pydantic import ValidationError

from shardwise.parallel.pipeline.policy import PipelinePolicy


def test_defaults_and_names_from_yaml() -> None:
    assert PipelinePolicy() == PipelinePolicy(schedule="1f1b", virtual_stages=1, partition="parameters")
    assert PipelinePolicy.model_validate({"partition": ["blocks.2", "blocks.5"]}).partition == (
        "blocks.2",
        "blocks.5",
    )
    assert PipelinePolicy(schedule="interleaved_1f1b", virtual_stages=2).virtual_stages == 2


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
        ({"stages": 2}, "unknown key 'stages'"),
    ],
)
def test_what_cannot_be_says_what_can(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PipelinePolicy.model_validate(given)
