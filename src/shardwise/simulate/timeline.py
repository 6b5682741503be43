"""The simulated timeline of a schedule.

Every rank walks its list. An Action starts when the rank is free and what it takes is there: a RECV its SEND, a pass of
a stage the same pass of the neighbouring stage. Sends do not wait for their receiver; the span of a RECV includes the
wait. Lists without SEND and RECV are priced as if messages took no time.

Cost: one look at each Action; a million take seconds.
"""

from collections.abc import Callable, Mapping, Sequence

from shardwise.plan.action import Action
from shardwise.plan.dataflow import walk
from shardwise.plan.timeline import Timeline


def timeline_of(lists: Mapping[int, Sequence[Action]], seconds: Callable[[Action], float]) -> Timeline:
    """Run ``lists`` (by rank); ``seconds`` says for how long an Action occupies its rank.

    Errors: PlanError where ranks wait for each other, or for an Action that is in no list.
    """
    return Timeline.of(walk(lists, seconds))
