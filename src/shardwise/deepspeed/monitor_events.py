"""``engine.monitor``: numbers of a script's own beside the engine's.

engine.monitor.write_events([("Train/accuracy", 0.9, engine.global_samples)])
"""

from collections.abc import Iterable

from shardwise.engine.monitor import Monitor


class EngineEvents:
    """``engine.monitor`` of one engine, whose steps have ``samples`` samples each."""

    def __init__(self, monitor: Monitor, samples: int | None):
        self._monitor = monitor
        self._samples = samples or 1

    @property
    def enabled(self) -> bool:
        """A script may write; where nothing is configured, nothing is kept."""
        return True

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Each a tag, a number, and the samples trained on so far. Rank 0 alone writes."""
        for tag, number, place in event_list:
            self._monitor.send({tag: float(number)}, int(place) // self._samples)
