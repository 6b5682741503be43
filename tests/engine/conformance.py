"""What a rank did in its steps beside what the Plan had for it."""

import sys
from typing import Any

from shardwise.plan.action import Action


class Conformance:
    """Looks at every step of ``engine`` from here on."""

    def __init__(self, engine: Any):
        self._planned = engine.plan.own.actions
        self.departures: list[str] = []
        """In words, by step; empty where the trace is the Plan, Action by Action."""
        engine.on_step.append(self._after)

    def _after(self, engine: Any, result: Any) -> None:
        trace, planned = engine.trace, self._planned
        self._planned = engine.plan.own.actions
        text = first_difference(tuple(trace.actions), planned)
        if text or trace.divergences or result.divergences:
            self.departures.append(f"step {result.step}: {text}; {trace.divergences[:3]}")
            print(f"rank {engine.world.rank}, {self.departures[-1]}", file=sys.stderr)
        if any(stop < start for start, stop in zip(trace.starts_s, trace.stops_s, strict=True)):
            self.departures.append(f"step {result.step}: an Action ended before it began")


def evaluation_departures(engine: Any, batches: list[Any]) -> list[str]:
    """What an evaluation of ``batches`` did beside its list, in words. Collective."""
    parts = engine._parts
    piped = parts.mesh.pp > 1
    planned = parts.program.forward(len(batches)) if piped else parts.hooks[0].lists.forward()
    engine.evaluate([(batch, 1.0) for batch in batches])
    trace = parts.walker.last_aside
    text = first_difference(tuple(trace.actions), tuple(planned))
    return [text] * bool(text) + trace.divergences


def first_difference(done: tuple[Action, ...], planned: tuple[Action, ...]) -> str:
    """Where a trace leaves the Plan; "" where it does not."""
    if done == planned:
        return ""
    pairs = zip((*done, None), (*planned, None), strict=False)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    did = " ".join(map(str, done[place : place + 4])) or "nothing"
    had = " ".join(map(str, planned[place : place + 4])) or "nothing"
    return f"Action {place}: did {did}, the Plan has {had}"
