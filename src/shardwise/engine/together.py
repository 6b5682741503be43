"""Calls of the engine's that all ranks make: errors name the call, and say that it is collective.

    @together                     a method that is collective: the ranks meet before the first thing that it exchanges
    @named                        a method that is, and may be called in every step: its name alone
    within(clock, call, context)  a context whose entry and exit are, and whose body is the caller's

Calls that exchange nothing, as ``state_dict`` without cut weights, need no other rank, and none is waited for.

A rank that alone calls one of them (``if engine.is_main: engine.save(...)``) waits for the others, which wait for it
elsewhere: the watch compares what they are in, and ends both within seconds (comm/watch.py).

Cost: a few microseconds a call; ``together`` some milliseconds, for one meeting over the store per group of ranks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from shardwise.comm.collectives import Clock

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _HasClock(Protocol):
    @property
    def clock(self) -> Clock: ...


_E = TypeVar("_E", bound=_HasClock)


def together(method: Callable[Concatenate[_E, _P], _T]) -> Callable[Concatenate[_E, _P], _T]:
    """Return ``method`` with its name in errors and a meeting of the ranks before what it exchanges."""
    return _within_call(method, meets=True)


def named(method: Callable[Concatenate[_E, _P], _T]) -> Callable[Concatenate[_E, _P], _T]:
    """Return ``method`` with its name in the errors of what it exchanges."""
    return _within_call(method, meets=False)


def _within_call(method: Callable[Concatenate[_E, _P], _T], meets: bool) -> Callable[Concatenate[_E, _P], _T]:
    @functools.wraps(method)
    def called(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.clock.within(f"engine.{method.__name__}()", meets):
            return method(self, *args, **kwargs)

    return called


@contextmanager
def within(clock: Clock, call: str, context: AbstractContextManager[_T]) -> Iterator[_T]:
    """Enter and leave ``context`` within ``call``; its body is not."""
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
