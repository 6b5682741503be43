"""A warning for backward passes that no ``engine.step()`` followed, when an engine closes or the program ends.

Cost: one callback at exit for each engine that is not closed, registered by its first backward pass.
"""

import atexit
import logging
import sys
import weakref

from shardwise.engine.parts.accumulation import Accumulation

_log = logging.getLogger(__name__)


class UnsteppedWarning:
    """A warning, given once, of the open microbatches of one engine.

    Args:
        accumulation: The microbatches of the running step.
        speaks: True on the rank that logs.
    """

    def __init__(self, accumulation: Accumulation, speaks: bool) -> None:
        self._accumulation = weakref.ref(accumulation)
        self._speaks = speaks
        self._is_watching = False

    def watch(self) -> None:
        """Register the callback at exit, once."""
        if not self._is_watching:
            self._is_watching = True
            atexit.register(self._at_exit)

    def close(self, is_calm: bool) -> None:
        """Unregister the callback, and warn of open microbatches.

        Args:
            is_calm: False if an exception is being raised; then no warning is given.
        """
        if self._is_watching:
            atexit.unregister(self._at_exit)
        if is_calm:
            self._warn("close")

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # an uncaught exception matters more
            self._warn("exit")

    def _warn(self, where: str) -> None:
        accumulation = self._accumulation()
        if accumulation is None or not accumulation.passes or not self._speaks:
            return
        count = accumulation.done + (accumulation.backwards > 0)
        were = "microbatch was" if count == 1 else "microbatches were"
        _log.warning(
            "%s: %d %s never stepped: %d backward passes have run since the last update, and their gradients are "
            "dropped. Call engine.step() after each microbatch; it updates after %d of them (batch.accumulation), or "
            "sooner after engine.set_boundary(True)",
            where,
            count,
            were,
            accumulation.passes,
            accumulation.microbatches,
        )
