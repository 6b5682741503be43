"""``engine.monitor``: a writer for a script's own numbers, which are stored beside the engine's.

engine.monitor.write_events([("Train/accuracy", 0.9, engine.global_samples)])
"""

from collections.abc import Iterable

from shardwise.base.errors import UsageError
from shardwise.engine.step.monitor import Monitor


class EngineEvents:
    """The ``engine.monitor`` of one engine, whose steps have ``samples`` samples each."""

    def __init__(self, monitor: Monitor, samples: int | None):
        self._monitor = monitor
        self._samples = samples or 1

    @property
    def enabled(self) -> bool:
        """True: a script may always write numbers; they are dropped if no monitor is configured."""
        return True

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write numbers to the engine's monitor, on rank 0 only.

        Args:
            event_list: Tuples of (tag, number, samples trained on so far).

        Raises:
            UsageError: if an event is not such a tuple.
        """
        for event in event_list:
            if not isinstance(event, tuple | list) or len(event) != 3:
                raise UsageError(
                    f"write_events: expected (tag, number, samples so far), given {event!r:.100}"
                )
            tag, number, place = event
            self._monitor.send({tag: number}, int(place) // self._samples)
