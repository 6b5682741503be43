"""Records of calls for tests of verdicts."""

from shardwise.comm.watching.answers import StartedCall

GROUP = "ranks 0-2"


def call(number: int, what: str, elements: int = 4, group: str = GROUP) -> StartedCall:
    return StartedCall(
        group=group,
        number=number,
        operation="all_reduce",
        what=what,
        dtype="float32",
        elements=elements,
        site=f"train.py:{number}",
    )


def loop(steps: int, *left_out: int, names: str = "abc") -> list[StartedCall]:
    """Return the calls of a loop over ``names``, without those at the places ``left_out``."""
    every = [what for place, what in enumerate(names * steps) if place not in left_out]
    return [call(number, what) for number, what in enumerate(every, 1)]
