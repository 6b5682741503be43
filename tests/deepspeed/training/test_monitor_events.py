"""A script's own numbers, beside the engine's."""

from typing import Any

import pytest

from shardwise.base.errors import UsageError
from shardwise.deepspeed.training.monitor_events import EngineEvents


class Kept:
    """A monitor that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, float], int]] = []

    def send(self, numbers: dict[str, float], step: int) -> None:
        self.sent.append((numbers, step))


def test_samples_become_steps() -> None:
    kept: Any = Kept()
    EngineEvents(kept, 8).write_events([("loss", 0.5, 16), ["rate", 0.1, 23]])
    EngineEvents(kept, None).write_events([("loss", 0.25, 3)])
    assert kept.sent == [({"loss": 0.5}, 2), ({"rate": 0.1}, 2), ({"loss": 0.25}, 3)]
    assert EngineEvents(kept, 8).enabled


@pytest.mark.parametrize("event", [("loss", 0.5), "loss", {"a": 1, "b": 2, "c": 3}])
def test_an_event_has_three_parts(event: Any) -> None:
    kept: Any = Kept()
    with pytest.raises(UsageError, match=r"expected \(tag, number, samples so far\)"):
        EngineEvents(kept, 8).write_events([event])
