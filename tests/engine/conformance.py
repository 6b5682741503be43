"""What a rank did in its steps beside what the Plan had for it: Actions, and the bytes that each of them sent."""

import sys
from collections import Counter
from typing import Any

from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Action, Kind

SILENT = (Kind.LOAD_WEIGHT, Kind.RESHARD, Kind.SWAP_WEIGHT, Kind.LOAD, Kind.STORE, Kind.WAIT)
"""Kinds that send nothing to other ranks."""


class Conformance:
    """Looks at every step of ``engine`` from here on."""

    def __init__(self, engine: Any):
        self._planned = engine.plan.own.actions
        self._counted: int | None = None
        self._aside = engine._parts.walker.last_aside
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
        self.departures += [f"step {result.step}: {each}" for each in self._bytes_beside(engine)]
        if any(stop < start for start, stop in zip(trace.starts_s, trace.stops_s, strict=True)):
            self.departures.append(f"step {result.step}: an Action ended before it began")

    def _bytes_beside(self, engine: Any) -> list[str]:
        """Bytes that rows of the last step have and the Plan does not, or the other way round."""
        trace, plan, found = engine.trace, engine.plan, []
        own, told = plan.own, Counter()
        for done, size in zip(trace.actions, trace.bytes, strict=True):
            if done.kind in SILENT and size:
                found.append(f"{done} sent {size} bytes; expected none")
            told[done.kind, done.unit] += size
        times = Counter((each.kind, each.unit) for each in trace.actions)
        for unit, strategy in zip(own.units, own.strategies, strict=True):
            if unit.has_rows:
                continue
            is_alone = max(each.microbatch for each in trace.actions) < 1
            price, of = unit_bytes(unit, strategy, plan.mesh, is_alone), unit.index
            gathers = told[Kind.UNSHARD, of], times[Kind.UNSHARD, of] * price.gather
            # What is still on its way at the end of the passes arrives in SUM or NORM.
            sums = told[Kind.REDUCE, of] + told[Kind.ARRIVE, of], times[Kind.REDUCE, of] * price.reduce
            if gathers[0] != gathers[1]:
                found.append(f"gathers of {unit.title} sent {gathers[0]} bytes; the Plan has {gathers[1]}")
            if sums[0] != sums[1] and not own.under_way:
                found.append(f"reductions of {unit.title} sent {sums[0]} bytes; the Plan has {sums[1]}")
        sent = sum(trace.bytes) + trace.outside_bytes
        before, self._counted = self._counted, engine.traffic.bytes
        # Other lists (evaluations, further passes) have traces of their own.
        is_alone = before is not None and engine._parts.walker.last_aside is self._aside
        if is_alone and sent != self._counted - before:
            found.append(f"rows have {sent} bytes, but {self._counted - before} were sent")
        self._aside = engine._parts.walker.last_aside
        return found


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
