"""Collective calls of the engine: errors name the call, and state that the call is collective.

    @together                     for a collective method: the ranks meet before its first exchange
    @named                        for a collective method that may be called in every step: only its name in errors
    within(clock, call, context)  for a context whose entry and exit are collective, and whose body is the caller's

Calls that exchange nothing, as ``state_dict`` without cut weights, need no other rank and wait for none.

If only one rank makes such a call (``if engine.is_main: engine.save(...)``), it waits for the other ranks, which wait
for it in another call: the watch compares the calls of the ranks, and ends both within seconds
(comm/watching/watch.py).

Cost: a few microseconds a call; ``together`` some milliseconds, for one meeting over the store per group of ranks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from shardwise.comm.step_clock import StepClock

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _HasClock(Protocol):
    @property
    def clock(self) -> StepClock: ...


_E = TypeVar("_E", bound=_HasClock)


def together(method: Callable[Concatenate[_E, _P], _T]) -> Callable[Concatenate[_E, _P], _T]:
    """Decorate a collective method: add its name to errors, and let the ranks meet before its first exchange."""
    return _within_call(method, meets=True)


def named(method: Callable[Concatenate[_E, _P], _T]) -> Callable[Concatenate[_E, _P], _T]:
    """Decorate a collective method: add its name to the errors of its exchanges."""
    return _within_call(method, meets=False)


def _within_call(method: Callable[Concatenate[_E, _P], _T], meets: bool) -> Callable[Concatenate[_E, _P], _T]:
    @functools.wraps(method)
    def called(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.clock.within(f"engine.{method.__name__}()", meets):
            return method(self, *args, **kwargs)

    return called


@contextmanager
def within(clock: StepClock, call: str, context: AbstractContextManager[_T]) -> Iterator[_T]:
    """Enter and leave ``context`` as a part of the collective call ``call``; the body is not a part of it."""
    with clock.within(call, meets=True):
        entered = context.__enter__()
    error: tuple[Any, Any, Any] = (None, None, None)
    try:
        yield entered
    except BaseException as raised:
        error = type(raised), raised, raised.__traceback__
        with clock.within(call, meets=True):
            if not context.__exit__(*error):
                raise
        return
    with clock.within(call, meets=True):
        context.__exit__(*error)
