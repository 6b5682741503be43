"""Techniques follow the step: a run has a follower for what it contains, and for nothing else."""

from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm.world import World
from shardwise.engine.parts import followers
from shardwise.engine.parts.followers import BucketSquares, StepFollower
from tests.engine import tables_net
from tests.engine.nets import Language, seeded
from tests.engine.test_parity import data

ALONE = World(0, 1)


def names(engine: Any) -> list[str]:
    return [type(each).__name__ for each in engine._parts.followers]


def test_a_plain_run_has_none() -> None:
    engine = shardwise.initialize(seeded(Language), {"zero": {"stage": 3}}, world=ALONE)
    assert names(engine) == []
    engine.close()


def test_tables_and_norms_of_units_follow() -> None:
    engine = tables_net.build(ALONE, monitor={"unit_norms": True})
    assert names(engine) == ["TablesFollower", "UnitNormsFollower"]
    engine.close()


class Counter(StepFollower):
    """Notes its calls, and adds one number to NORM."""

    name = "counter"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_backward(self, microbatch: int, weight: Any) -> None:
        self.calls.append(f"backward {microbatch} {float(weight):g}")

    def before_norm(self) -> None:
        self.calls.append("before norm")

    def numbers(self, squares: BucketSquares) -> Any:
        assert sum(len(each) for each in squares.of_buckets.values()) > 0
        return (1.0, torch.tensor(2.0))

    def settle(self, sums: Any, over_model: Any) -> None:
        self.calls.append(f"settle {sums} {over_model}")

    def end_step(self, applied: bool) -> None:
        self.calls.append(f"end {applied}")

    def after_step(self, step: int, trace: Any) -> None:
        self.calls.append(f"after {step}")

    def drop(self) -> None:
        self.calls.append("drop")


def followed(world: World) -> list[str]:
    engine = shardwise.initialize(seeded(Language), {"batch": {"accumulation": 2}}, world=world)
    counter = Counter()
    engine._parts.followers = (counter,)
    engine.train_step([data(world.rank)] * 2)
    engine.discard()
    engine.close()
    return counter.calls


@pytest.mark.parametrize("size", [1, 2])
def test_a_follower_is_called_at_each_point_of_a_step(ranks: Any, size: int) -> None:
    for calls in ranks(size).run(followed):
        weights = [call.split()[-1] for call in calls[:2]]
        assert calls == [
            f"backward 0 {weights[0]}",
            f"backward 1 {weights[1]}",
            "before norm",
            f"settle [{size}.0, {2 * size}.0] None",
            "end True",
            "after 1",
            "drop",
        ]


def test_every_follower_of_the_engine_is_one_of_a_technique() -> None:
    made = [
        each for each in vars(followers).values() if isinstance(each, type) and issubclass(each, StepFollower)
    ]
    assert len({each.name for each in made if each.name}) == len([each for each in made if each.name])
