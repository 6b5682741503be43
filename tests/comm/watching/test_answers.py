"""Answers come back from JSON as they were, and calls are alike where all members of a group must make them alike."""

import pytest

from shardwise.comm.watching.answers import AwaitedCall, OwnWork, RankAnswer, SlowRank, StartedCall


def test_an_answer_comes_back() -> None:
    said = RankAnswer(
        waits="rank 1: x",
        awaited=AwaitedCall(group="ranks 0,1", number=3, members=[0, 1]),
        works=[OwnWork(key="k", what="writing", seconds=1.5, is_main=True, stack="")],
        slow=SlowRank(rank=1, phase="reading", words="slow", time_ns=5),
        starts=[StartedCall(group="ranks 0,1", number=3, operation="barrier")],
    )
    assert RankAnswer.model_validate_json(said.model_dump_json(exclude_defaults=True)) == said


@pytest.mark.parametrize(
    ("operation", "change", "alike"),
    [
        ("all_reduce", {"elements": 5}, False),
        ("all_reduce", {"dtype": "float64"}, False),
        ("all_reduce", {"what": "another"}, False),
        ("all_reduce", {"site": "another"}, True),
        ("all_to_all", {"elements": 5}, True),
        ("send", {"operation": "receive", "elements": 5}, True),
        ("send", {"what": "another"}, False),
    ],
)
def test_what_members_of_a_group_must_have_in_common(
    operation: str, change: dict[str, object], alike: bool
) -> None:
    call = StartedCall(
        group="g", number=1, operation=operation, what="x", dtype="float32", elements=4, site="a:1"
    )
    other = call.model_copy(update=change)
    assert (call.likeness == other.likeness) == alike
